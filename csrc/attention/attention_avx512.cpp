#include "attention/codec_avx512.h"

#define CANTER_ISA avx512
#define CANTER_TABLE kAvx512Attention

#include "attention/attention_kernel.h"

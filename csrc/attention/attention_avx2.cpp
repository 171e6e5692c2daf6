#include "attention/codec_avx2.h"

#define CANTER_ISA avx2
#define CANTER_TABLE kAvx2Attention

#include "attention/attention_kernel.h"

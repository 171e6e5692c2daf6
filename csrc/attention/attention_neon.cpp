#include "attention/codec_neon.h"

#define CANTER_ISA neon
#define CANTER_TABLE kNeonAttention

#include "attention/attention_kernel.h"

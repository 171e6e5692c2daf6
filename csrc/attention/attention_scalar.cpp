#include "attention/codec_scalar.h"

#define CANTER_ISA scalar
#define CANTER_TABLE kScalarAttention

#include "attention/attention_kernel.h"

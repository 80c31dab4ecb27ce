// Norms and gated activations with AVX-512.
#include "cpu/isa.h"

#if HYDRA_X86
#define HYDRA_LEVEL avx512bf16
#define HYDRA_LANES 16
#define HYDRA_TARGET HYDRA_TARGET_AVX512BF16
#define HYDRA_BF16
#include "cpu/elementwise/best.h"
#include "cpu/elementwise/rows.h"
#endif

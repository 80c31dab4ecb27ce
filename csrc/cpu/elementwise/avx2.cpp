// Norms and gated activations with AVX2, FMA and F16C.
#include "cpu/isa.h"

#if HYDRA_X86
#define HYDRA_LEVEL avx2
#define HYDRA_LANES 8
#define HYDRA_TARGET HYDRA_TARGET_AVX2
#include "cpu/elementwise/best.h"
#include "cpu/elementwise/rows.h"
#endif

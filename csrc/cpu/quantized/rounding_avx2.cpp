// Rounding of weights with AVX2 and F16C.
#include "cpu/isa.h"

#if HYDRA_X86
#define HYDRA_LEVEL avx2
#define HYDRA_LANES 8
#define HYDRA_TARGET HYDRA_TARGET_AVX2
#include "cpu/quantized/rounding_rows.h"
#endif

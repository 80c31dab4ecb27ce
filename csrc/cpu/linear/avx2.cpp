// Products for processors with AVX2, FMA and F16C.
#include "cpu/isa.h"

#if HYDRA_X86
#define HYDRA_LEVEL avx2
#define HYDRA_LANES 8
#define HYDRA_TARGET HYDRA_TARGET_AVX2
#include "cpu/linear/fma.h"

namespace hydra::avx2 {

HYDRA_TARGET void linear_part(const LinearCall& call, const LinearPart& part) { multiply_part(call, part); }

}  // namespace hydra::avx2
#endif

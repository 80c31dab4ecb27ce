// Products for processors with AVX-512; those with its BF16 instructions use them for all rows but bf16.
#include "cpu/isa.h"

#if HYDRA_X86
#define HYDRA_LEVEL avx512
#define HYDRA_LANES 16
#define HYDRA_TARGET HYDRA_TARGET_AVX512
#include "cpu/linear/fma.h"

namespace hydra::avx512 {

HYDRA_TARGET void linear_part(const LinearCall& call, const LinearPart& part) { multiply_part(call, part); }

}  // namespace hydra::avx512
#endif

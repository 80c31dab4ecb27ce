// Products for processors without AVX2, and for other architectures: four lanes as the compiler sees fit.
#define HYDRA_LEVEL scalar
#define HYDRA_LANES 4
#define HYDRA_TARGET
#include "cpu/linear/fma.h"

namespace hydra::scalar {

void linear_part(const LinearCall& call, const LinearPart& part) { multiply_part(call, part); }

}  // namespace hydra::scalar

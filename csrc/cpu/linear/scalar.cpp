// Products for processors without AVX2, and for other architectures: four lanes as the compiler sees fit.
#define HYDRA_LEVEL scalar
#define HYDRA_LANES 4
#define HYDRA_TARGET
#include "cpu/linear/fma.h"

namespace hydra::scalar {

void linear_part(const LinearCall& call, const LinearPart& part) {
  if (call.weight.dtype == DType::f32) return multiply_part<float>(call, part);
  if (call.weight.dtype == DType::bf16) return multiply_part<bf16_t>(call, part);
  multiply_part<f16_t>(call, part);
}

}  // namespace hydra::scalar

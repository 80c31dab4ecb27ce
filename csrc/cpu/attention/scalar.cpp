// Attention without AVX2, and for other architectures.
#define HYDRA_LEVEL scalar
#define HYDRA_LANES 4
#define HYDRA_TARGET
#include "cpu/attention/in_float.h"

namespace hydra::scalar {

void attend(const AttentionCall& call, const AttentionTask& task) {
  switch (call.dtype) {
    case DType::f32:
      return attend_in_float<float>(call, task);
    case DType::bf16:
      return attend_in_float<bf16_t>(call, task);
    default:
      return attend_in_float<f16_t>(call, task);
  }
}

void merge_spans(const AttentionCall& call, const AttentionTask& task) {
  switch (call.dtype) {
    case DType::f32:
      return merge_in_float<float>(call, task);
    case DType::bf16:
      return merge_in_float<bf16_t>(call, task);
    default:
      return merge_in_float<f16_t>(call, task);
  }
}

}  // namespace hydra::scalar

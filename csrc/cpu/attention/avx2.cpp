// Attention with AVX2, FMA and F16C.
#include "cpu/isa.h"

#if HYDRA_X86
#define HYDRA_LEVEL avx2
#define HYDRA_LANES 8
#define HYDRA_TARGET HYDRA_TARGET_AVX2
#include "cpu/attention/in_float.h"

namespace hydra::avx2 {

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

}  // namespace hydra::avx2
#endif

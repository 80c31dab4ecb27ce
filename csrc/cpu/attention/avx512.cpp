// Attention in float32 sums with AVX-512; of bf16 where its BF16 instructions are missing.
#include "cpu/isa.h"

#if HYDRA_X86
#define HYDRA_LEVEL avx512
#define HYDRA_LANES 16
#define HYDRA_TARGET HYDRA_TARGET_AVX512
#include "cpu/attention/in_float.h"

namespace hydra::avx512 {

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

}  // namespace hydra::avx512
#endif

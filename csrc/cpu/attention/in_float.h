// Attention in float32 sums, of any storage type. Include after defining a level, see cpu/simd.h.
#pragma once

#include "cpu/attention/few_columns.h"

namespace hydra::HYDRA_LEVEL {

template <class T, class C>
HYDRA_TARGET void attend_rows(const AttentionCall& call, const AttentionTask& task) {
  if ((task.token_end - task.token_begin) * call.group() <= kColumnTile) {
    attend_with<FewFloatColumns<T, C>>(call, task);
  } else {
    attend_with<ManyFloatColumns<T, C>>(call, task);
  }
}

template <class T>
HYDRA_TARGET void attend_in_float(const AttentionCall& call, const AttentionTask& task) {
  call.quantized ? attend_rows<T, int8_t>(call, task) : attend_rows<T, T>(call, task);
}

template <class T>
HYDRA_TARGET void merge_in_float(const AttentionCall& call, const AttentionTask& task) {
  call.quantized ? merge_with<FloatMath<T, int8_t>>(call, task) : merge_with<FloatMath<T>>(call, task);
}

}  // namespace hydra::HYDRA_LEVEL

// The columns of a task, and the merge of what the spans of a cut sequence left for them. Include after defining a
// level, see cpu/simd.h.
//
// A column is one query of one head: column c of a KV head is token c / group, head c % group of the group.
#pragma once

#include "cpu/attention/softmax.h"

namespace hydra::HYDRA_LEVEL {

// The columns of a task: its query tokens times the query heads per KV head.
template <class Math>
struct TaskColumns {
  using Stored = typename Math::Stored;  // of queries and results

  const AttentionCall& call;
  const AttentionTask& task;
  const Sequence& sequence;
  int64_t dim, group, columns, sums_width;
  float factor;  // scale / ln(2): weights are powers of two

  HYDRA_TARGET TaskColumns(const AttentionCall& c, const AttentionTask& t) : call(c), task(t), sequence(*t.sequence) {
    dim = call.head_dim;
    group = call.group();
    columns = (task.token_end - task.token_begin) * group;
    sums_width = Math::sums_width(dim);
    factor = call.scale * 1.44269504088896341f;
  }

  // The number of keys that a column attends to.
  HYDRA_INLINE int64_t limit(int64_t column) const {
    return call.causal ? sequence.first_position + task.token_begin + column / group + 1 : sequence.num_keys;
  }

  HYDRA_INLINE Stored* result(int64_t head, int64_t column) const {
    const int64_t token = sequence.query_begin + task.token_begin + column / group;
    return static_cast<Stored*>(call.out) + (token * call.num_heads + head * group + column % group) * dim;
  }
};

// Merges the states of a sequence's spans into the result, in the order in which one thread would have merged them.
template <class Math>
HYDRA_TARGET void merge_with(const AttentionCall& call, const AttentionTask& task) {
  const TaskColumns<Math> shape(call, task);
  const int64_t width = partial_width(shape.dim), sums_width = partial_sums(shape.dim);
  for (int64_t head = task.head_begin; head < task.head_end; ++head) {
    for (int64_t c = 0; c < shape.columns; ++c) {
      float* sums = task.partials + (head * shape.columns + c) * width;
      float* total = sums + sums_width;
      const float* span = sums + task.span_stride;
      for (int64_t begin = kSpanKeys; begin < shape.limit(c); begin += kSpanKeys, span += task.span_stride) {
        const float* span_total = span + sums_width;
        merge_column(sums, total, total + kPartialTotal, span, span_total, span_total[kPartialTotal], shape.sums_width,
                     shape.factor);
      }
      Math::store_result(sums, 1.0f / sum(load(total)), shape.dim, shape.result(head, c));
    }
  }
}

}  // namespace hydra::HYDRA_LEVEL

// Cuts a call into tasks for the threads and chooses the instruction-set level. How it is cut changes no result.
#include "cpu/attention/attention.h"

#include <algorithm>
#include <numeric>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "cpu/isa.h"
#include "cpu/scratch.h"
#include "cpu/thread_pool.h"

namespace hydra {
namespace {

// Columns (query tokens times heads of a group) of one task: packing a key tile is shared by all of them, and their
// running sums must stay in the second-level cache.
constexpr int64_t kTaskColumns = 256;

// Weights and products that leave the normal range become 0 as long as this lives: the instructions for bf16 do that
// anyway, and others would be slow.
class FlushDenormals {
 public:
#if HYDRA_X86
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }  // 0x8000: results, 0x0040: operands
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  FlushDenormals() {}
#endif
};

void run_task(const AttentionCall& call, const AttentionTask& task) {
  const FlushDenormals flush;
#if HYDRA_X86
  const Isa isa = current_isa();
  const bool in_bf16 = call.dtype == DType::bf16 && !call.quantized;
  if (isa == Isa::amx && in_bf16) return amx::attend_bf16(call, task);
  if (isa >= Isa::avx512bf16 && in_bf16) return avx512bf16::attend_bf16(call, task);
  if (isa >= Isa::avx512) return avx512::attend(call, task);
  if (isa == Isa::avx2) return avx2::attend(call, task);
#endif
  scalar::attend(call, task);
}

void run_merge(const AttentionCall& call, const AttentionTask& task) {
  const FlushDenormals flush;
#if HYDRA_X86
  const Isa isa = current_isa();  // tiles of AMX leave sums as AVX-512 does
  if (isa >= Isa::avx512bf16 && call.dtype == DType::bf16 && !call.quantized) {
    return avx512bf16::merge_spans_bf16(call, task);
  }
  if (isa >= Isa::avx512) return avx512::merge_spans(call, task);
  if (isa == Isa::avx2) return avx2::merge_spans(call, task);
#endif
  scalar::merge_spans(call, task);
}

int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The division of a call: its tasks, and the results to merge after them.
class Cut {
 public:
  explicit Cut(const AttentionCall& call) : call_(call), threads_(num_threads()) {
    for (int64_t i = 0; i < call.num_sequences; ++i) {
      const Sequence& sequence = call.sequences[i];
      if (is_short(sequence)) short_keys_ += sequence.num_keys;
      if (is_long(sequence)) long_tasks_ += long_blocks(sequence) * call.num_kv_heads;
    }
    float* partials = reserve_partials();
    for (int64_t i = 0; i < call.num_sequences; ++i) {
      const Sequence& sequence = call.sequences[i];
      if (is_long(sequence)) {
        add_long(sequence);
      } else if (is_short(sequence) && spreads(sequence)) {
        partials = add_spans(sequence, partials);
      } else if (is_short(sequence)) {
        add_heads(tasks, {&sequence, 0, sequence.num_queries}, pieces());
      }
    }
  }

  std::vector<AttentionTask> tasks, merges;

 private:
  bool is_short(const Sequence& sequence) const {
    return sequence.num_queries > 0 && sequence.num_queries * call_.group() <= kColumnTile;
  }

  bool is_long(const Sequence& sequence) const { return sequence.num_queries * call_.group() > kColumnTile; }

  // True if one head of this sequence exceeds a thread's share of the short ones, so that it is divided into spans.
  bool spreads(const Sequence& sequence) const {
    return call_.causal && threads_ > 1 && sequence.num_keys > kSpanKeys &&
           sequence.num_keys * threads_ > short_keys_ * call_.num_kv_heads;
  }

  // With many requests there is enough to share out without cutting any.
  int64_t pieces() const { return call_.num_sequences >= 8 * threads_ ? 1 : threads_; }

  static int64_t spans_of(const Sequence& sequence) { return divided_up(sequence.num_keys, kSpanKeys); }

  int64_t span_floats(const Sequence& sequence) const {
    return call_.num_heads * sequence.num_queries * partial_width(call_.head_dim);
  }

  float* reserve_partials() const {
    static thread_local Scratch scratch;
    int64_t floats = 0;
    for (int64_t i = 0; i < call_.num_sequences; ++i) {
      const Sequence& sequence = call_.sequences[i];
      if (is_short(sequence) && spreads(sequence)) floats += spans_of(sequence) * span_floats(sequence);
    }
    return floats ? static_cast<float*>(scratch.reserve(floats * 4)) : nullptr;
  }

  // Few queries: the time goes into reading keys, which lie with all heads of a token side by side, so a task takes a
  // range of heads and reads whole pieces of memory.
  void add_heads(std::vector<AttentionTask>& list, AttentionTask task, int64_t pieces) const {
    const int64_t heads = call_.num_kv_heads;
    pieces = std::min(pieces, heads);
    for (int64_t piece = 0; piece < pieces; ++piece) {
      task.head_begin = heads * piece / pieces;
      task.head_end = heads * (piece + 1) / pieces;
      list.push_back(task);
    }
  }

  // A long context of few heads: spans of keys, each with as many heads as leave every thread two tasks.
  float* add_spans(const Sequence& sequence, float* partials) {
    const int64_t spans = spans_of(sequence);
    AttentionTask task{&sequence, 0, sequence.num_queries};
    task.partials = partials;
    task.span_stride = span_floats(sequence);
    add_heads(merges, task, threads_);
    const int64_t wanted = divided_up(2 * threads_ * sequence.num_keys, short_keys_);
    for (; task.span < spans; ++task.span, task.partials += task.span_stride) {
      add_heads(tasks, task, divided_up(wanted, spans));
    }
    return task.partials;
  }

  // Many queries: a task takes one head and a block of tokens; later blocks see more keys and start first.
  void add_long(const Sequence& sequence) {
    // Fewer tokens than a task could take where threads would be idle, down to two column tiles.
    const int64_t max_blocks = divided_up(sequence.num_queries * call_.group(), 2 * kColumnTile);
    const int64_t scale = std::max<int64_t>(1, threads_ / long_tasks_);
    const int64_t blocks = std::max(long_blocks(sequence), std::min(max_blocks, long_blocks(sequence) * scale));
    // Whole column tiles: no half-filled tile but the sequence's last.
    const int64_t unit = kColumnTile / std::gcd(call_.group(), int64_t{kColumnTile});
    const int64_t tokens = divided_up(divided_up(sequence.num_queries, blocks), unit) * unit;
    for (int64_t begin = (sequence.num_queries - 1) / tokens * tokens; begin >= 0; begin -= tokens) {
      for (int64_t head = 0; head < call_.num_kv_heads; ++head) {
        tasks.push_back({&sequence, begin, std::min(begin + tokens, sequence.num_queries), head, head + 1});
      }
    }
  }

  int64_t long_blocks(const Sequence& sequence) const {
    return divided_up(sequence.num_queries, std::max<int64_t>(1, kTaskColumns / call_.group()));
  }

  const AttentionCall& call_;
  const int64_t threads_;
  int64_t short_keys_ = 0;  // of all short sequences together
  int64_t long_tasks_ = 0;  // at least that many
};

template <class Fn>
void run_all(const std::vector<AttentionTask>& tasks, Fn&& fn) {
  constexpr int64_t kMostParts = 4096;
  const int64_t count = static_cast<int64_t>(tasks.size()), parts = std::min(count, kMostParts);
  run_parts(static_cast<int>(parts), [&](int part) {
    for (int64_t i = part; i < count; i += parts) fn(tasks[static_cast<size_t>(i)]);
  });
}

}  // namespace

void attention(const AttentionCall& call) {
  const Cut cut(call);
  run_all(cut.tasks, [&](const AttentionTask& task) { run_task(call, task); });
  run_all(cut.merges, [&](const AttentionTask& task) { run_merge(call, task); });
}

}  // namespace hydra

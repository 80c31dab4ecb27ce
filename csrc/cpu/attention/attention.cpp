// Cuts a call into tasks for the threads and chooses the instruction-set level. How it is cut changes no result.
#include "cpu/attention/attention.h"

#include <algorithm>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "cpu/isa.h"
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
  if (isa == Isa::amx && call.dtype == DType::bf16) return amx::attend_bf16(call, task);
  if (isa >= Isa::avx512bf16) return avx512::attend(call, task);
  if (isa == Isa::avx2) return avx2::attend(call, task);
#endif
  scalar::attend(call, task);
}

// Few queries: the time goes into reading keys, which lie with all heads of a token side by side, so a task takes a
// range of heads and reads whole pieces of memory.
void add_short(const AttentionCall& call, const Sequence& sequence, int64_t pieces, std::vector<AttentionTask>& tasks) {
  pieces = std::min(pieces, call.num_kv_heads);
  for (int64_t piece = 0; piece < pieces; ++piece) {
    tasks.push_back({&sequence, 0, sequence.num_queries, call.num_kv_heads * piece / pieces,
                     call.num_kv_heads * (piece + 1) / pieces});
  }
}

// Many queries: a task takes one head and a block of tokens; later blocks see more keys and start first.
void add_long(const AttentionCall& call, const Sequence& sequence, std::vector<AttentionTask>& tasks) {
  const int64_t most = std::max<int64_t>(1, kTaskColumns / call.group());
  const int64_t blocks = (sequence.num_queries + most - 1) / most;
  // Whole column tiles for any group: no half-filled tile but the sequence's last.
  const int64_t tokens = ((sequence.num_queries + blocks - 1) / blocks + kColumnTile - 1) / kColumnTile * kColumnTile;
  for (int64_t begin = (sequence.num_queries - 1) / tokens * tokens; begin >= 0; begin -= tokens) {
    for (int64_t head = 0; head < call.num_kv_heads; ++head) {
      tasks.push_back({&sequence, begin, std::min(begin + tokens, sequence.num_queries), head, head + 1});
    }
  }
}

std::vector<AttentionTask> cut(const AttentionCall& call) {
  std::vector<AttentionTask> tasks;
  const int64_t threads = num_threads();
  // With many requests there is enough to share out without cutting any.
  const int64_t pieces = call.num_sequences >= 8 * threads ? 1 : threads;
  for (int64_t i = 0; i < call.num_sequences; ++i) {
    const Sequence& sequence = call.sequences[i];
    if (sequence.num_queries == 0) continue;
    if (sequence.num_queries * call.group() <= kColumnTile) {
      add_short(call, sequence, pieces, tasks);
    } else {
      add_long(call, sequence, tasks);
    }
  }
  return tasks;
}

}  // namespace

void attention(const AttentionCall& call) {
  const std::vector<AttentionTask> tasks = cut(call);
  const int64_t count = static_cast<int64_t>(tasks.size());
  constexpr int64_t kMostParts = 4096;
  const int64_t parts = std::min(count, kMostParts);
  run_parts(static_cast<int>(parts), [&](int part) {
    for (int64_t i = part; i < count; i += parts) run_task(call, tasks[static_cast<size_t>(i)]);
  });
}

}  // namespace hydra

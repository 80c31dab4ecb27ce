// The choice of the level and the cut of the rows over threads.
#include "cpu/elementwise/elementwise.h"

#include <algorithm>

#include "cpu/isa.h"
#include "cpu/thread_pool.h"

namespace hydra {
namespace {

void run_level(RowsOp op, const RowsCall& call, int64_t begin, int64_t end) {
#if HYDRA_X86
  const Isa isa = current_isa();
  if (isa >= Isa::avx512bf16) return avx512bf16::run_rows(op, call, begin, end);
  if (isa >= Isa::avx2) return avx2::run_rows(op, call, begin, end);
#endif
  scalar::run_rows(op, call, begin, end);
}

void run_level(const BestCall& call, int64_t begin, int64_t end) {
#if HYDRA_X86
  const Isa isa = current_isa();
  if (isa >= Isa::avx512bf16) return avx512bf16::best_of_rows(call, begin, end);
  if (isa >= Isa::avx2) return avx2::best_of_rows(call, begin, end);
#endif
  scalar::best_of_rows(call, begin, end);
}

// Rows of a thread: about ten microseconds of work, below which waking it does not pay.
int64_t min_rows(int64_t columns) {
  constexpr int64_t kElementsPerThread = 1 << 15;
  return std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, columns));
}

}  // namespace

void best_of_rows(const BestCall& call) {
  parallel_for(call.rows, min_rows(call.columns),
               [&](int64_t begin, int64_t end) { run_level(call, begin, end); });
}

void run_rows(RowsOp op, const RowsCall& call) {
  parallel_for(call.rows, min_rows(call.columns),
               [&](int64_t begin, int64_t end) { run_level(op, call, begin, end); });
}

}  // namespace hydra

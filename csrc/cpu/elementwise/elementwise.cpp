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

}  // namespace

void run_rows(RowsOp op, const RowsCall& call) {
  // About ten microseconds of work per thread, below which waking it does not pay.
  constexpr int64_t kElementsPerThread = 1 << 15;
  parallel_for(call.rows, std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, call.columns)),
               [&](int64_t begin, int64_t end) { run_level(op, call, begin, end); });
}

}  // namespace hydra

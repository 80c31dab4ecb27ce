// The choice of the level and the cut of the work over threads.
#include "cpu/delta/delta.h"

#include <algorithm>
#include <vector>

#include "check.h"
#include "cpu/isa.h"
#include "cpu/thread_pool.h"

namespace hydra {
namespace {

struct Level {
  int (*lanes)();
  void (*conv)(const ConvCall&, int64_t, int64_t);
  void (*prepare)(const RuleCall&, int64_t, int64_t);
  void (*rule)(const RuleCall&, int64_t, int64_t);
};

Level level() {
#if HYDRA_X86
  const Isa isa = current_isa();
  if (isa >= Isa::avx512bf16) {
    return {avx512bf16::lanes, avx512bf16::conv_vectors, avx512bf16::prepare_tokens, avx512bf16::rule_tasks};
  }
  if (isa >= Isa::avx2) return {avx2::lanes, avx2::conv_vectors, avx2::prepare_tokens, avx2::rule_tasks};
#endif
  return {scalar::lanes, scalar::conv_vectors, scalar::prepare_tokens, scalar::rule_tasks};
}

// About ten microseconds of work per thread, below which waking it does not pay.
int64_t grain(int64_t work_of_one) { return std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, work_of_one)); }

}  // namespace

void StateRows::check() const {
  HYDRA_CHECK(layer >= 0 && layer < layers, "layer: expected 0 to ", layers - 1, ", got ", layer);
  HYDRA_CHECK(cu_q[0] == 0 && cu_q[rows] == tokens, "rows: expected cu_q from 0 to ", tokens, ", got ", cu_q[0], " to ",
              cu_q[rows]);
  for (int64_t row = 0; row < rows; ++row) {
    HYDRA_CHECK(cu_q[row] <= cu_q[row + 1], "rows: expected cu_q to rise, row ", row, " does not");
    for (const int64_t place : {reads[row], writes[row]}) {
      HYDRA_CHECK(place >= 0 && place < places, "rows: expected places 0 to ", places - 1, ", got ", place);
    }
  }
}

void run_conv(const ConvCall& call) {
  call.rows.check();
  HYDRA_CHECK(call.taps >= 2 && call.taps <= kMostTaps, "weight: expected 2 to ", kMostTaps, " taps, got ", call.taps);
  const Level chosen = level();
  const int64_t vectors = (call.channels + chosen.lanes() - 1) / chosen.lanes();
  parallel_for(vectors, grain(call.rows.tokens * call.taps * chosen.lanes()),
               [&](int64_t begin, int64_t end) { chosen.conv(call, begin, end); });
}

void run_rule(RuleCall call) {
  call.rows.check();
  HYDRA_CHECK(call.key_dim >= 1 && call.key_dim <= kMostKeyDim, "q: expected heads of 1 to ", kMostKeyDim, ", got ",
              call.key_dim);
  const int64_t tokens = call.rows.tokens, keys = call.key_heads * call.key_dim;
  std::vector<float> scratch(tokens * 2 * (keys + call.heads));
  call.keys = scratch.data();
  call.queries = call.keys + tokens * keys;
  call.decays = call.queries + tokens * keys;
  call.strengths = call.decays + tokens * call.heads;
  const Level chosen = level();
  parallel_for(tokens, grain(2 * keys + 32 * call.heads),
               [&](int64_t begin, int64_t end) { chosen.prepare(call, begin, end); });
  const int64_t vectors = (call.value_dim + chosen.lanes() - 1) / chosen.lanes();
  const int64_t tasks = call.rows.rows * call.heads * vectors;
  const int64_t work = tasks ? tokens * call.heads * call.value_dim * call.key_dim / tasks : 1;
  parallel_for(tasks, grain(work), [&](int64_t begin, int64_t end) { chosen.rule(call, begin, end); });
}

}  // namespace hydra

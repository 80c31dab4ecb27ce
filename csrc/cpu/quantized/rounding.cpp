// The rows of a weight that is rounded, cut for threads, and the choice of the level.
#include "cpu/quantized/rounding.h"

#include <algorithm>

#include "cpu/isa.h"
#include "cpu/thread_pool.h"

namespace hydra {

void round_weight(const RoundingCall& call) {
  constexpr int64_t kWeightsPerPart = 1 << 18;
  // Many parts, so that a thread that loses its core holds up little.
  const int64_t parts = std::clamp<int64_t>(call.num_out * call.num_in / kWeightsPerPart, 1, 8 * num_threads());
  run_parts(static_cast<int>(parts), [&](int part) {
    const int64_t begin = call.num_out * part / parts, end = call.num_out * (part + 1) / parts;
#if HYDRA_X86
    if (current_isa() >= Isa::avx2) return avx2::round_rows(call, begin, end);
#endif
    scalar::round_rows(call, begin, end);
  });
}

}  // namespace hydra

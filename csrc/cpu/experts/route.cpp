// The choice of experts, row by row in float32.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/experts/experts.h"
#include "cpu/thread_pool.h"

namespace hydra {
namespace {

// Puts the numbers of the `count` largest logits into `best`, by falling logit, of equal ones the lowest number first;
// NaN counts as infinity.
void choose(const float* logits, int64_t num_experts, int64_t count, int32_t* best) {
  const auto key = [&](int64_t expert) {
    return std::isnan(logits[expert]) ? std::numeric_limits<float>::infinity() : logits[expert];
  };
  int64_t found = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const float own = key(expert);
    if (found == count && !(own > key(best[count - 1]))) continue;
    int64_t place = found < count ? found++ : count - 1;
    for (; place > 0 && own > key(best[place - 1]); --place) best[place] = best[place - 1];
    best[place] = static_cast<int32_t>(expert);
  }
}

template <class T>
void route_row(const RouteCall& call, int64_t row, float* logits) {
  const T* source = static_cast<const T*>(call.logits) + row * call.stride;
  const int64_t columns = call.chosen + (call.shared ? 1 : 0);
  int32_t* experts = call.experts + row * columns;
  float* weights = call.weights + row * columns;
  for (int64_t i = 0; i < call.num_experts; ++i) logits[i] = to_float(source[i]);
  choose(logits, call.num_experts, call.chosen, experts);
  const float top = logits[experts[0]];
  float sum = 0.0f, chosen_sum = 0.0f;
  for (int64_t i = 0; i < call.num_experts; ++i) sum += std::exp(logits[i] - top);
  for (int64_t i = 0; i < call.chosen; ++i) {
    weights[i] = std::exp(logits[experts[i]] - top) / sum;
    chosen_sum += weights[i];
  }
  for (int64_t i = 0; i < call.chosen && call.renormalise; ++i) weights[i] /= chosen_sum;
  if (call.shared) {
    const float gate = to_float(static_cast<const T*>(call.shared)[row * call.shared_stride]);
    experts[call.chosen] = static_cast<int32_t>(call.num_experts);
    weights[call.chosen] = 1.0f / (1.0f + std::exp(-gate));
  }
}

}  // namespace

void route(const RouteCall& call) {
  constexpr int64_t kLogitsPerThread = 1 << 12;
  parallel_for(call.rows, ceil_div(kLogitsPerThread, call.num_experts), [&](int64_t begin, int64_t end) {
    std::vector<float> logits(static_cast<size_t>(call.num_experts));
    for (int64_t row = begin; row < end; ++row) {
      dispatch(call.dtype, [&](auto type) { route_row<decltype(type)>(call, row, logits.data()); });
    }
  });
}

}  // namespace hydra

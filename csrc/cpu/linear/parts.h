// Divides a product into rectangles of its result, one per part of the work, for weights of any format.
#pragma once

#include <algorithm>

#include "cpu/linear/linear.h"
#include "cpu/thread_pool.h"

namespace hydra {

// Threads worth waking: each should have about ten microseconds of work, or the hand-over costs more than it saves.
inline int useful_threads(int64_t weight_bytes, int64_t products) {
  constexpr int64_t kBytesPerThread = 128 << 10, kProductsPerThread = 1 << 22;
  const int64_t threads = std::max(weight_bytes / kBytesPerThread, products / kProductsPerThread);
  return static_cast<int>(std::clamp<int64_t>(threads, 1, num_threads()));
}

// Calls multiply(LinearPart) for parts that cover `rows` rows of a product with `weight`, each on one thread. Panels
// first: each weight is then read by one thread only. Rows too where there are fewer panels than threads. Several parts
// per thread where they are large enough, so that a thread that loses its core holds up only one.
template <class Weight, class Multiply>
void multiply_parts(const Weight& weight, int64_t rows, Multiply&& multiply) {
  const int threads = useful_threads(weight.num_bytes(), rows * weight.num_out * weight.num_in);
  const int64_t panels = weight.num_panels();
  if (threads == 1) return multiply(LinearPart{0, rows, 0, panels});
  constexpr int64_t kPanelsPerPart = 8, kPartsPerThread = 4;
  const int64_t pieces = std::clamp<int64_t>(panels / kPanelsPerPart, threads, kPartsPerThread * threads);
  const int across = static_cast<int>(std::min(pieces, panels));
  const int64_t row_units = ceil_div(rows, kPanel);
  const int down = static_cast<int>(std::clamp<int64_t>(threads / across, 1, row_units));
  run_parts(across * down, [&](int part) {
    const int64_t column = part % across, row = part / across;
    multiply(LinearPart{row * row_units / down * kPanel, std::min((row + 1) * row_units / down * kPanel, rows),
                        panels * column / across, panels * (column + 1) / across});
  });
}

}  // namespace hydra

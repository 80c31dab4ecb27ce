// Source pixels and weights of each result pixel along one axis.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/image/resize.h"

namespace hydra {

constexpr int kWeightBits = 22;  // fraction bits of a weight; a sum of 255 times weights below 2 fits 32 bits

// Result i is the sum over t of weight[i * taps + t] * source[first[i] + t]. Padding weights are zero; their source
// pixels may be past the end of the source.
struct Weights {
  int64_t taps = 0;  // per result, a multiple of 4
  std::vector<int32_t> first;
  std::vector<int32_t> weight;
};

// Results [begin, begin + count) of `size` from `source_size` pixels. Not for `nearest`.
Weights make_weights(Filter filter, int64_t source_size, int64_t size, int64_t begin, int64_t count);

// The source pixel of each of the results [begin, begin + count) for `nearest`.
std::vector<int32_t> nearest_pixels(int64_t source_size, int64_t size, int64_t begin, int64_t count);

}  // namespace hydra

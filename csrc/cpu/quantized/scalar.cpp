// Products for processors without AVX2, and for other architectures: four lanes as the compiler sees fit.
#define HYDRA_LEVEL scalar
#define HYDRA_LANES 4
#define HYDRA_TARGET
#include <algorithm>

#include "cpu/quantized/block.h"

namespace hydra::scalar {
namespace {

constexpr int kMostRows = 2;
constexpr int vectors_of(int) { return 4; }
constexpr int number_bytes(int) { return 1; }

void store_numbers(int8_t* target, vi numbers, int) {
  for (int lane = 0; lane < kLanes; ++lane) target[lane] = static_cast<int8_t>(numbers[lane]);
}

// The values of input k of a step, for the columns of vector v.
template <int kBits>
vi values_of(const uint8_t* step, int v, int k) {
  const auto halves = [&](int vector) {
    return *reinterpret_cast<const vu_memory*>(step + vector * kStepBytes + v * 16);
  };
  const int byte = k % 4 * 8, in_half = k % 8 / 4 * 4;
  if constexpr (kBits == 8) {
    return (vi)(halves(0) >> byte) & 255;
  } else if constexpr (kBits == 4) {
    return (vi)(halves(0) >> (byte + in_half)) & 15;
  } else {
    return ((vi)(halves(k / 8) >> (byte + in_half)) & 15) | ((vi)(halves(2) >> (byte + k / 4 * 2)) & 3) << 4;
  }
}

template <int kBits, int kRows, int kVectors>
void dot(vi (&sums)[kRows][kVectors], const int8_t* x, const uint8_t* weights, int64_t steps, const int32_t* from) {
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sums[r][v] = vi{} + from[r];
  }
  for (int64_t step = 0; step < steps; ++step, weights += step_bytes(kBits), x += step_inputs(kBits)) {
    for (int v = 0; v < kVectors; ++v) {
      for (int k = 0; k < step_inputs(kBits); ++k) {
        const vi w = values_of<kBits>(weights, v, k);
        for (int r = 0; r < kRows; ++r) sums[r][v] += w * static_cast<int32_t>(x[r * block_stride(kBits, 1) + k]);
      }
    }
  }
}

}  // namespace
}  // namespace hydra::scalar

// Included after the functions that they call.
#include "cpu/quantized/vectors.h"

#include "cpu/quantized/products.h"
#include "cpu/quantized/rows.h"

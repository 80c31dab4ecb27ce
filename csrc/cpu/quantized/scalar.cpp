// Products for processors without AVX2, and for other architectures: four lanes as the compiler sees fit.
#define HYDRA_LEVEL scalar
#define HYDRA_LANES 4
#define HYDRA_TARGET
#include <algorithm>

#include "cpu/quantized/quantized.h"
#include "cpu/simd.h"

namespace hydra::scalar {
namespace {

constexpr int kMostRows = 2;
constexpr int vectors_of(int) { return 4; }
constexpr int number_bytes(int) { return 1; }

void store_numbers(int8_t* target, vi numbers, int) {
  for (int lane = 0; lane < kLanes; ++lane) target[lane] = static_cast<int8_t>(numbers[lane]);
}

template <int kBits, int kRows, int kVectors>
void dot(vi (&sums)[kRows][kVectors], const int8_t* x, const uint8_t* weights, int64_t steps) {
  constexpr int kMask = kBits == 8 ? 255 : 15;
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sums[r][v] = vi{};
  }
  for (int64_t step = 0; step < steps; ++step, weights += kStepBytes, x += 32 / kBits) {
    for (int v = 0; v < kVectors; ++v) {
      const vu bytes = *reinterpret_cast<const vu_memory*>(weights + v * 16);
      for (int k = 0; k < 32 / kBits; ++k) {
        const vi w = (vi)(bytes >> (k % 4 * 8 + k / 4 * 4)) & kMask;
        for (int r = 0; r < kRows; ++r) sums[r][v] += w * static_cast<int32_t>(x[r * block_stride(kBits, 1) + k]);
      }
    }
  }
}

}  // namespace
}  // namespace hydra::scalar

// Behind what they call.
#include "cpu/quantized/vectors.h"

#include "cpu/quantized/products.h"
#include "cpu/quantized/rows.h"

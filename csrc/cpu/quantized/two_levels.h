// Scales in two levels as float32. Include after defining a level, see cpu/simd.h.
#pragma once

#include "cpu/quantized/block.h"

namespace hydra::HYDRA_LEVEL {

// Scales [32] and offsets [32] of each group that shares a block scale, in memory that stays in the L1 cache while
// rows are processed.
struct alignas(64) WideScales {
  static constexpr int64_t kMostGroups = 16, kGroupBytes = 2 * kPanel * 4;
  float scales[kMostGroups * 2 * kPanel];
};

HYDRA_INLINE vf wide_bytes(const int8_t* source) {
#if HYDRA_LANES == 16
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source))));
#elif HYDRA_LANES == 8
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source))));
#else
  vf result;
  for (int lane = 0; lane < kLanes; ++lane) result[lane] = source[lane];
  return result;
#endif
}

// Widens the scales of the `groups` groups of a block at `packed`: block scale * scale, and
// zero * (block scale * scale) - second block scale * offset, every product rounded; zero times a scale is exact.
template <int kBits, bool kOffsets>
HYDRA_TARGET void widen(const uint8_t* packed, int64_t groups, WideScales& wide) {
  constexpr int64_t kPlanes = kOffsets ? 2 : 1;
  for (int64_t at = 0; at < (2 + groups) * kPlanes * kPanel; at += kStepBytes) prefetch_ahead(packed + at);
  const f16_t* tops = reinterpret_cast<const f16_t*>(packed);
  for (int here = 0; here < kPanel; here += kLanes) {
    const vf top = load(tops + here), top_offset = kOffsets ? load(tops + kPanel + here) : vf{};
    const int8_t* bytes = reinterpret_cast<const int8_t*>(packed) + 2 * kPlanes * kPanel + here;
    float* to = wide.scales + here;
#pragma GCC unroll 4
    for (int64_t i = 0; i < groups; ++i, bytes += kPlanes * kPanel, to += 2 * kPanel) {
      const vf scale = top * wide_bytes(bytes);
      store(to, scale);
      if constexpr (kOffsets) {
        const vf offset = -(top_offset * wide_bytes(bytes + kPanel));
        store(to + kPanel, kBits == 4 ? fused(splat(8.0f), scale, offset) : offset);
      }
    }
  }
}

}  // namespace hydra::HYDRA_LEVEL

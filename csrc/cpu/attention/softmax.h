// The running softmax over key tiles: scores of up to 16 columns with one tile -> weights, and the columns' state.
// Include after defining a level, see cpu/simd.h.
//
// Every column takes the same operations whatever the other columns are. Denormals are flushed (see run_task in
// attention.cpp), so a weight is either at least 2^-126 or exactly 0.
#pragma once

#include <cmath>
#include <utility>

#include "cpu/attention/attention.h"
#include "cpu/simd.h"

namespace hydra::HYDRA_LEVEL {

using Lanes = std::make_integer_sequence<int, kLanes>;

HYDRA_INLINE vf fused_multiply_add(vf a, vf b, vf c) {
#if HYDRA_LANES == 16
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif HYDRA_LANES == 8
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// The larger of two lanes; `b` where one of them is NaN.
HYDRA_INLINE vf larger(vf a, vf b) {
#if HYDRA_LANES == 16
  return (vf)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
#elif HYDRA_LANES == 8
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// 2^fraction for |fraction| <= 1/2: relative error 1.1e-7 if kFine, else 2.9e-6; exactly 1 at 0.
template <bool kFine>
HYDRA_INLINE vf exp2_of_fraction(vf fraction) {
  vf value;
  if constexpr (kFine) {
    value = fused_multiply_add(splat(1.326472731e-3f), fraction, splat(9.671512991e-3f));
    value = fused_multiply_add(value, fraction, splat(5.550733581e-2f));
    value = fused_multiply_add(value, fraction, splat(2.402224243e-1f));
    value = fused_multiply_add(value, fraction, splat(6.931470037e-1f));
  } else {
    value = fused_multiply_add(splat(9.582852945e-3f), fraction, splat(5.590642616e-2f));
    value = fused_multiply_add(value, fraction, splat(2.402409911e-1f));
    value = fused_multiply_add(value, fraction, splat(6.931241751e-1f));
  }
  return fused_multiply_add(value, fraction, splat(1.0f));
}

// 2^x for x <= 0; exactly 1 at 0, exactly 0 below -126 (minus infinity included), NaN for NaN.
template <bool kFine>
HYDRA_INLINE vf exp2_of(vf x) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low mantissa bits
  const vf bounded = larger(splat(-200.0f), x);
  const vf shifted = bounded + magic;
  const vf whole = shifted - magic;
  const vf value = exp2_of_fraction<kFine>(bounded - whole);
#if HYDRA_LANES == 16
  return (vf)_mm512_maskz_scalef_ps(0xffff, (__m512)value, (__m512)whole);
#else
  // The constant's own bits leave at the top of the shift.
  const vf scaled = (vf)((vi)value + ((vi)shifted << 23));
  const vf result = x < splat(-126.0f) ? splat(0.0f) : scaled;
  return x != x ? x : result;
#endif
}

// Lanes [count, kLanes) become minus infinity.
template <int... kLane>
HYDRA_INLINE vf hide_behind(vf value, int count, std::integer_sequence<int, kLane...>) {
  const vi number = {kLane...};
  return number < (vi{} + count) ? value : splat(-INFINITY);
}

// In every lane the larger of itself and its partner, `kDistance` away.
template <int kDistance, int... kLane>
HYDRA_INLINE vf larger_of_pairs(vf value, std::integer_sequence<int, kLane...>) {
  const vi partner = {(kLane ^ kDistance)...};
  return larger(__builtin_shuffle(value, partner), value);
}

HYDRA_INLINE float largest(vf value) {
  if constexpr (kLanes > 8) value = larger_of_pairs<8>(value, Lanes());
  if constexpr (kLanes > 4) value = larger_of_pairs<4>(value, Lanes());
  value = larger_of_pairs<2>(value, Lanes());
  return larger_of_pairs<1>(value, Lanes())[0];
}

// State of a tile of columns.
struct ColumnState {
  float* sums;         // [kColumnTile][sums_width]: running sum of weight * value
  int64_t sums_width;  // a multiple of kLanes
  float* top;          // [kColumnTile]: largest score so far, not scaled
  float* total;        // [kColumnTile][kLanes]: running sum of weights, to be added up at the end
};

HYDRA_INLINE bool any(vi lanes) {
#if HYDRA_LANES == 16
  return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#elif HYDRA_LANES == 8
  return !_mm256_testz_si256((__m256i)lanes, (__m256i)lanes);
#else
  return (lanes[0] | lanes[1] | lanes[2] | lanes[3]) != 0;
#endif
}

// Largest score of each row, in place hiding what the row's column does not see.
template <int kVectors>
HYDRA_INLINE void find_tops(float* scores, const int* visible, int rows, float* tops) {
  for (int row = 0; row < rows; ++row, scores += kKeyTile) {
    vf score[kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) score[i] = load(scores + i * kLanes);
    if (visible[row] < kVectors * kLanes) {
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) {
        score[i] = hide_behind(score[i], visible[row] - i * kLanes, Lanes());
        store(scores + i * kLanes, score[i]);
      }
    }
#pragma GCC unroll 16
    for (int i = 1; i < kVectors; ++i) score[0] = larger(score[i], score[0]);
    tops[row] = largest(score[0]);
  }
}

// Moves the columns to their new largest scores; a column that keeps its own is multiplied by exactly 1.
HYDRA_INLINE void rescale(const float* tops, float factor, int rows, const ColumnState& state) {
  alignas(64) float shrinks[kColumnTile];
  bool changed = false;
  for (int first = 0; first < kColumnTile; first += kLanes) {
    const vf old_top = load(state.top + first), new_top = larger(load(tops + first), old_top);
    store(shrinks + first, exp2_of<true>((old_top - new_top) * factor));
    store(state.top + first, new_top);
    changed |= any(old_top != new_top);
  }
  if (!changed) return;
  for (int row = 0; row < rows; ++row) {
    const vf shrink = splat(shrinks[row]);
    store(state.total + row * kLanes, load(state.total + row * kLanes) * shrink);
    float* sums = state.sums + row * state.sums_width;
    for (int64_t d = 0; d < state.sums_width; d += kLanes) store(sums + d, load(sums + d) * shrink);
  }
}

// `scores` and `weights` are [rows][kKeyTile], of which kVectors vectors are in use.
template <class Math, int kVectors>
HYDRA_INLINE void weigh_vectors(float* scores, typename Math::Element* weights, const int* visible, int rows,
                                float factor, const ColumnState& state) {
  alignas(64) float tops[kColumnTile] = {};
  find_tops<kVectors>(scores, visible, rows, tops);
  rescale(tops, factor, rows, state);
  for (int row = 0; row < rows; ++row, scores += kKeyTile, weights += kKeyTile) {
    const vf offset = splat(-state.top[row] * factor);
    vf weight[kVectors];
    vf sum = load(state.total + row * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      weight[i] = exp2_of<Math::kFine>(fused_multiply_add(load(scores + i * kLanes), splat(factor), offset));
      sum += weight[i];
    }
    Math::template store_weights<kVectors>(weights, weight);
    store(state.total + row * kLanes, sum);
  }
}

// The first `used` keys of the tile (all or half of it) are in use; column `row` sees the first visible[row] of them.
template <class Math>
HYDRA_INLINE void weigh(float* scores, typename Math::Element* weights, const int* visible, int rows, int used,
                        float factor, const ColumnState& state) {
  if (used == kKeyTile) {
    weigh_vectors<Math, kKeyTile / kLanes>(scores, weights, visible, rows, factor, state);
  } else {
    weigh_vectors<Math, kKeyTile / 2 / kLanes>(scores, weights, visible, rows, factor, state);
  }
}

}  // namespace hydra::HYDRA_LEVEL

// The running softmax over key tiles: scores of up to 16 columns with one tile -> weights, and the columns' state.
// Include after defining a level, see cpu/simd.h.
//
// Every column takes the same operations whatever the other columns are. Denormals are flushed (see run_task in
// attention.cpp), so a weight is either at least 2^-126 or exactly 0.
#pragma once

#include <cmath>

#include "cpu/attention/attention.h"
#include "cpu/simd.h"

namespace hydra::HYDRA_LEVEL {

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

// 2^fraction for fractions in [0, 1]: relative error 1.5e-7 if kFine, else 3e-6; exactly 1 at 0.
template <bool kFine>
HYDRA_INLINE vf exp2_of_fraction(vf fraction) {
  vf value;
  if constexpr (kFine) {
    value = fused_multiply_add(splat(1.867130166e-3f), fraction, splat(9.017029777e-3f));
    value = fused_multiply_add(value, fraction, splat(5.579991266e-2f));
    value = fused_multiply_add(value, fraction, splat(2.401644439e-1f));
    value = fused_multiply_add(value, fraction, splat(6.931512952e-1f));
  } else {
    value = fused_multiply_add(splat(1.342668477e-2f), fraction, splat(5.224247277e-2f));
    value = fused_multiply_add(value, fraction, splat(2.412801981e-1f));
    value = fused_multiply_add(value, fraction, splat(6.930448413e-1f));
  }
  return fused_multiply_add(value, fraction, splat(1.0f));
}

// 2^x for x <= 0; exactly 1 at 0, exactly 0 below -127 (minus infinity included), NaN for NaN.
template <bool kFine>
HYDRA_INLINE vf exp2_of(vf x) {
#if HYDRA_LANES == 16
  constexpr int kTowardsMinusInfinity = 1;
  const __m512 fraction = _mm512_maskz_reduce_ps(0xffff, (__m512)x, kTowardsMinusInfinity);
  return (vf)_mm512_maskz_scalef_ps(0xffff, (__m512)exp2_of_fraction<kFine>((vf)fraction), (__m512)x);
#else
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low mantissa bits
  const vf shifted = (larger(splat(-150.0f), x) - 0.5f) + magic;
  const vf value = exp2_of_fraction<kFine>(larger(splat(-150.0f), x) - (shifted - magic));
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

// Multiplies each column of [rows][kKeyTile], of which `used` are in use, by its scale.
HYDRA_INLINE void scale_rows_by(float* values, int rows, int used, const float* scales) {
  for (int i = 0; i < used; i += kLanes) {
    const vf scale = load(scales + i);
    for (int row = 0; row < rows; ++row) store(values + row * kKeyTile + i, load(values + row * kKeyTile + i) * scale);
  }
}

// State of a tile of columns.
struct ColumnState {
  float* sums;         // [kColumnTile][sums_width]: running sum of weight * value
  int64_t sums_width;  // a multiple of kLanes
  float* top;          // [kColumnTile]: largest score so far, not scaled
  float* total;        // [kColumnTile][kLanes]: running sum of weights, to be added up at the end
};

// A bit mask of lanes that are 0 or -1, as comparisons return them: bit i for lane i.
HYDRA_INLINE unsigned bits_of(vi lanes) {
#if HYDRA_LANES == 16
  return _mm512_movepi32_mask((__m512i)lanes);
#elif HYDRA_LANES == 8
  return static_cast<unsigned>(_mm256_movemask_ps((__m256)lanes));
#else
  return (lanes[0] & 1u) | (lanes[1] & 2u) | (lanes[2] & 4u) | (lanes[3] & 8u);
#endif
}

// Transposes by one bit: swaps lanes between rows whose numbers differ in `kBit`, so that the lane's bit takes the
// place of the row's. The index vectors must be constants, from which the compiler picks unpack and permute
// instructions.
template <int kBit, int... kLane>
HYDRA_INLINE void exchange(vf* rows, std::integer_sequence<int, kLane...>) {
  const vi lower = {(kLane & kBit ? kLanes + kLane - kBit : kLane)...};
  const vi upper = {(kLane & kBit ? kLanes + kLane : kLane + kBit)...};
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & kBit) continue;
    const vf a = rows[i], b = rows[i + kBit];
    rows[i] = __builtin_shuffle(a, b, lower);
    rows[i + kBit] = __builtin_shuffle(a, b, upper);
  }
}

// The source of lane `lane` of two merged rows: every second unit of the first row, then of the second. A unit is a
// lane inside of 4 lanes, or 4 lanes, so that one instruction moves a whole vector.
template <int kBit>
constexpr int merged_from(int lane) {
  constexpr int kUnit = kBit < 4 ? 1 : 4, kUnits = kBit < 4 ? 4 : kLanes / 4;
  const int unit = lane / kUnit % kUnits, base = lane - unit * kUnit;
  return unit < kUnits / 2 ? base + 2 * unit * kUnit : base + (2 * unit - kUnits) * kUnit + kLanes;
}

// Rows i and i + kBit of the first kRows come to share row i: what is merged are lanes of a row that differ in kBit.
template <int kBit, int kRows, bool kAdd, int... kLane>
HYDRA_INLINE void merge_pairs(vf* rows, std::integer_sequence<int, kLane...>) {
  constexpr int kUnit = kBit < 4 ? 1 : 4;
  const vi lower = {merged_from<kBit>(kLane)...};
  const vi upper = {(merged_from<kBit>(kLane) + kUnit)...};
#pragma GCC unroll 16
  for (int i = 0; i < kRows; i += 2 * kBit) {
    const vf a = rows[i], b = rows[i + kBit];
    const vf first = __builtin_shuffle(a, b, lower), second = __builtin_shuffle(a, b, upper);
    rows[i] = kAdd ? first + second : larger(first, second);
  }
}

// Merges the first kEnd rows into row 0, neighbours first. Each group of kBegin rows is already merged into its first.
template <bool kAdd, int kBegin, int kEnd>
HYDRA_INLINE void merge_rounds(vf* rows) {
  if constexpr (kBegin < kEnd) {
    merge_pairs<kBegin, kEnd, kAdd>(rows, Lanes());
    merge_rounds<kAdd, 2 * kBegin, kEnd>(rows);
  }
}

// Lane i of the result is the largest lane of rows[i].
HYDRA_INLINE vf largest_of_rows(vf* rows) {
  merge_rounds<false, 1, kLanes>(rows);
  return rows[0];
}

// The larger of the row's vectors, lane by lane. With kHide, what the column does not see becomes minus infinity, also
// in memory.
template <int kVectors, bool kHide>
HYDRA_INLINE vf larger_of_vectors(float* scores, int visible) {
  vf best = splat(-INFINITY);
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    vf score = load(scores + i * kLanes);
    if constexpr (kHide) {
      score = hide_behind(score, visible - i * kLanes, Lanes());
      store(scores + i * kLanes, score);
    }
    best = i == 0 ? score : larger(score, best);
  }
  return best;
}

// Largest score of each row.
template <int kVectors, bool kHide>
HYDRA_INLINE void find_tops(float* scores, const int* visible, int rows, float* tops) {
  int row = 0;
  for (; row + kLanes <= rows; row += kLanes) {
    vf best[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      best[i] = larger_of_vectors<kVectors, kHide>(scores + (row + i) * kKeyTile, kHide ? visible[row + i] : 0);
    }
    store(tops + row, largest_of_rows(best));
  }
  for (; row < rows; ++row) {
    tops[row] = largest(larger_of_vectors<kVectors, kHide>(scores + row * kKeyTile, kHide ? visible[row] : 0));
  }
}

// Rescales the columns' sums to their new largest scores. Columns whose largest score stays are skipped: their factor
// is exactly 1.
HYDRA_INLINE void rescale(const float* tops, float factor, int rows, const ColumnState& state) {
  alignas(64) float shrinks[kColumnTile];
  unsigned changed = 0;
  for (int first = 0; first < kColumnTile; first += kLanes) {
    const vf old_top = load(state.top + first), new_top = larger(load(tops + first), old_top);
    store(shrinks + first, exp2_of<true>((old_top - new_top) * factor));
    store(state.top + first, new_top);
    changed |= bits_of(old_top != new_top) << first;
  }
  for (changed &= (1u << rows) - 1; changed; changed &= changed - 1) {
    const int row = __builtin_ctz(changed);
    const vf shrink = splat(shrinks[row]);
    store(state.total + row * kLanes, load(state.total + row * kLanes) * shrink);
    float* sums = state.sums + row * state.sums_width;
    for (int64_t d = 0; d < state.sums_width; d += kLanes) store(sums + d, load(sums + d) * shrink);
  }
}

// Merges the state of a later span into a column's state.
HYDRA_INLINE void merge_column(float* sums, float* total, float* top, const float* span_sums, const float* span_total,
                               float span_top, int64_t sums_width, float factor) {
  const vf old_top = splat(*top), other_top = splat(span_top), new_top = larger(other_top, old_top);
  const vf keep = exp2_of<true>((old_top - new_top) * factor), take = exp2_of<true>((other_top - new_top) * factor);
  store(total, fused_multiply_add(load(total), keep, load(span_total) * take));
  for (int64_t d = 0; d < sums_width; d += kLanes) {
    store(sums + d, fused_multiply_add(load(sums + d), keep, load(span_sums + d) * take));
  }
  *top = new_top[0];
}

// `scores` and `weights` are [rows][kKeyTile], of which kVectors vectors are in use.
template <class Math, int kVectors>
HYDRA_INLINE void weigh_vectors(float* scores, typename Math::Element* weights, const int* visible, int rows,
                                float factor, const ColumnState& state) {
  alignas(64) float tops[kColumnTile] = {};
  if (visible) {
    find_tops<kVectors, true>(scores, visible, rows, tops);
  } else {
    find_tops<kVectors, false>(scores, visible, rows, tops);
  }
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

// The first `used` keys of the tile (all or half of it) are in use; column `row` sees the first visible[row] of them,
// or all where `visible` is null.
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

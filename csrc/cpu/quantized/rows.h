// Rows of x rounded to bytes, group by group. Include after defining a level, see cpu/simd.h, and after declaring
// store_numbers(int8_t* target, vi numbers, int number_bytes).
#pragma once

#include <limits>
#include <utility>

#include "cpu/quantized/quantized.h"
#include "cpu/row_math.h"

namespace hydra::HYDRA_LEVEL {

// To the nearest, ties to even.
HYDRA_INLINE vi nearest(vf value) {
#if HYDRA_LANES == 16
  return (vi)_mm512_cvtps_epi32((__m512)value);
#elif HYDRA_LANES == 8
  return (vi)_mm256_cvtps_epi32((__m256)value);
#else
  vi result;
  for (int i = 0; i < kLanes; ++i) result[i] = static_cast<int32_t>(__builtin_lrintf(value[i]));
  return result;
#endif
}

// The largest of the bits of |x|: as integers, NaN is above infinity and that above all numbers.
template <class T>
HYDRA_INLINE int32_t largest_bits(const T* x, int64_t count) {
  vi most[2] = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const vi bits = (vi)load(x + i + v * kLanes) & 0x7fffffff;
      most[v] = bits > most[v] ? bits : most[v];
    }
  }
  for (; i < count; i += kLanes) {
    const vi bits = (vi)load_some(x + i, static_cast<int>(std::min<int64_t>(kLanes, count - i))) & 0x7fffffff;
    most[0] = bits > most[0] ? bits : most[0];
  }
  most[0] = most[0] > most[1] ? most[0] : most[1];
  int32_t result = 0;
  for (int lane = 0; lane < kLanes; ++lane) result = std::max(result, most[0][lane]);
  return result;
}

// Where the numbers of one group of a row go.
struct GroupTarget {
  int8_t* first;
  int piece_bits;       // a piece has 2^piece_bits inputs
  int64_t piece_bytes;  // from one piece to the next
  int number_bytes;

  int8_t* at(int64_t k) const {
    const int64_t piece = k >> piece_bits;
    return first + piece * piece_bytes + (k - (piece << piece_bits)) * number_bytes;
  }
  void clear(int64_t begin, int64_t end) const {  // multiples of 16
    for (int64_t k = begin; k < end; k += 16) std::memset(at(k), 0, static_cast<size_t>(16 * number_bytes));
  }
};

// Inputs [0, count) of a group, padded to `padded`. Returns the formulas' s and the sum of the numbers.
template <class T>
HYDRA_INLINE std::pair<float, int32_t> quantize_group(const T* x, int64_t count, int64_t padded,
                                                      const GroupTarget& target) {
  constexpr int32_t kInfinity = 0x7f800000;
  constexpr float kSmallest = 0x1p-100f;
  const int32_t bits = largest_bits(x, count);
  const float top = float_from_bits(static_cast<uint32_t>(bits));
  const float step = bits < kInfinity ? top / 127.0f : std::numeric_limits<float>::quiet_NaN();
  if (bits >= kInfinity || top < kSmallest) {
    target.clear(0, padded);
    return {step, 0};
  }
  if (count < padded) target.clear(count / 16 * 16, padded);
  const vf inverse = splat(127.0f / top);
  vi sums = {};
  for (int64_t k = 0; k < count; k += kLanes) {
    const int some = static_cast<int>(std::min<int64_t>(kLanes, count - k));
    const vi numbers = nearest(load_some(x + k, some) * inverse);
    store_numbers(target.at(k), numbers, target.number_bytes);
    sums += numbers;
  }
  int32_t sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  return {step, sum};
}

template <class T>
HYDRA_TARGET void quantize_rows_of(const QuantizedCall& call, int64_t begin, int64_t end) {
  const PackedQuantized& weight = call.weight;
  const QuantizedRows& rows = call.rows;
  const int64_t count = weight.num_in / weight.groups, padded = weight.group_inputs(), pieces = weight.pieces();
  const int64_t per_block = groups_per_block(weight), zero = packed_zero(weight.num_bits);
  const int64_t stride = block_stride(weight.num_bits, rows.number_bytes), block_bytes = rows.rows * stride;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(call.result.x) + row * call.result.x_stride;
    static_assert(piece_steps(8) * step_inputs(8) == 1 << 8 && piece_steps(6) * step_inputs(6) == 1 << 8);
    GroupTarget target{rows.numbers + row * stride, weight.num_bits == 4 ? 9 : 8, block_bytes, rows.number_bytes};
    for (int64_t group = 0, place = 0; group < weight.groups; ++group, x += count) {
      const auto [step, sum] = quantize_group(x, count, padded, target);
      const int64_t at = group * rows.rows + row;
      rows.steps[at] = step;
      rows.zeros[at] = static_cast<int32_t>(-zero * sum);
      rows.row_sums[at] = step * static_cast<float>(sum);
      target.first += padded * rows.number_bytes;
      if (++place == per_block) {
        place = 0;
        target.first += pieces * block_bytes - per_block * padded * rows.number_bytes;
      }
    }
  }
}

void quantize_rows(const QuantizedCall& call, int64_t begin, int64_t end) {
  dispatch(call.result.weight.dtype, [&](auto type) { quantize_rows_of<decltype(type)>(call, begin, end); });
}

}  // namespace hydra::HYDRA_LEVEL

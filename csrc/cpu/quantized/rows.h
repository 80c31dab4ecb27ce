// Rows of x rounded to bytes, part by part. Include after defining a level, see cpu/simd.h, and after declaring
// store_numbers(int8_t* target, vi numbers, int number_bytes).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

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
#if HYDRA_LANES == 16
  return _mm512_reduce_max_epi32((__m512i)most[0]);
#else
  int32_t result = 0;
  for (int lane = 0; lane < kLanes; ++lane) result = std::max(result, most[0][lane]);
  return result;
#endif
}

HYDRA_INLINE int32_t sum_of(vi values) {
#if HYDRA_LANES == 16
  return _mm512_reduce_add_epi32((__m512i)values);
#else
  int32_t result = 0;
  for (int lane = 0; lane < kLanes; ++lane) result += values[lane];
  return result;
#endif
}

// True if 8-bit numbers are too coarse for most of a part: `energy` is the sum over its `count` numbers of
// min(|number|, 32)^2.
HYDRA_INLINE bool needs_low(int32_t energy, int64_t count) { return energy < 64 * (count + 20); }

// Inputs [0, count) of a part of a row, padded to `padded`: numbers and their lower bytes go to `target` and `low`.
struct PartSums {
  float step;
  int32_t upper, low;
  bool has_low;
};

template <class T, int kNumberBytes>
HYDRA_INLINE PartSums quantize_part(const T* x, int64_t count, int64_t padded, int8_t* target, int8_t* low) {
  constexpr int32_t kInfinity = 0x7f800000;
  constexpr float kSmallest = 0x1p-100f;
  const size_t bytes = static_cast<size_t>(padded * kNumberBytes);
  const int32_t bits = largest_bits(x, count);
  const float top = float_from_bits(static_cast<uint32_t>(bits));
  PartSums result{bits < kInfinity ? top / 127.0f : std::numeric_limits<float>::quiet_NaN(), 0, 0, false};
  const bool is_zero = bits >= kInfinity || top < kSmallest;
  if (is_zero || count < padded) {
    std::memset(target, 0, bytes);
    if (kNumberBytes == 1) std::memset(low, 0, bytes);
  }
  if (is_zero) return result;
  const vf inverse = splat(127.0f / top);
  vi sums = {}, energies = {};
  for (int64_t k = 0; k < count; k += kLanes) {
    const int some = static_cast<int>(std::min<int64_t>(kLanes, count - k));
    const vi numbers = nearest(load_some(x + k, some) * inverse);
    store_numbers(target + k * kNumberBytes, kNumberBytes == 1 ? numbers : numbers * 256, kNumberBytes);
    if (kNumberBytes == 1) std::memset(low + k, 0, kLanes);
    const vi sizes = numbers < 0 ? -numbers : numbers, some_sizes = sizes < 32 ? sizes : vi{} + 32;
    sums += numbers;
    energies += some_sizes * some_sizes;
  }
  result.upper = sum_of(sums);
  result.has_low = needs_low(sum_of(energies), count);
  if (!result.has_low) return result;
  vi low_sums = {};
  sums = vi{};
  for (int64_t k = 0; k < count; k += kLanes) {
    const int some = static_cast<int>(std::min<int64_t>(kLanes, count - k));
    const vi numbers = nearest(load_some(x + k, some) * (inverse * splat(256.0f)));
    const vi upper = (numbers + 128) >> 8, rest = numbers - upper * 256;
    store_numbers(target + k * kNumberBytes, kNumberBytes == 1 ? upper : numbers, kNumberBytes);
    if (kNumberBytes == 1) store_numbers(low + k, rest, 1);
    sums += upper;
    low_sums += rest;
  }
  result.upper = sum_of(sums);
  result.low = sum_of(low_sums);
  return result;
}

template <class T, int kNumberBytes>
HYDRA_TARGET void quantize_rows_of(const QuantizedCall& call, int64_t begin, int64_t end) {
  const PackedQuantized& weight = call.weight;
  const QuantizedRows& rows = call.rows;
  const int64_t inputs = weight.num_in / weight.groups, padded = weight.group_inputs(), parts = weight.parts();
  const int64_t per_block = groups_per_block(weight) * padded;  // inputs of a block of whole groups
  const int64_t per_piece = piece_steps(weight.num_bits) * step_inputs(weight.num_bits), pieces = weight.pieces();
  const int32_t zero = packed_zero(weight.num_bits);
  const int64_t stride = block_stride(weight.num_bits, kNumberBytes), block_bytes = rows.rows * stride;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(call.result.x) + row * call.result.x_stride;
    int8_t *numbers = rows.numbers + row * stride, *low = rows.low + row * stride;  // of a block
    uint8_t* any_low = rows.any_low + row;
    int64_t at = row, place = 0;  // of a part, in the block that has it
    const auto end_block = [&] {
      place = 0;
      numbers += block_bytes;
      low += block_bytes;
      any_low += rows.rows;
    };
    for (int64_t group = 0; group < weight.groups; ++group, x += inputs) {
      float row_sum = 0.0f;
      for (int64_t part = 0; part < parts; ++part, at += rows.rows) {
        const int64_t k = part * kPartInputs, size = std::min(kPartInputs, padded - k);
        const PartSums found = quantize_part<T, kNumberBytes>(
            x + k, std::min(size, inputs - k), size, numbers + place * kNumberBytes, low + place * kNumberBytes);
        rows.steps[at] = kNumberBytes == 1 ? found.step : found.step * 0x1p-8f;
        const int32_t sum = found.upper * 256 + found.low;
        rows.zeros[at] = -zero * (kNumberBytes == 1 ? found.upper : sum);
        rows.low_zeros[at] = -zero * found.low;
        rows.has_low[at] = found.has_low;
        *any_low = found.has_low || (place > 0 && *any_low);
        row_sum = std::fma(static_cast<float>(sum) * 0x1p-8f, found.step, row_sum);
        place += size;
        if (place == (pieces > 1 ? per_piece : per_block)) end_block();
      }
      if (pieces > 1 && place > 0) end_block();
      rows.row_sums[group * rows.rows + row] = row_sum;
    }
  }
}

void quantize_rows(const QuantizedCall& call, int64_t begin, int64_t end) {
  dispatch(call.result.weight.dtype, [&](auto type) {
    using T = decltype(type);
    call.rows.number_bytes == 1 ? quantize_rows_of<T, 1>(call, begin, end) : quantize_rows_of<T, 2>(call, begin, end);
  });
}

}  // namespace hydra::HYDRA_LEVEL

// Rounding of rows of weights. Include after defining a level of 4 or 8 lanes, see cpu/simd.h.
#pragma once

#include <algorithm>

#include "cpu/quantized/rounding.h"
#include "cpu/row_math.h"
#include "cpu/simd.h"

namespace hydra::HYDRA_LEVEL {

constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: a small number plus it is rounded to an integer, ties to even

// Keeps NaN, and separates a product from the sum after it, so that the compiler cannot contract them.
HYDRA_INLINE vf clamped(vf value, float low, float high) {
  value = value < splat(low) ? splat(low) : value;
  return value > splat(high) ? splat(high) : value;
}

// Rounds numbers within +-2^22.
HYDRA_INLINE vf to_integers(vf value) { return value + splat(kMagic) - splat(kMagic); }

// ---- 8 bits

template <class T>
HYDRA_INLINE void round_row(const T* row, int64_t count, int8_t* values, T* scale) {
  vi most = {};  // of the bits of magnitudes: as integers, NaN is above infinity and that above all numbers
  for (int64_t k = 0; k < count; k += kLanes) {
    const vi bits = (vi)load_some(row + k, static_cast<int>(std::min<int64_t>(kLanes, count - k))) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  int32_t top = 0;
  for (int lane = 0; lane < kLanes; ++lane) top = std::max(top, most[lane]);
  *scale = from_float<T>(float_from_bits(static_cast<uint32_t>(top)) / 127.0f);
  const float step = to_float(*scale);
  if (!(step > 0)) {
    std::memset(values, 0, static_cast<size_t>(count));
    return;
  }
  typedef int8_t vq __attribute__((vector_size(kLanes)));
  for (int64_t k = 0; k < count; k += kLanes) {
    const int some = static_cast<int>(std::min<int64_t>(kLanes, count - k));
    const vf steps = load_some(row + k, some) / splat(step);
    const vf numbers = to_integers(clamped(steps == steps ? steps : vf{}, -127.0f, 127.0f));
    const vq bytes = __builtin_convertvector(__builtin_convertvector(numbers, vi), vq);
    std::memcpy(values + k, &bytes, static_cast<size_t>(some));
  }
}

// ---- 4 bits: as many groups at once as there are lanes, so that every sum stays within a lane

constexpr int kGroup = static_cast<int>(kRoundingGroup);

// Exchanges the lanes of `a` whose index has the bit kDistance with the lanes of `b` whose index has not.
template <int kDistance, int... kLane>
HYDRA_INLINE void exchange(vf& a, vf& b, std::integer_sequence<int, kLane...>) {
  const vi low = {(kLane & kDistance ? kLane - kDistance + kLanes : kLane)...};
  const vi high = {(kLane & kDistance ? kLane + kLanes : kLane + kDistance)...};
  const vf first = __builtin_shuffle(a, b, low);
  b = __builtin_shuffle(a, b, high);
  a = first;
}

template <int kDistance>
HYDRA_INLINE void transpose(vf* rows) {
  if constexpr (kDistance < kLanes) {
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; ++i) {
      if (!(i & kDistance)) exchange<kDistance>(rows[i], rows[i + kDistance], Lanes());
    }
    transpose<2 * kDistance>(rows);
  }
}

// Returns the best step of each group, one per lane; 0 if there is none, as for zeros. w[k]: number k of every group.
HYDRA_INLINE vf best_steps(const vf (&w)[kGroup]) {
  vi most = {};  // of the bits of magnitudes
  vf top = {}, best = splat(-1.0f), steps = {};
#pragma GCC unroll 4
  for (int k = 0; k < kGroup; ++k) {
    const vi bits = (vi)w[k] & 0x7fffffff, larger = bits > most;
    most = larger ? bits : most;
    top = larger ? w[k] : top;
  }
  const vf inverse = splat(1.0f) / top;
  for (const float tried : {7.4f, 8.0f, 8.6f}) {
    const vf factor = inverse * splat(-tried);
    vf eighths[8] = {}, squares = {};
    for (int begin = 0; begin < kGroup; begin += 8) {
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        const vf numbers = to_integers(clamped(w[begin + i] * factor, -8.0f, 7.0f));
        vf products = w[begin + i] * numbers;
        __asm__("" : "+x"(products));  // products are rounded before they are added, at every level
        eighths[i] += products;
        squares += numbers * numbers;
      }
    }
    vf product = eighths[0];
#pragma GCC unroll 8
    for (int i = 1; i < 8; ++i) product += eighths[i];
    const vf gain = product * product / squares;
    const vi better = gain > best;  // not of NaN: a group of zeros
    best = better ? gain : best;
    steps = better ? product / squares : steps;
  }
  return steps;
}

// kLanes consecutive groups.
template <class T>
HYDRA_INLINE void round_groups(const T* groups, uint8_t* values, T* scales) {
  vf w[kGroup];
  for (int begin = 0; begin < kGroup; begin += kLanes) {
#pragma GCC unroll 8
    for (int group = 0; group < kLanes; ++group) w[begin + group] = load(groups + group * kGroup + begin);
    transpose<1>(w + begin);
  }
  const vf exact = best_steps(w), steps = rounded<T>(exact);
  store(scales, exact);
  for (int word = 0; word < kGroup / 8; ++word) {
    vu halves = {};
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const vf numbers = to_integers(clamped(w[word * 8 + i] / steps, -8.0f, 7.0f));
      halves |= (vu)(__builtin_convertvector(steps != 0.0f ? numbers : vf{}, vi) + 8) << (4 * i);
    }
    for (int group = 0; group < kLanes; ++group) {
      const uint32_t octets = halves[group];
      std::memcpy(values + group * kGroup / 2 + word * 4, &octets, 4);
    }
  }
}

template <class T>
HYDRA_INLINE void round_all_groups(const T* groups, int64_t count, uint8_t* values, T* scales) {
  for (; count >= kLanes; count -= kLanes) {
    round_groups(groups, values, scales);
    groups += kLanes * kGroup, values += kLanes * kGroup / 2, scales += kLanes;
  }
  if (count == 0) return;
  T padded[kLanes * kGroup] = {}, some_scales[kLanes];
  uint8_t some_values[kLanes * kGroup / 2];
  std::memcpy(padded, groups, static_cast<size_t>(count) * kGroup * sizeof(T));
  round_groups(padded, some_values, some_scales);
  std::memcpy(values, some_values, static_cast<size_t>(count) * kGroup / 2);
  std::memcpy(scales, some_scales, static_cast<size_t>(count) * sizeof(T));
}

template <class T>
HYDRA_TARGET void round_rows_of(const RoundingCall& call, int64_t begin, int64_t end) {
  const T* weight = static_cast<const T*>(call.weight) + begin * call.num_in;
  uint8_t* values = call.values + begin * call.num_in * call.num_bits / 8;
  T* scales = static_cast<T*>(call.scales);
  if (call.num_bits == 4) {
    const int64_t groups = call.num_in / kGroup;
    return round_all_groups(weight, (end - begin) * groups, values, scales + begin * groups);
  }
  for (int64_t row = begin; row < end; ++row, weight += call.num_in, values += call.num_in) {
    round_row(weight, call.num_in, reinterpret_cast<int8_t*>(values), scales + row);
  }
}

void round_rows(const RoundingCall& call, int64_t begin, int64_t end) {
  dispatch(call.dtype, [&](auto weight) {
    round_rows_of<decltype(weight)>(call, begin, end);
  });
}

}  // namespace hydra::HYDRA_LEVEL

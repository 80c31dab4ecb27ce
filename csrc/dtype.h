// The three storage types of the engine and their scalar conversions. The numbers of DType are part of the Python
// interface (hydra_engine passes them as ints). Vectorised conversions live in cpu/simd.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "check.h"

namespace hydra {

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2 };

struct bf16_t {
  uint16_t bits;
};

struct f16_t {
  uint16_t bits;
};

inline DType dtype_from_int(int value) {
  HYDRA_CHECK(value >= 0 && value <= 2, "dtype: expected 0 (float32), 1 (bfloat16) or 2 (float16), got ", value);
  return static_cast<DType>(value);
}

inline int64_t element_size(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float to_float(float value) { return value; }

inline float to_float(bf16_t value) { return float_from_bits(static_cast<uint32_t>(value.bits) << 16); }

inline float to_float(f16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t rest = value.bits & 0x7fffu;
  // Shifting the exponent into place and multiplying by 2^112 is exact for normal and subnormal halves alike.
  if (rest >= 0x7c00u) return float_from_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  return float_from_bits(sign | float_bits(float_from_bits(rest << 13) * 0x1p112f));
}

// Round to nearest even; a NaN stays a (quiet) NaN.
template <class T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

template <>
inline bf16_t from_float<bf16_t>(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

template <>
inline f16_t from_float<f16_t>(float value) {
  const uint32_t bits = float_bits(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (rest >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // 65520 and above round to infinity
  if (rest < 0x38800000u) {  // subnormal half: adding 0.5 lets the float adder round to multiples of 2^-24
    const float shifted = float_from_bits(rest) + 0.5f;
    return {static_cast<uint16_t>(sign | (float_bits(shifted) - 0x3f000000u))};
  }
  return {static_cast<uint16_t>(sign | (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13)};
}

// Calls fn(T{}) with the storage type of `dtype`.
template <class Fn>
auto dispatch(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::f32:
      return fn(float{});
    case DType::bf16:
      return fn(bf16_t{});
    default:
      return fn(f16_t{});
  }
}

}  // namespace hydra

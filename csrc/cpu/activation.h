// Activations on vectors of one instruction-set level, in float32 with errors of a few units in the last place.
// NaN stays NaN. Include after cpu/simd.h.
#pragma once

#include "cpu/activation_kind.h"
#include "cpu/simd.h"

namespace hydra::HYDRA_LEVEL {

// e^x by 2^n * p(r) with |r| <= ln(2) / 2; arguments are clamped to where results and their reciprocals are normal.
HYDRA_INLINE vf exponential(vf x) {
  x = x < -87.0f ? splat(-87.0f) : x;
  x = x > 87.0f ? splat(87.0f) : x;
  // Adding 1.5 * 2^23 leaves the nearest integer in the low mantissa bits.
  const vf shifted = x * 1.44269504f + 12582912.0f;
  const vf n = shifted - 12582912.0f;
  const vf r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const vi power = ((vi)shifted - (0x4b400000 - 127)) << 23;
  return p * (vf)power;
}

// 1 / x within two units in the last place, for 1 <= x <= 2^126.
HYDRA_INLINE vf reciprocal(vf x) {
#if HYDRA_LANES == 16  // an estimate of 14 bits and one step of Newton's take a quarter of a division's time
  const vf estimate = (vf)_mm512_rcp14_ps((__m512)x);
  return estimate * (2.0f - x * estimate);
#else
  return 1.0f / x;
#endif
}

HYDRA_INLINE vf times_sigmoid(vf x, vf z) { return x * reciprocal(exponential(-z) + 1.0f); }

// Rational approximation of erf on [-4, 4], where it reaches +-1 in float32.
HYDRA_INLINE vf error_function(vf x) {
  x = x < -4.0f ? splat(-4.0f) : x;
  x = x > 4.0f ? splat(4.0f) : x;
  const vf s = x * x;
  vf p = s * -2.72614225801306e-10f + 2.77068142495902e-08f;
  p = p * s + -2.10102402082508e-06f;
  p = p * s + -5.69250639462346e-05f;
  p = p * s + -7.34990630326855e-04f;
  p = p * s + -2.95459980854025e-03f;
  p = p * s + -1.60960333262415e-02f;
  vf q = s * -1.45660718464996e-05f + -2.13374055278905e-04f;
  q = q * s + -1.68282697438203e-03f;
  q = q * s + -7.37332916720468e-03f;
  q = q * s + -1.42647390514189e-02f;
  return x * p / q;
}

template <Activation kAct>
HYDRA_INLINE vf activate(vf x) {
  if constexpr (kAct == Activation::silu) return times_sigmoid(x, x);
  if constexpr (kAct == Activation::gelu) return x * 0.5f * (error_function(x * 0.707106781f) + 1.0f);
  // x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), without the cancellation near tanh = -1
  if constexpr (kAct == Activation::gelu_tanh) {
    return times_sigmoid(x, x * (x * x * 0.044715f + 1.0f) * (2.0f * 0.797884561f));
  }
  if constexpr (kAct == Activation::quick_gelu) return times_sigmoid(x, x * 1.702f);
  return x;
}

}  // namespace hydra::HYDRA_LEVEL

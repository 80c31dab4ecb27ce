// Stands in for CUDA's header of this name, with the conversions of csrc/dtype.h. See cuda_bf16.h.
#pragma once

#include "dtype.h"

struct __half {
  hydra::f16_t held;
};

inline float __half2float(__half value) { return hydra::to_float(value.held); }
inline __half __float2half_rn(float value) { return {hydra::from_float<hydra::f16_t>(value)}; }

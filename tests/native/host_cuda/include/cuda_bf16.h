// Stands in for CUDA's header of this name, with the conversions of csrc/dtype.h. A type of its own, so that what mixes
// up the two 16-bit types does not compile here either.
#pragma once

#include "dtype.h"

struct __nv_bfloat16 {
  hydra::bf16_t held;
};

inline float __bfloat162float(__nv_bfloat16 value) { return hydra::to_float(value.held); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return {hydra::from_float<hydra::bf16_t>(value)}; }

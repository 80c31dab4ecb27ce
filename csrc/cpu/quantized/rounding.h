// Weights of a float type rounded to 8 or 4 bits by the formulas of hydra_engine/models/loading/quantize.py, whose order
// of sums is part of them: the bits are the same at every level and with any number of threads.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace hydra {

constexpr int64_t kRoundingGroup = 32;  // inputs that share a scale, in 4 bits

struct RoundingCall {
  const void* weight;  // [num_out, num_in], rows without gaps
  DType dtype;         // also of the scales
  int64_t num_out, num_in;
  int num_bits;     // 8: a scale per row; 4: per group, num_in is a multiple of kRoundingGroup
  uint8_t* values;  // as in a QuantizedWeight
  void* scales;     // [num_out, groups]
};

void round_weight(const RoundingCall& call);

// Every level has this: rows [begin, end).
namespace scalar {
void round_rows(const RoundingCall& call, int64_t begin, int64_t end);
}
namespace avx2 {
void round_rows(const RoundingCall& call, int64_t begin, int64_t end);
}

}  // namespace hydra

// Blocks of ggml's tensor types taken apart, by the formulas of hydra_engine/models/loading/gguf_tensors.py.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace hydra {

enum class GgmlType : int { q4_0 = 0, q8_0 = 1, q4_k = 2, q5_k = 3, q6_k = 4 };

struct GgmlBlocks {
  GgmlType type;
  const uint8_t* blocks;
  int64_t count;
  uint8_t* values;  // as in a QuantizedWeight, block after block
  void* scales;         // of every group; Q4_0 and Q8_0: f16, others: int8
  int8_t* offsets;      // of every group of Q4_K and Q5_K
  f16_t* block_scales;  // per block of Q6_K: one; of Q4_K and Q5_K: two
};

void decode_ggml(const GgmlBlocks& call);

}  // namespace hydra

// Layers with a recurrent state: the causal convolution and the gated delta rule, over packed rows of requests. A
// token's result depends on its request alone: everything goes token by token in one order.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace hydra {

constexpr int kMostTaps = 16;
constexpr int kMostKeyDim = 512;

// Row r has tokens [cu_q[r], cu_q[r + 1]), goes on from place reads[r] (from nothing where starts[r] is 0) and leaves
// its state in place writes[r].
struct StateRows {
  const int64_t* cu_q = nullptr;
  const int64_t* starts = nullptr;
  const int64_t* reads = nullptr;
  const int64_t* writes = nullptr;
  int64_t rows = 0;
  int64_t tokens = 0;
  int64_t places = 0, layers = 0, layer = 0;

  void check() const;
  // Number of elements before the state of this layer in a place, where one has `size`.
  int64_t offset(int64_t place, int64_t size) const { return (place * layers + layer) * size; }
};

struct ConvCall {
  StateRows rows;
  const void* x = nullptr;       // [tokens, channels]
  const void* weight = nullptr;  // [channels, taps]
  void* state = nullptr;         // [places, layers, taps - 1, channels]
  void* out = nullptr;           // [tokens, channels]
  int64_t x_stride = 0;          // between tokens, in elements
  int64_t channels = 0, taps = 0;
  DType dtype = DType::f32;
};

// Strides count elements between tokens. The last four are scratch.
struct RuleCall {
  StateRows rows;
  const void* q = nullptr;  // [tokens, key_heads, key_dim]
  const void* k = nullptr;
  const void* v = nullptr;  // [tokens, heads, value_dim]
  const void* a = nullptr;  // [tokens, heads]
  const void* b = nullptr;
  const float* rates = nullptr;  // [heads]
  const float* shift = nullptr;
  float* state = nullptr;  // [places, layers, heads, key_dim, value_dim]
  void* out = nullptr;     // [tokens, heads, value_dim]
  int64_t q_stride = 0, k_stride = 0, v_stride = 0, a_stride = 0, b_stride = 0;
  int64_t key_heads = 0, heads = 0, key_dim = 0, value_dim = 0;
  DType dtype = DType::f32;
  float* keys = nullptr;  // [tokens, key_heads, key_dim], of length 1
  float* queries = nullptr;
  float* decays = nullptr;  // [tokens, heads]
  float* strengths = nullptr;
};

void run_conv(const ConvCall& call);
void run_rule(RuleCall call);

// The work of one thread at one level: channels [begin, end) in vectors of `lanes`; tokens [begin, end); tasks [begin,
// end), one for each row, head and vector of value columns.
#define HYDRA_DELTA_LEVEL(level)                                                \
  namespace level {                                                             \
  int lanes();                                                                  \
  void conv_vectors(const ConvCall& call, int64_t begin, int64_t end);          \
  void prepare_tokens(const RuleCall& call, int64_t begin, int64_t end);        \
  void rule_tasks(const RuleCall& call, int64_t begin, int64_t end);            \
  }
HYDRA_DELTA_LEVEL(scalar)
HYDRA_DELTA_LEVEL(avx2)
HYDRA_DELTA_LEVEL(avx512bf16)
#undef HYDRA_DELTA_LEVEL

}  // namespace hydra

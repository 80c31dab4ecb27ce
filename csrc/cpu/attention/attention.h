// Attention of packed queries over the keys and values of their sequences, causal or not, paged or not.
//
// The numerical contract: a query's result is a function of the query, its sequence's keys and values and its position,
// bit for bit, whatever else is in the call. Keys are visited in tiles of kKeyTile aligned to position 0, with a
// running softmax. Masked keys have weights of exactly 0 and leave a query's sums unchanged, and the products
// of one query with one tile take the same operations in the same order in every shape of call.
//
// If causal, the running softmax restarts at every multiple of kSpanKeys, and the spans' states are merged in order.
// So several threads can compute the spans of a long context, with the same bits as one thread.
//
// Knows addresses and sizes; knows no Python. Arguments were checked by the caller (csrc/api/attention.cpp).
#pragma once

#include <cstdint>

#include "dtype.h"

namespace hydra {

constexpr int kKeyTile = 64;     // keys per step of the running softmax
constexpr int64_t kSpanKeys = 512;  // keys whose softmax may be computed apart from the rest; whole tiles
constexpr int kColumnTile = 16;  // (query, head) pairs that share the products with a key tile
constexpr int64_t kMaxHeadDim = 256;

// One request's queries and where its keys lie. Row j of K is at k + blocks[j / block_size] * block_bytes +
// (j % block_size) * row_bytes, heads dense inside a row; without blocks at k + j * row_bytes. V likewise.
struct Sequence {
  int64_t query_begin = 0;  // first row in q and out
  int64_t num_queries = 0;
  int64_t first_position = 0;  // of query 0; query i sees keys [0, first_position + i] if causal, else all
  int64_t num_keys = 0;
  const char* k = nullptr;
  const char* v = nullptr;
  const int32_t* blocks = nullptr;
  int64_t block_size = 0, block_bytes = 0;
  int64_t k_row_bytes = 0, v_row_bytes = 0;
  int64_t scales_offset = 0;  // of quantized rows: from k and v to their block's scales, [Hkv, block_size] float32
};

struct AttentionCall {
  const void* q = nullptr;  // [T, Hq, D], heads dense, q_stride elements between tokens
  int64_t q_stride = 0;
  void* out = nullptr;  // [T, Hq, D] contiguous
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  float scale = 1;
  bool causal = true;
  DType dtype = DType::f32;
  bool quantized = false;  // keys and values are int8 with scales, see cpu/cache/cache.h
  const Sequence* sequences = nullptr;
  int64_t num_sequences = 0;

  int64_t group() const { return num_heads / num_kv_heads; }
};

// Queries [token_begin, token_end) of one sequence with KV heads [head_begin, head_end), on one thread.
struct AttentionTask {
  const Sequence* sequence = nullptr;
  int64_t token_begin = 0, token_end = 0;
  int64_t head_begin = 0, head_end = 0;
  // If a sequence is divided into spans, the task is span `span` alone and writes its state here, [Hkv][columns]
  // [partial_width]. A task that merges reads the states of all spans, span_stride floats apart.
  float* partials = nullptr;
  int64_t span = 0;
  int64_t span_stride = 0;
};

// A column's state after a span, in floats: sums [partial_sums], total [kPartialTotal], top [1]; wide enough for any
// level.
constexpr int64_t kPartialTotal = 16;
constexpr int64_t partial_sums(int64_t head_dim) { return (head_dim + 31) / 32 * 32; }
constexpr int64_t partial_width(int64_t head_dim) { return partial_sums(head_dim) + 2 * kPartialTotal; }

void attention(const AttentionCall& call);

namespace scalar {
void attend(const AttentionCall& call, const AttentionTask& task);
void merge_spans(const AttentionCall& call, const AttentionTask& task);
}
namespace avx2 {
void attend(const AttentionCall& call, const AttentionTask& task);
void merge_spans(const AttentionCall& call, const AttentionTask& task);
}
namespace avx512 {
void attend(const AttentionCall& call, const AttentionTask& task);
void merge_spans(const AttentionCall& call, const AttentionTask& task);
}
namespace avx512bf16 {
void attend_bf16(const AttentionCall& call, const AttentionTask& task);
void merge_spans_bf16(const AttentionCall& call, const AttentionTask& task);
}
namespace amx {
void attend_bf16(const AttentionCall& call, const AttentionTask& task);
}

}  // namespace hydra

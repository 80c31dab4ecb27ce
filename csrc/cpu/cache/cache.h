// Addresses of slots in a paged cache, and copies of rows and blocks into, out of and between caches. Copies move
// bytes; only rotations and sums compute. Knows no Python. Slots were checked by the caller (csrc/api/cache.cpp).
#pragma once

#include <cstdint>

#include "dtype.h"

namespace hydra {

// [N, L, X, S, H, D] contiguous, the layout of backend/base.py. A slot is block * S + offset. If `quantized`, an element
// is an int8 and each plane [S, H, D] is followed by its scales, [H, S] float32: value = int8 * scale of slot and head.
struct CacheView {
  char* data = nullptr;
  int64_t num_blocks = 0;
  int64_t num_layers = 0;
  int64_t num_tensors = 0;  // X: 2 for keys and values, 1 for image features
  int64_t block_size = 0;   // S
  int64_t num_heads = 0;
  int64_t head_dim = 0;
  DType dtype = DType::f32;  // of rows that are written, and of elements unless `quantized`
  bool quantized = false;

  int64_t num_slots() const { return num_blocks * block_size; }
  int64_t row_bytes() const { return num_heads * head_dim * (quantized ? 1 : element_size(dtype)); }
  // Offset of a plane's scales.
  int64_t scales_offset() const { return block_size * row_bytes(); }
  int64_t plane_bytes() const { return scales_offset() + (quantized ? block_size * num_heads * 4 : 0); }
  int64_t block_bytes() const { return num_layers * num_tensors * plane_bytes(); }
  // Row 0 of block 0.
  char* plane(int64_t layer, int64_t tensor) const { return data + (layer * num_tensors + tensor) * plane_bytes(); }
  // `plane` as above, so that a loop computes it once.
  char* row(char* plane, int64_t slot) const {
    return plane + slot / block_size * block_bytes() + slot % block_size * row_bytes();
  }
  // The scale of head 0; the scales of the next heads are block_size apart.
  float* scales(char* plane, int64_t slot) const {
    return reinterpret_cast<float*>(plane + slot / block_size * block_bytes() + scales_offset()) + slot % block_size;
  }
};

// `rows` rows of H * D elements; the stride is in bytes.
struct RowSource {
  const char* data = nullptr;
  int64_t stride = 0;
};

struct WriteCall {
  CacheView cache;
  int64_t layer = 0;
  RowSource sources[2];  // one for each tensor of the cache
  const int64_t* slots = nullptr;
  int64_t rows = 0;
};

// Row t of sources[x] -> slots[t] of tensor x, for all X tensors of the cache; slot -1 skips the row.
// Into a quantized cache, for each head x of a row: scale = max(max |x| / 127, 2^-126) and round(x / scale), to nearest
// even; a head with an infinity or a NaN gets a NaN as its scale.
void write_rows(const WriteCall& call);

// Row m of `out` (contiguous) <- slots[m]; slot -1 leaves the row unchanged.
void gather_rows(const CacheView& cache, int64_t layer, int64_t tensor, const int64_t* slots, int64_t rows, char* out);

struct MergeCall {
  CacheView cache;
  int64_t layer = 0;
  const int64_t* slots = nullptr;    // [rows]
  const int64_t* targets = nullptr;  // [rows], none twice
  int64_t rows = 0;
  void* hidden = nullptr;  // rows of H * D elements, contiguous
  bool accumulate = false;
};

// hidden[targets[m]] <- slots[m] of tensor 0, or, with `accumulate`, their float32 sum rounded once; slot -1 leaves the
// row unchanged.
void merge_rows(const MergeCall& call);

// Block pairs[2 * i + 1] of `target` <- block pairs[2 * i] of `source`, all layers.
void copy_blocks(const CacheView& source, const CacheView& target, const int64_t* pairs, int64_t count);

struct RopeCall {
  const void* q = nullptr;  // [T, Hq, D], strides in elements between tokens, heads dense
  const void* k = nullptr;  // [T, Hkv, D]
  const void* v = nullptr;  // [T, Hkv, D]
  int64_t q_stride = 0, k_stride = 0, v_stride = 0;
  const float* cos = nullptr;  // [T, D / 2]
  const float* sin = nullptr;
  int64_t cos_stride = 0, sin_stride = 0;
  const void* q_norm = nullptr;  // [D]: each head is normed with this weight before it is rotated; null: not normed
  const void* k_norm = nullptr;
  float eps = 0;
  void* out = nullptr;  // rotated q, contiguous
  int64_t num_q_heads = 0;
  CacheView cache;
  int64_t layer = 0;
  const int64_t* slots = nullptr;
  int64_t tokens = 0;
};

// out = rotate(q); rotate(k) and v -> slots. Pairs are (i, i + D / 2), the arithmetic is float32, rounded once: to the
// rows' type or, in a quantized cache, to its integers.
void rope_and_write(const RopeCall& call);

// Tokens, or rows of a merge that accumulates or of a write that quantizes, [begin, end) on the calling thread.
namespace scalar {
void rope_tokens(const RopeCall& call, int64_t begin, int64_t end);
void add_merged(const MergeCall& call, int64_t begin, int64_t end);
void write_quantized(const WriteCall& call, int64_t begin, int64_t end);
}
namespace avx2 {
void rope_tokens(const RopeCall& call, int64_t begin, int64_t end);
void add_merged(const MergeCall& call, int64_t begin, int64_t end);
void write_quantized(const WriteCall& call, int64_t begin, int64_t end);
}
namespace avx512bf16 {
void rope_tokens(const RopeCall& call, int64_t begin, int64_t end);
void add_merged(const MergeCall& call, int64_t begin, int64_t end);
void write_quantized(const WriteCall& call, int64_t begin, int64_t end);
}

}  // namespace hydra

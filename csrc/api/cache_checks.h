// Checks of cache calls that the processor's entry points and the device's share, so that both word an error alike.
#pragma once

#include "api/api.h"
#include "check.h"
#include "cpu/cache/cache.h"

namespace hydra {

// Host memory; least <= values[i] < size.
inline void check_range(const char* name, const int64_t* values, int64_t count, int64_t least, int64_t size) {
  // One unsigned comparison per value, and a loop without an exit that the compiler can vectorise.
  uint64_t bad = 0;
  const uint64_t range = static_cast<uint64_t>(size - least);
  for (int64_t i = 0; i < count; ++i) bad |= static_cast<uint64_t>(values[i] - least) >= range;
  if (!bad) return;
  for (int64_t i = 0; i < count; ++i) {
    HYDRA_CHECK(values[i] >= least && values[i] < size, name, ": expected ", least, " to ", size - 1, ", got ",
                values[i], " at index ", i);
  }
}

inline CacheView make_cache(Address data, int64_t num_blocks, int64_t num_layers, int64_t num_tensors,
                            int64_t block_size, int64_t num_heads, int64_t head_dim, int dtype,
                            bool quantized = false) {
  HYDRA_CHECK(num_blocks >= 0 && num_layers >= 1 && block_size >= 1 && num_heads >= 1 && head_dim >= 1,
              "cache: expected sizes [N >= 0, L, X, S, H, D >= 1], got [", num_blocks, ", ", num_layers, ", ",
              num_tensors, ", ", block_size, ", ", num_heads, ", ", head_dim, "]");
  HYDRA_CHECK(num_tensors == 1 || num_tensors == 2, "cache: expected 1 or 2 tensors per layer, got ", num_tensors);
  HYDRA_CHECK(!quantized || (block_size * num_heads * head_dim % 4 == 0 && head_dim <= 1024),
              "cache: expected a multiple of 4 elements in a plane and a head dim up to 1024, got ", block_size, " x ",
              num_heads, " x ", head_dim);
  return {pointer<char>(data), num_blocks, num_layers, num_tensors, block_size, num_heads, head_dim,
          dtype_from_int(dtype), quantized};
}

inline void check_layer(const CacheView& cache, int64_t layer) {
  HYDRA_CHECK(layer >= 0 && layer < cache.num_layers, "layer: expected 0 to ", cache.num_layers - 1, ", got ", layer);
}

inline void check_tensor(const CacheView& cache, int64_t tensor) {
  HYDRA_CHECK(tensor >= 0 && tensor < cache.num_tensors, "index: expected 0 to ", cache.num_tensors - 1, ", got ",
              tensor);
}

inline void check_rope_cache(const CacheView& cache) {
  HYDRA_CHECK(cache.num_tensors == 2 && cache.head_dim % 2 == 0,
              "cache: expected 2 tensors per layer and an even head dim, got ", cache.num_tensors, " and ",
              cache.head_dim);
}

// `pairs` in host memory: count times (block of the source, block of the target).
inline void check_pairs(const CacheView& source, const CacheView& target, const int64_t* pairs, int64_t count) {
  HYDRA_CHECK(source.block_bytes() == target.block_bytes(), "target: expected blocks of ", source.block_bytes(),
              " bytes, got ", target.block_bytes());
  for (int64_t i = 0; i < count; ++i) {
    check_range("pairs[:, 0]", pairs + 2 * i, 1, 0, source.num_blocks);
    check_range("pairs[:, 1]", pairs + 2 * i + 1, 1, 0, target.num_blocks);
  }
}

}  // namespace hydra

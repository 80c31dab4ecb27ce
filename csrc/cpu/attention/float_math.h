// Products in float32 for any storage type: keys and values are widened while a tile is packed.
// Include after defining a level, see cpu/simd.h.
//
// Packed keys: [kKeyTile / kLanes][D][kLanes], a vector holds one dimension of kLanes keys. Packed values:
// [kKeyTile][sums_width]. A score adds its dimensions in order, a sum its keys in order, each in one chain of
// multiply-adds: how many rows are worked on together changes nothing.
#pragma once

#include <type_traits>

#include "cpu/attention/driver.h"

namespace hydra::HYDRA_LEVEL {

// rows[i][j] <-> rows[j][i].
HYDRA_INLINE void transpose(vf* rows) {
  exchange<1>(rows, Lanes());
  exchange<2>(rows, Lanes());
  if constexpr (kLanes > 4) exchange<4>(rows, Lanes());
  if constexpr (kLanes > 8) exchange<8>(rows, Lanes());
}

template <class T>
struct FloatMath {
  using Stored = T;
  using Element = float;
  using Keys = const float*;
  static constexpr bool kFine = std::is_same_v<T, float>;
  static constexpr int kVectors = kLanes == 16 ? 4 : 2;  // vectors per row of a register block
  static constexpr int kRows = 4;

  static constexpr int64_t query_width(int64_t dim) { return (dim + kLanes - 1) / kLanes * kLanes; }
  static constexpr int64_t sums_width(int64_t dim) { return (dim + kLanes - 1) / kLanes * kLanes; }

  static void begin(int) {}
  static void end() {}

  HYDRA_INLINE static vf load_at(const T* row, int64_t d, int64_t dim) {
    return d + kLanes <= dim ? load(row + d) : load_part(row + d, static_cast<int>(dim - d));
  }

  HYDRA_INLINE static void pack_query(const T* row, int64_t dim, int64_t column, float* packed) {
    packed += column * query_width(dim);
    for (int64_t d = 0; d < dim; d += kLanes) store(packed + d, load_at(row, d, dim));
  }

  HYDRA_TARGET static Keys pack_keys(const T* const* rows, int count, int64_t dim, float* memory) {
    float* packed = memory;
    for (int first = 0; first < count; first += kLanes, packed += dim * kLanes) {
      for (int64_t d = 0; d < dim; d += kLanes) {
        vf block[kLanes];
#pragma GCC unroll 16
        for (int j = 0; j < kLanes; ++j) block[j] = load_at(rows[first + j], d, dim);
        transpose(block);
        const int some = static_cast<int>(dim - d < kLanes ? dim - d : kLanes);
        for (int i = 0; i < some; ++i) store(packed + (d + i) * kLanes, block[i]);
      }
    }
    return memory;
  }

  HYDRA_TARGET static void pack_values(const T* const* rows, int count, int64_t dim, float* packed, Prefetcher& next) {
    const int64_t lines = next.lines() / kKeyTile;
    for (int j = 0; j < count; ++j, packed += sums_width(dim)) {
      next.lines(lines);
      for (int64_t d = 0; d < dim; d += kLanes) store(packed + d, load_at(rows[j], d, dim));
    }
  }

  template <int R, int V>
  HYDRA_INLINE static void score_block(const float* q, int64_t width, const float* keys, int64_t dim, float* scores) {
    vf total[R][V] = {};
    for (int64_t d = 0; d < dim; ++d) {
      vf key[V];
      for (int v = 0; v < V; ++v) key[v] = load(keys + (v * dim + d) * kLanes);
      for (int r = 0; r < R; ++r) {
        const vf query = splat(q[r * width + d]);
        for (int v = 0; v < V; ++v) total[r][v] = fused_multiply_add(query, key[v], total[r][v]);
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) store(scores + r * kKeyTile + v * kLanes, total[r][v]);
    }
  }

  template <int V>
  HYDRA_INLINE static void score_rows(const float* q, int rows, const float* keys, int64_t dim, float* scores) {
    const int64_t width = query_width(dim);
    int r = 0;
    for (; r + kRows <= rows; r += kRows) score_block<kRows, V>(q + r * width, width, keys, dim, scores + r * kKeyTile);
    for (; r < rows; ++r) score_block<1, V>(q + r * width, width, keys, dim, scores + r * kKeyTile);
  }

  HYDRA_TARGET static void multiply_keys(const float* q, int rows, const float* keys, int count, int64_t dim,
                                         float* scores) {
    int first = 0;
    for (; first + kVectors * kLanes <= count; first += kVectors * kLanes) {
      score_rows<kVectors>(q, rows, keys + first * dim, dim, scores + first);
    }
    for (; first < count; first += kLanes) score_rows<1>(q, rows, keys + first * dim, dim, scores + first);
  }

  template <int kCount>
  HYDRA_INLINE static void store_weights(float* target, const vf* weights) {
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) store(target + i * kLanes, weights[i]);
  }

  template <int R, int V>
  HYDRA_INLINE static void sum_block(const float* weights, const float* values, int count, int64_t width, float* sums) {
    vf total[R][V];
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) total[r][v] = load(sums + r * width + v * kLanes);
    }
    for (int j = 0; j < count; ++j) {
      vf value[V];
      for (int v = 0; v < V; ++v) value[v] = load(values + j * width + v * kLanes);
      for (int r = 0; r < R; ++r) {
        const vf weight = splat(weights[r * kKeyTile + j]);
        for (int v = 0; v < V; ++v) total[r][v] = fused_multiply_add(weight, value[v], total[r][v]);
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) store(sums + r * width + v * kLanes, total[r][v]);
    }
  }

  template <int R>
  HYDRA_INLINE static void sum_rows(const float* weights, const float* values, int count, int64_t width, float* sums) {
    int64_t d = 0;
    for (; d + kVectors * kLanes <= width; d += kVectors * kLanes) {
      sum_block<R, kVectors>(weights, values + d, count, width, sums + d);
    }
    for (; d < width; d += kLanes) sum_block<R, 1>(weights, values + d, count, width, sums + d);
  }

  HYDRA_TARGET static void multiply_values(const float* weights, int rows, const float* values, int count, int64_t dim,
                                           float* sums) {
    const int64_t width = sums_width(dim);
    int r = 0;
    for (; r + kRows <= rows; r += kRows) {
      sum_rows<kRows>(weights + r * kKeyTile, values, count, width, sums + r * width);
    }
    for (; r < rows; ++r) sum_rows<1>(weights + r * kKeyTile, values, count, width, sums + r * width);
  }

  HYDRA_INLINE static void store_result(const float* sums, float factor, int64_t dim, T* row) {
    for (int64_t d = 0; d < dim; d += kLanes) {
      const vf result = load(sums + d) * factor;
      if (d + kLanes <= dim) {
        store(row + d, result);
      } else {
        store_part(row + d, result, static_cast<int>(dim - d));
      }
    }
  }
};

}  // namespace hydra::HYDRA_LEVEL

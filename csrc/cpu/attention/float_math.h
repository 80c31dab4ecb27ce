// Products in float32 for any storage type: keys and values are widened on their way. Include after defining a level,
// see cpu/simd.h.
//
// A row is cut into steps of a vector each (float_steps.h). A score has one chain of multiply-adds per lane, step after
// step, and then adds the lanes up in pairs, pairs of pairs and so on; a sum adds its keys in one chain, in order. Both
// classes here do that, so a query's bits do not depend on which of them it meets, nor on how many rows are worked on
// together.
#pragma once

#include "cpu/attention/driver.h"
#include "cpu/attention/float_steps.h"

namespace hydra::HYDRA_LEVEL {

// Shared parts of both kinds of products: queries and results of T, keys and values of C.
template <class T, class C = T>
struct FloatMath {
  using Stored = T;
  using Cached = C;
  using Element = float;
  using Steps = FloatSteps<C>;
  static constexpr bool kScaled = std::is_same_v<C, int8_t>;
  static constexpr bool kFine = std::is_same_v<T, float>;

  static constexpr int64_t query_width(int64_t dim) { return Steps::width(dim); }
  static constexpr int64_t sums_width(int64_t dim) { return Steps::width(dim); }

  static void begin(int) {}
  static void end() {}

  template <int kCount>
  HYDRA_INLINE static void store_weights(float* target, const vf* weights) {
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) store(target + i * kLanes, weights[i]);
  }

  template <int R, int V>
  HYDRA_INLINE static void load_sums(const float* sums, int64_t width, vf (&total)[R][V]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) total[r][v] = load(sums + r * width + v * kLanes);
    }
  }

  template <int R, int V>
  HYDRA_INLINE static void store_sums(const vf (&total)[R][V], int64_t width, float* sums) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) store(sums + r * width + v * kLanes, total[r][v]);
    }
  }

  HYDRA_INLINE static void store_result(const float* sums, float factor, int64_t dim, T* row) {
    Steps::store_row(sums, factor, dim, row);
  }
};

// Many columns share the work of packing a tile. Packed queries: [columns][kLanes][steps]. Packed keys:
// [kKeyTile / kLanes][kLanes of a step][steps][keys]. Packed values: [kKeyTile][steps][kLanes].
template <class T, class C>
struct ManyFloatColumns : FloatMath<T, C> {
  static constexpr bool kByRows = false;
  static constexpr bool kInTurns = false;
  using typename FloatMath<T, C>::Steps;
  using Keys = const float*;
  static constexpr int kVectors = kLanes == 16 ? 4 : 2;  // vectors per row of a register block
  static constexpr int kRows = 4;
  static constexpr int kRounds = kLanes == 16 ? 4 : kLanes == 8 ? 3 : 2;  // of adding pairs of lanes

  HYDRA_INLINE static void pack_query(const T* row, int64_t dim, int64_t column, float* packed) {
    const int64_t width = Steps::width(dim), steps = width / kLanes;
    packed += column * width;
    for (int64_t step = 0; step < steps; ++step) {
      const vf value = Steps::load_step(row, step, dim);
      for (int lane = 0; lane < kLanes; ++lane) packed[lane * steps + step] = value[lane];
    }
  }

  HYDRA_TARGET static Keys pack_keys(const C* const* rows, int count, int64_t dim, float* memory) {
    const int64_t width = Steps::width(dim), steps = width / kLanes;
    float* packed = memory;
    for (int first = 0; first < count; first += kLanes, packed += width * kLanes) {
      for (int64_t step = 0; step < steps; ++step) {
        vf block[kLanes];
#pragma GCC unroll 16
        for (int j = 0; j < kLanes; ++j) block[j] = Steps::load_step(rows[first + j], step, dim);
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(packed + (i * steps + step) * kLanes, block[i]);
      }
    }
    return memory;
  }

  HYDRA_TARGET static void pack_values(const C* const* rows, int count, int64_t dim, float* packed, Prefetcher& next) {
    const int64_t lines = next.lines() / kKeyTile, width = Steps::width(dim);
    for (int j = 0; j < count; ++j, packed += width) {
      next.lines(lines);
      for (int64_t step = 0; step < width / kLanes; ++step) {
        store(packed + step * kLanes, Steps::load_step(rows[j], step, dim));
      }
    }
  }

  template <int R, int V>
  HYDRA_INLINE static void score_block(const float* q, int64_t width, const float* keys, float* scores) {
    const int64_t steps = width / kLanes;
    vf sums[kRounds + 1][R][V];  // of 1, 2, 4, .. lanes
    for (int lane = 0; lane < kLanes; ++lane, keys += steps * kLanes, q += steps) {
      vf total[R][V] = {};
      for (int64_t step = 0; step < steps; ++step) {
        vf key[V];
        for (int v = 0; v < V; ++v) key[v] = load(keys + (v * width + step) * kLanes);
        for (int r = 0; r < R; ++r) {
          const vf query = splat(q[r * width + step]);
          for (int v = 0; v < V; ++v) total[r][v] = fused_multiply_add(query, key[v], total[r][v]);
        }
      }
      int round = 0;
      for (int bits = lane; bits & 1; bits >>= 1, ++round) {
        for (int r = 0; r < R; ++r) {
          for (int v = 0; v < V; ++v) total[r][v] += sums[round][r][v];
        }
      }
      for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) sums[round][r][v] = total[r][v];
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) store(scores + r * kKeyTile + v * kLanes, sums[kRounds][r][v]);
    }
  }

  template <int V>
  HYDRA_INLINE static void score_rows(const float* q, int rows, const float* keys, int64_t dim, float* scores) {
    const int64_t width = Steps::width(dim);
    int r = 0;
    for (; r + kRows <= rows; r += kRows) score_block<kRows, V>(q + r * width, width, keys, scores + r * kKeyTile);
    for (; r < rows; ++r) score_block<1, V>(q + r * width, width, keys, scores + r * kKeyTile);
  }

  HYDRA_TARGET static void multiply_keys(const float* q, int rows, const float* keys, int count, int64_t dim,
                                         float* scores) {
    const int64_t width = Steps::width(dim);
    int first = 0;
    for (; first + kVectors * kLanes <= count; first += kVectors * kLanes) {
      score_rows<kVectors>(q, rows, keys + first * width, dim, scores + first);
    }
    for (; first < count; first += 2 * kLanes) score_rows<2>(q, rows, keys + first * width, dim, scores + first);
  }

  template <int R, int V>
  HYDRA_INLINE static void sum_block(const float* weights, const float* values, int count, int64_t width, float* sums) {
    vf total[R][V];
    FloatMath<T, C>::load_sums(sums, width, total);
    for (int j = 0; j < count; ++j) {
      vf value[V];
      for (int v = 0; v < V; ++v) value[v] = load(values + j * width + v * kLanes);
      for (int r = 0; r < R; ++r) {
        const vf weight = splat(weights[r * kKeyTile + j]);
        for (int v = 0; v < V; ++v) total[r][v] = fused_multiply_add(weight, value[v], total[r][v]);
      }
    }
    FloatMath<T, C>::store_sums(total, width, sums);
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
    const int64_t width = Steps::width(dim);
    int r = 0;
    for (; r + kRows <= rows; r += kRows) {
      sum_rows<kRows>(weights + r * kKeyTile, values, count, width, sums + r * width);
    }
    for (; r < rows; ++r) sum_rows<1>(weights + r * kKeyTile, values, count, width, sums + r * width);
  }
};

}  // namespace hydra::HYDRA_LEVEL

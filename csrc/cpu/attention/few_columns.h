// Products of few columns with rows as they lie in the cache. Include after defining a level, see cpu/simd.h.
#pragma once

#include "cpu/attention/float_math.h"

namespace hydra::HYDRA_LEVEL {

// Up to kColumnTile columns: rows are multiplied as they lie in the cache, in the order in which they lie there, a few
// rows of all heads after another. Packing would cost more than reading them. Packed queries: [columns][steps][kLanes].
//
// A block of R columns takes a few keys at once, and a vector of a key is widened once for all of them. Sizes of blocks
// are those whose sums stay in registers and are enough chains to hide the latency of an addition. Loops over arrays of
// sums are unrolled by order: one that is not would keep its array in memory.
template <class T, class C>
struct FewFloatColumns : FloatMath<T, C> {
  using typename FloatMath<T, C>::Steps;
  static constexpr bool kByRows = true;
  static constexpr bool kInTurns = false;
  static constexpr int kVectors = Steps::kVectors;       // of a chunk
  static constexpr int64_t kChunk = kVectors * kLanes;   // dimensions
  static constexpr bool kManyRegisters = kLanes == 16;

  static constexpr int block_size(int columns) {
    return kManyRegisters || columns == 1 ? 8 : columns == 4 ? 2 : 4;
  }
  static constexpr int block_keys(int columns) { return block_size(columns) < kLanes ? block_size(columns) : kLanes; }
  static constexpr int block_vectors(int columns) { return block_size(columns); }
  // With 16 registers four columns take fewer loads and conversions than two and two.
  static constexpr bool takes_four(int columns) { return !kManyRegisters && columns >= 4 && columns != 6; }

  HYDRA_INLINE static void pack_query(const T* row, int64_t dim, int64_t column, float* packed) {
    const int64_t width = Steps::width(dim);
    packed += column * width;
    for (int64_t step = 0; step < width / kLanes; ++step) {
      store(packed + step * kLanes, Steps::load_step(row, step, dim));
    }
  }

  // Vector kPart of the chunk of K keys that begins with dimension d.
  template <int R, int K, bool kWhole, int kPart>
  HYDRA_INLINE static void multiply_vector(const float* q, int64_t width, const C* const* keys, int64_t d, int64_t dim,
                                           vf (&total)[R][K]) {
    vf query[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) query[r] = load_once(q + r * width + d + kPart * kLanes);
#pragma GCC unroll 16
    for (int k = 0; k < K; ++k) {
      const vf key = Steps::template load_vector<kWhole, kPart, R>(keys[k], d, dim);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) accumulate(total[r][k], query[r], key);
    }
  }

  template <int R, int K, bool kWhole>
  HYDRA_INLINE static void multiply_chunk(const float* q, int64_t width, const C* const* keys, int64_t d, int64_t dim,
                                          vf (&total)[R][K]) {
    multiply_vector<R, K, kWhole, 0>(q, width, keys, d, dim, total);
    if constexpr (kVectors == 2) multiply_vector<R, K, kWhole, 1>(q, width, keys, d, dim, total);
  }

  // scores[r][0 .. kLanes) of R columns with kLanes keys.
  template <int R>
  HYDRA_INLINE static void score_block(const float* q, const char* const* rows, int64_t offset, int64_t dim,
                                       float* scores) {
    constexpr int K = block_keys(R);
    const int64_t width = Steps::width(dim), whole = dim / kChunk * kChunk;
    vf parts[R][kLanes];  // entries 0, K, 2 K, ..: sums of K keys each, not yet merged
#pragma GCC unroll 16
    for (int first = 0; first < kLanes; first += K) {
      const C* keys[K];
#pragma GCC unroll 16
      for (int k = 0; k < K; ++k) keys[k] = in_register(reinterpret_cast<const C*>(rows[first + k] + offset));
      vf total[R][K];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
        for (int k = 0; k < K; ++k) total[r][k] = splat(0.0f);
      }
#pragma GCC unroll 8
      for (int64_t d = 0; d < whole; d += kChunk) multiply_chunk<R, K, true>(q, width, keys, d, dim, total);
      if (whole < dim) multiply_chunk<R, K, false>(q, width, keys, whole, dim, total);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        merge_rounds<true, 1, K>(total[r]);
        parts[r][first] = total[r][0];
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      merge_rounds<true, K, kLanes>(parts[r]);
      store(scores + r * kKeyTile, parts[r][0]);
    }
  }

  template <int R>
  HYDRA_INLINE static void score_rows_of(const float* q, const char* const* rows, int64_t offset, int64_t dim,
                                         float* scores) {
    for (int first = 0; first < kRowGroup; first += kLanes) {
      score_block<R>(q, rows + first, offset, dim, scores + first);
    }
  }

  // The usual head dims are constants for the compiler.
  template <int R>
  HYDRA_TARGET __attribute__((noinline)) static void score_rows(const float* q, const char* const* rows, int64_t offset,
                                                                int64_t dim, float* scores) {
    if (dim == 64) return score_rows_of<R>(q, rows, offset, 64, scores);
    if (dim == 128) return score_rows_of<R>(q, rows, offset, 128, scores);
    score_rows_of<R>(q, rows, offset, dim, scores);
  }

  // scores[column][0 .. kRowGroup) of `columns` columns with the keys that lie at `offset` in kRowGroup rows.
  HYDRA_INLINE static void multiply_keys(const float* q, int columns, const char* const* rows, int64_t offset,
                                         int64_t dim, float* scores) {
    const int64_t width = Steps::width(dim);
    if (columns == 1) return score_rows<1>(q, rows, offset, dim, scores);
    for (; takes_four(columns); columns -= 4, q += 4 * width, scores += 4 * kKeyTile) {
      score_rows<4>(q, rows, offset, dim, scores);
    }
    for (; columns == 3 || columns > 4; columns -= 3, q += 3 * width, scores += 3 * kKeyTile) {
      score_rows<3>(q, rows, offset, dim, scores);
    }
    for (; columns > 0; columns -= 2, q += 2 * width, scores += 2 * kKeyTile) {
      score_rows<2>(q, rows, offset, dim, scores);
    }
  }

  // N chunks of the values of `count` keys from dimension d on.
  template <int R, int N, bool kWhole>
  HYDRA_INLINE static void sum_block(const float* weights, const char* const* rows, int64_t offset, int count,
                                     int64_t d, int64_t dim, float* sums) {
    const int64_t width = Steps::width(dim);
    vf total[R][N * kVectors];
    FloatMath<T, C>::load_sums(sums + d, width, total);
#pragma GCC unroll 8
    for (int j = 0; j < count; ++j) {
      const C* row = reinterpret_cast<const C*>(rows[j] + offset);
      vf weight[R];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) weight[r] = in_register(splat(weights[r * kKeyTile + j]));
#pragma GCC unroll 16
      for (int v = 0; v < N * kVectors; ++v) {
        const int64_t at = d + v / kVectors * kChunk;
        const vf value = v % kVectors ? Steps::template load_vector<kWhole, kVectors - 1, R>(row, at, dim)
                                      : Steps::template load_vector<kWhole, 0, R>(row, at, dim);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) accumulate(total[r][v], weight[r], value);
      }
    }
    FloatMath<T, C>::store_sums(total, width, sums + d);
  }

  template <int R>
  HYDRA_INLINE static void sum_rows_of(const float* weights, const char* const* rows, int64_t offset, int count,
                                       int64_t dim, float* sums) {
    constexpr int N = block_vectors(R) / kVectors;
    const int64_t whole = dim / kChunk * kChunk;
    int64_t d = 0;
    for (; d + N * kChunk <= whole; d += N * kChunk) sum_block<R, N, true>(weights, rows, offset, count, d, dim, sums);
    for (; d < whole; d += kChunk) sum_block<R, 1, true>(weights, rows, offset, count, d, dim, sums);
    if (whole < dim) sum_block<R, 1, false>(weights, rows, offset, count, whole, dim, sums);
  }

  template <int R>
  HYDRA_TARGET __attribute__((noinline)) static void sum_rows(const float* weights, const char* const* rows,
                                                              int64_t offset, int count, int64_t dim, float* sums) {
    if (dim == 64) return sum_rows_of<R>(weights, rows, offset, count, 64, sums);
    if (dim == 128) return sum_rows_of<R>(weights, rows, offset, count, 128, sums);
    sum_rows_of<R>(weights, rows, offset, count, dim, sums);
  }

  // Adds to the sums of `columns` columns the values that lie at `offset` in `count` rows.
  HYDRA_INLINE static void multiply_values(const float* weights, int columns, const char* const* rows, int64_t offset,
                                           int count, int64_t dim, float* sums) {
    const int64_t width = Steps::width(dim);
    if (columns == 1) return sum_rows<1>(weights, rows, offset, count, dim, sums);
    for (; takes_four(columns); columns -= 4, weights += 4 * kKeyTile, sums += 4 * width) {
      sum_rows<4>(weights, rows, offset, count, dim, sums);
    }
    for (; columns == 3 || columns > 4; columns -= 3, weights += 3 * kKeyTile, sums += 3 * width) {
      sum_rows<3>(weights, rows, offset, count, dim, sums);
    }
    for (; columns > 0; columns -= 2, weights += 2 * kKeyTile, sums += 2 * width) {
      sum_rows<2>(weights, rows, offset, count, dim, sums);
    }
  }
};

}  // namespace hydra::HYDRA_LEVEL

// bf16 attention through the dot product of pairs.
#include "cpu/isa.h"

#if HYDRA_X86
#define HYDRA_LEVEL avx512bf16
#define HYDRA_LANES 16
#define HYDRA_TARGET HYDRA_TARGET_AVX512BF16
#define HYDRA_BF16
#include "cpu/attention/bf16_math.h"

namespace hydra::avx512bf16 {
namespace {

HYDRA_INLINE __m512 dot_pairs(__m512 total, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(total, (__m512bh)a, (__m512bh)b);
}

HYDRA_INLINE __m512i pair_of(const bf16_t* pair) {
  int32_t bits;
  std::memcpy(&bits, pair, 4);
  return _mm512_set1_epi32(bits);
}

// A score adds its pairs of dimensions in order, a sum its pairs of keys in turns (driver.h), each in one chain. Both
// classes here do that, so a query's bits do not depend on which of them it meets. This one is for many columns, which
// share packed tiles.
struct ManyBf16Columns : Bf16Tiles {
  static constexpr int kRows = 4, kVectors = 4;

  static void begin(int) {}
  static void end() {}

  template <int R, int V>
  HYDRA_INLINE static void score_block(const bf16_t* q, int64_t width, const bf16_t* keys, int64_t dim, float* scores) {
    __m512 total[R][V];
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) total[r][v] = _mm512_setzero_ps();
    }
    for (int64_t d = 0; d < dim; d += 2) {
      __m512i key[V];
      for (int v = 0; v < V; ++v) key[v] = _mm512_loadu_si512(keys + v * width * kLanes + d * kLanes);
      for (int r = 0; r < R; ++r) {
        const __m512i query = pair_of(q + r * width + d);
        for (int v = 0; v < V; ++v) total[r][v] = dot_pairs(total[r][v], query, key[v]);
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) _mm512_storeu_ps(scores + r * kKeyTile + v * kLanes, total[r][v]);
    }
  }

  template <int V>
  HYDRA_INLINE static void score_rows(const bf16_t* q, int rows, const bf16_t* keys, int64_t dim, float* scores) {
    const int64_t width = query_width(dim);
    int r = 0;
    for (; r + kRows <= rows; r += kRows) score_block<kRows, V>(q + r * width, width, keys, dim, scores + r * kKeyTile);
    for (; r < rows; ++r) score_block<1, V>(q + r * width, width, keys, dim, scores + r * kKeyTile);
  }

  HYDRA_TARGET static void multiply_keys(const bf16_t* q, int rows, const bf16_t* keys, int count, int64_t dim,
                                         float* scores) {
    if (count == kKeyTile) {
      score_rows<4>(q, rows, keys, dim, scores);
    } else {
      score_rows<2>(q, rows, keys, dim, scores);
    }
  }

  template <int R, int V>
  HYDRA_INLINE static void sum_block(const bf16_t* weights, const bf16_t* values, int count, int64_t width,
                                     float* sums) {
    constexpr int64_t kGroup = kKeyTile * kLanes;
    __m512 total[R][V];
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) total[r][v] = _mm512_loadu_ps(sums + r * width + v * kLanes);
    }
    for (int pair = 0; pair < kQuarter; pair += 2) {
      for (int j = pair; j < count; j += kQuarter) {
        __m512i value[V];
        for (int v = 0; v < V; ++v) value[v] = _mm512_loadu_si512(values + v * kGroup + j * kLanes);
        for (int r = 0; r < R; ++r) {
          const __m512i weight = pair_of(weights + r * kKeyTile + j);
          for (int v = 0; v < V; ++v) total[r][v] = dot_pairs(total[r][v], weight, value[v]);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) _mm512_storeu_ps(sums + r * width + v * kLanes, total[r][v]);
    }
  }

  template <int R>
  HYDRA_INLINE static void sum_rows(const bf16_t* weights, const bf16_t* values, int count, int64_t width,
                                    float* sums) {
    int64_t d = 0;
    for (; d + 4 * kLanes <= width; d += 4 * kLanes) {
      sum_block<R, 4>(weights, values + d * kKeyTile, count, width, sums + d);
    }
    for (; d < width; d += 2 * kLanes) sum_block<R, 2>(weights, values + d * kKeyTile, count, width, sums + d);
  }

  HYDRA_TARGET static void multiply_values(const bf16_t* weights, int rows, const bf16_t* values, int count,
                                           int64_t dim, float* sums) {
    const int64_t width = sums_width(dim);
    int r = 0;
    for (; r + kRows <= rows; r += kRows) {
      sum_rows<kRows>(weights + r * kKeyTile, values, count, width, sums + r * width);
    }
    for (; r < rows; ++r) sum_rows<1>(weights + r * kKeyTile, values, count, width, sums + r * width);
  }
};

// Up to kColumnTile columns: rows are multiplied as they lie in the cache, as by FewFloatColumns. A score has no lanes
// to add up, since blocks of 16 keys x 16 pairs of dimensions are transposed in registers.
struct FewBf16Columns : Bf16Tiles {
  static constexpr bool kByRows = true;
  static constexpr bool kInTurns = true;
  static constexpr int kBlock = 8;  // most columns at once: their scores lie in registers beside 16 pairs

  static void begin(int) {}
  static void end() {}

  template <int R>
  HYDRA_INLINE static void score_chunk(const bf16_t* q, const char* const* rows, int64_t offset, int64_t d, int64_t dim,
                                       __m512 (&total)[R]) {
    vf pairs[kLanes];  // bit patterns of pairs: only moved, never computed with
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; ++j) {
      pairs[j] = (vf)load_at(reinterpret_cast<const bf16_t*>(in_register(rows[j]) + offset), d, dim);
    }
    transpose(pairs);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        total[r] = dot_pairs(total[r], pair_of(q + r * query_width(dim) + d + 2 * i), (__m512i)pairs[i]);
      }
    }
  }

  template <int kTurn>
  HYDRA_INLINE static void store_turn(float* scores, __m512i row) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(scores + kTurn * kQuarter), _mm512_extracti32x4_epi32(row, kTurn));
  }

  HYDRA_INLINE static void store_turns(float* scores, __m512i row) {
    store_turn<0>(scores, row);
    store_turn<1>(scores, row);
    store_turn<2>(scores, row);
    store_turn<3>(scores, row);
  }

  // Scores of R columns with the keys at `offset` in a group of rows.
  template <int R>
  HYDRA_INLINE static void score_rows_of(const bf16_t* q, const char* const* rows, int64_t offset, int64_t dim,
                                         float* scores) {
    __m512 total[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) total[r] = _mm512_setzero_ps();
    for (int64_t d = 0; d < dim; d += kChunk) score_chunk<R>(q, rows, offset, d, dim, total);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store_turns(scores + r * kKeyTile, (__m512i)total[r]);
  }

  // N chunks of the sums of R columns with the values of a group of rows.
  template <int R, int N>
  HYDRA_INLINE static void sum_chunks(const bf16_t* weights, const char* const* rows, int64_t offset, int64_t d,
                                      int64_t dim, float* sums) {
    const int64_t width = sums_width(dim);
    __m512 total[R][2 * N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < 2 * N; ++v) total[r][v] = _mm512_loadu_ps(sums + r * width + d + v * kLanes);
    }
    for (int pair = 0; pair < kTurnKeys; pair += 2) {
      for (int turn = 0; turn < kTurns; ++turn) {  // rows without a key may be read and have a weight of 0
        const int row = turn * kTurnKeys + pair;
        const bf16_t* first = reinterpret_cast<const bf16_t*>(rows[row] + offset);
        const bf16_t* second = reinterpret_cast<const bf16_t*>(rows[row + 1] + offset);
        __m512i value[2 * N];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
          const __m512i even = load_at(first, d + n * kChunk, dim), odd = load_at(second, d + n * kChunk, dim);
          value[2 * n] = _mm512_unpacklo_epi16(even, odd);
          value[2 * n + 1] = _mm512_unpackhi_epi16(even, odd);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m512i weight = pair_of(weights + r * kKeyTile + turn * kQuarter + pair);
#pragma GCC unroll 8
          for (int v = 0; v < 2 * N; ++v) total[r][v] = dot_pairs(total[r][v], weight, value[v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < 2 * N; ++v) _mm512_storeu_ps(sums + r * width + d + v * kLanes, total[r][v]);
    }
  }

  template <int R>
  HYDRA_INLINE static void sum_rows_of(const bf16_t* weights, const char* const* rows, int64_t offset, int64_t dim,
                                       float* sums) {
    constexpr int N = R <= 2 ? 4 : R <= 4 ? 2 : 1;  // at most 16 registers of sums
    int64_t d = 0;
    for (; d + N * kChunk <= dim; d += N * kChunk) sum_chunks<R, N>(weights, rows, offset, d, dim, sums);
    if (N > 2 && d + 2 * kChunk <= dim) {
      sum_chunks<R, 2>(weights, rows, offset, d, dim, sums);
      d += 2 * kChunk;
    }
    for (; d < dim; d += kChunk) sum_chunks<R, 1>(weights, rows, offset, d, dim, sums);
  }

  // The usual head dims are constants for the compiler.
  template <int R>
  HYDRA_TARGET __attribute__((noinline)) static void score_rows(const bf16_t* q, const char* const* rows,
                                                                int64_t offset, int64_t dim, float* scores) {
    if (dim == 64) return score_rows_of<R>(q, rows, offset, 64, scores);
    if (dim == 128) return score_rows_of<R>(q, rows, offset, 128, scores);
    score_rows_of<R>(q, rows, offset, dim, scores);
  }

  template <int R>
  HYDRA_TARGET __attribute__((noinline)) static void sum_rows(const bf16_t* weights, const char* const* rows,
                                                              int64_t offset, int64_t dim, float* sums) {
    if (dim == 64) return sum_rows_of<R>(weights, rows, offset, 64, sums);
    if (dim == 128) return sum_rows_of<R>(weights, rows, offset, 128, sums);
    sum_rows_of<R>(weights, rows, offset, dim, sums);
  }

  // Scores of `columns` columns with the keys that lie at `offset` in a group of rows; scores[0] is the first key's.
  template <int R = kBlock>
  HYDRA_INLINE static void multiply_keys(const bf16_t* q, int columns, const char* const* rows, int64_t offset,
                                         int64_t dim, float* scores) {
    for (; columns >= R; columns -= R, q += R * query_width(dim), scores += R * kKeyTile) {
      score_rows<R>(q, rows, offset, dim, scores);
    }
    if constexpr (R > 1) multiply_keys<R - 1>(q, columns, rows, offset, dim, scores);
  }

  // Adds to the sums of `columns` columns the values at `offset` in a group of rows; weights[0] is the first key's.
  template <int R = kBlock>
  HYDRA_INLINE static void multiply_values(const bf16_t* weights, int columns, const char* const* rows, int64_t offset,
                                           int group, int64_t dim, float* sums) {
    for (; columns >= R; columns -= R, weights += R * kKeyTile, sums += R * sums_width(dim)) {
      sum_rows<R>(weights, rows, offset, dim, sums);
    }
    if constexpr (R > 1) multiply_values<R - 1>(weights, columns, rows, offset, group, dim, sums);
  }
};

}  // namespace

void attend_bf16(const AttentionCall& call, const AttentionTask& task) {
  if ((task.token_end - task.token_begin) * call.group() <= kColumnTile) {
    attend_with<FewBf16Columns>(call, task);
  } else {
    attend_with<ManyBf16Columns>(call, task);
  }
}

void merge_spans_bf16(const AttentionCall& call, const AttentionTask& task) {
  merge_with<ManyBf16Columns>(call, task);
}

}  // namespace hydra::avx512bf16
#endif

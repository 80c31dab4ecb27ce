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

// A score adds its pairs of dimensions in order, a sum its pairs of keys in order, each in one chain.
struct Bf16Math : Bf16Tiles {
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
    for (int j = 0; j < count; j += 2) {
      __m512i value[V];
      for (int v = 0; v < V; ++v) value[v] = _mm512_loadu_si512(values + v * kGroup + j * kLanes);
      for (int r = 0; r < R; ++r) {
        const __m512i weight = pair_of(weights + r * kKeyTile + j);
        for (int v = 0; v < V; ++v) total[r][v] = dot_pairs(total[r][v], weight, value[v]);
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

}  // namespace

void attend_bf16(const AttentionCall& call, const AttentionTask& task) { attend_with<Bf16Math>(call, task); }

void merge_spans_bf16(const AttentionCall& call, const AttentionTask& task) { merge_with<Bf16Math>(call, task); }

}  // namespace hydra::avx512bf16
#endif

// bf16 attention on AMX tiles. A tile product adds, for each of its sums, 32 terms in an order that depends neither on
// the rows and columns that are configured nor on which operand comes first: one query and sixteen get the same bits.
#include "cpu/isa.h"

#if HYDRA_X86
#define HYDRA_LEVEL amx
#define HYDRA_LANES 16
#define HYDRA_TARGET HYDRA_TARGET_AMX
#define HYDRA_BF16
#include "cpu/attention/bf16_math.h"

namespace hydra::amx {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int num_bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(num_bytes);
  }
};

constexpr int kTileBytes = 64;                        // of a full row
constexpr int64_t kValueGroup = kKeyTile * kLanes;    // packed values: elements of 16 columns
constexpr int64_t kValueStep = kKeyTile / 2 * kLanes;  // and of their first 32 keys

// The tile instructions do not tell the compiler that they read memory.
inline void finish_stores() { __asm__ volatile("" ::: "memory"); }

// Many columns: scores = queries * keys, 16 columns at a time. Packing the keys is shared by all of them.
// Tiles 0-3 hold sums, 4 and 5 queries or weights, 6 and 7 keys or values.
struct ManyColumns : Bf16Tiles {
  HYDRA_TARGET static void begin(int) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) config.set(tile, kLanes, kTileBytes);
    _tile_loadconfig(&config);
  }

  HYDRA_TARGET static void end() { _tile_release(); }

  HYDRA_TARGET static void multiply_keys(const bf16_t* q, int, const bf16_t* keys, int count, int64_t dim,
                                         float* scores) {
    constexpr int64_t kStride = kKeyTile * 4;
    const int64_t width = query_width(dim), group = width * kLanes;
    finish_stores();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < width; d += kChunk, keys += kChunk * kLanes) {
      _tile_loadd(4, q + d, width * 2);
      _tile_loadd(6, keys, kTileBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, keys + group, kTileBytes);
      _tile_dpbf16ps(1, 4, 7);
      if (count <= kKeyTile / 2) continue;
      _tile_loadd(6, keys + 2 * group, kTileBytes);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, keys + 3 * group, kTileBytes);
      _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, scores, kStride);
    _tile_stored(1, scores + kLanes, kStride);
    if (count <= kKeyTile / 2) return;
    _tile_stored(2, scores + 2 * kLanes, kStride);
    _tile_stored(3, scores + 3 * kLanes, kStride);
  }

  HYDRA_TARGET static void multiply_values(const bf16_t* weights, int, const bf16_t* values, int count, int64_t dim,
                                           float* sums) {
    const int64_t width = sums_width(dim), stride = width * 4;
    finish_stores();
    _tile_loadd(4, weights, kKeyTile * 2);
    if (count > kKeyTile / 2) _tile_loadd(5, weights + kKeyTile / 2, kKeyTile * 2);
    for (int64_t d = 0; d < width; d += 2 * kLanes, values += 2 * kValueGroup) {
      _tile_loadd(0, sums + d, stride);
      _tile_loadd(1, sums + d + kLanes, stride);
      _tile_loadd(6, values, kTileBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, values + kValueGroup, kTileBytes);
      _tile_dpbf16ps(1, 4, 7);
      if (count > kKeyTile / 2) {
        _tile_loadd(6, values + kValueStep, kTileBytes);
        _tile_dpbf16ps(0, 5, 6);
        _tile_loadd(7, values + kValueGroup + kValueStep, kTileBytes);
        _tile_dpbf16ps(1, 5, 7);
      }
      _tile_stored(0, sums + d, stride);
      _tile_stored(1, sums + d + kLanes, stride);
    }
  }
};

// 16 keys of a tile, as rows in memory.
struct KeyRows {
  const bf16_t* groups[kKeyTile / kLanes];
  int64_t stride_bytes;
};

// Up to 16 columns: transposed scores = keys * queries, so that keys come straight from the cache as rows.
// Tiles 0 and 1 hold scores, 2 keys, 3 queries, 4 weights, 5 and 6 sums, 7 values.
struct FewColumns : Bf16Tiles {
  using Keys = KeyRows;

  HYDRA_TARGET static void begin(int columns) {
    TileConfig config;
    config.set(0, kLanes, columns * 4);
    config.set(1, kLanes, columns * 4);
    config.set(2, kLanes, kTileBytes);
    config.set(3, kLanes, columns * 4);
    for (int tile = 4; tile < 7; ++tile) config.set(tile, columns, kTileBytes);
    config.set(7, kLanes, kTileBytes);
    _tile_loadconfig(&config);
  }

  HYDRA_TARGET static void end() { _tile_release(); }

  // [pairs of dimensions][16 columns] of pairs.
  HYDRA_INLINE static void pack_query(const bf16_t* row, int64_t dim, int64_t column, bf16_t* packed) {
    for (int64_t d = 0; d < dim; ++d) packed[(d / 2 * kLanes + column) * 2 + d % 2] = row[d];
  }

  // Uses 16 rows in place if they are evenly spaced and end at a whole chunk, else copies and pads them.
  HYDRA_TARGET static KeyRows pack_keys(const bf16_t* const* rows, int count, int64_t dim, bf16_t* memory) {
    KeyRows keys;
    const int64_t stride = rows[1] - rows[0], width = query_width(dim);
    bool in_place = dim == width && stride > 0;
    for (int first = 0; first < count; first += kLanes) {
      keys.groups[first / kLanes] = rows[first];
      in_place = in_place && evenly_spaced(rows + first, stride);
    }
    keys.stride_bytes = stride * 2;
    if (in_place) return keys;
    for (int j = 0; j < count; ++j) {
      for (int64_t d = 0; d < dim; d += kChunk) _mm512_storeu_si512(memory + j * width + d, load_at(rows[j], d, dim));
    }
    for (int first = 0; first < count; first += kLanes) keys.groups[first / kLanes] = memory + first * width;
    keys.stride_bytes = width * 2;
    return keys;
  }

  HYDRA_INLINE static bool evenly_spaced(const bf16_t* const* rows, int64_t stride) {
    bool even = true;
    for (int j = 1; j < kLanes; ++j) even &= rows[j] - rows[j - 1] == stride;
    return even;
  }

  HYDRA_TARGET static void multiply_keys(const bf16_t* q, int columns, const KeyRows& keys, int count, int64_t dim,
                                         float* scores) {
    alignas(64) float transposed[kKeyTile * kLanes];  // [keys][columns]
    const int64_t width = query_width(dim), stride = columns * 4;
    finish_stores();
    for (int first = 0; first < count; first += 2 * kLanes) {
      const bf16_t* lower = keys.groups[first / kLanes];
      const bf16_t* upper = keys.groups[first / kLanes + 1];
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t d = 0; d < width; d += kChunk) {
        _tile_loadd(3, q + d * kLanes, kTileBytes);
        _tile_loadd(2, lower + d, keys.stride_bytes);
        _tile_dpbf16ps(0, 2, 3);
        _tile_loadd(2, upper + d, keys.stride_bytes);
        _tile_dpbf16ps(1, 2, 3);
      }
      float* target = columns == 1 ? scores : transposed;
      _tile_stored(0, target + first * columns, stride);
      _tile_stored(1, target + (first + kLanes) * columns, stride);
    }
    if (columns > 1) transpose_scores(transposed, columns, count, scores);
  }

  HYDRA_INLINE static void transpose_scores(const float* transposed, int columns, int count, float* scores) {
    const __m512i numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i index = _mm512_mullo_epi32(numbers, _mm512_set1_epi32(columns));
    for (int first = 0; first < count; first += kLanes) {
      for (int column = 0; column < columns; ++column) {
        const __m512 part = _mm512_i32gather_ps(index, transposed + first * columns + column, 4);
        _mm512_storeu_ps(scores + column * kKeyTile + first, part);
      }
    }
  }

  HYDRA_TARGET static void multiply_values(const bf16_t* weights, int, const bf16_t* values, int count, int64_t dim,
                                           float* sums) {
    const int64_t width = sums_width(dim), stride = width * 4;
    finish_stores();
    for (int64_t d = 0; d < width; d += 2 * kLanes, values += 2 * kValueGroup) {
      _tile_loadd(5, sums + d, stride);
      _tile_loadd(6, sums + d + kLanes, stride);
      for (int first = 0; first < count; first += kKeyTile / 2) {
        _tile_loadd(4, weights + first, kKeyTile * 2);
        _tile_loadd(7, values + first * kLanes, kTileBytes);
        _tile_dpbf16ps(5, 4, 7);
        _tile_loadd(7, values + kValueGroup + first * kLanes, kTileBytes);
        _tile_dpbf16ps(6, 4, 7);
      }
      _tile_stored(5, sums + d, stride);
      _tile_stored(6, sums + d + kLanes, stride);
    }
  }
};

}  // namespace

void attend_bf16(const AttentionCall& call, const AttentionTask& task) {
  if ((task.token_end - task.token_begin) * call.group() <= kColumnTile) {
    attend_with<FewColumns>(call, task);
  } else {
    attend_with<ManyColumns>(call, task);
  }
}

}  // namespace hydra::amx
#endif

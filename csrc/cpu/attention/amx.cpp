// bf16 attention on AMX tiles. The sums of one row of a tile do not depend on its other rows, and the instruction's order
// of additions does not depend on how many rows are configured, so one query and sixteen get the same bits.
#include "cpu/isa.h"

#if HYDRA_X86
#define HYDRA_LEVEL amx
#define HYDRA_LANES 16
#define HYDRA_TARGET HYDRA_TARGET_AMX
#include "cpu/attention/bf16_math.h"

namespace hydra::amx {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// The tile instructions do not tell the compiler that they read memory.
inline void finish_stores() { __asm__ volatile("" ::: "memory"); }

// Tiles 0-3 hold sums, 4 and 5 queries or weights (up to 16 rows), 6 and 7 keys or values.
struct AmxMath : Bf16Tiles {
  HYDRA_TARGET static void begin(int rows) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = 64;
      config.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : kLanes);
    }
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
      _tile_loadd(6, keys, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, keys + group, 64);
      _tile_dpbf16ps(1, 4, 7);
      if (count <= 32) continue;
      _tile_loadd(6, keys + 2 * group, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, keys + 3 * group, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, scores, kStride);
    _tile_stored(1, scores + kLanes, kStride);
    if (count <= 32) return;
    _tile_stored(2, scores + 2 * kLanes, kStride);
    _tile_stored(3, scores + 3 * kLanes, kStride);
  }

  HYDRA_TARGET static void multiply_values(const bf16_t* weights, int, const bf16_t* values, int count, int64_t dim,
                                           float* sums) {
    constexpr int64_t kGroup = kKeyTile * kLanes, kStep = 32 * kLanes;
    const int64_t width = sums_width(dim), stride = width * 4;
    finish_stores();
    _tile_loadd(4, weights, kKeyTile * 2);
    if (count > 32) _tile_loadd(5, weights + 32, kKeyTile * 2);
    for (int64_t d = 0; d < width; d += 2 * kLanes, values += 2 * kGroup) {
      _tile_loadd(0, sums + d, stride);
      _tile_loadd(1, sums + d + kLanes, stride);
      _tile_loadd(6, values, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, values + kGroup, 64);
      _tile_dpbf16ps(1, 4, 7);
      if (count > 32) {
        _tile_loadd(6, values + kStep, 64);
        _tile_dpbf16ps(0, 5, 6);
        _tile_loadd(7, values + kGroup + kStep, 64);
        _tile_dpbf16ps(1, 5, 7);
      }
      _tile_stored(0, sums + d, stride);
      _tile_stored(1, sums + d + kLanes, stride);
    }
  }
};

}  // namespace

void attend_bf16(const AttentionCall& call, const AttentionTask& task) { attend_with<AmxMath>(call, task); }

}  // namespace hydra::amx
#endif

// Emulated AMX: eight tiles of a thread, of up to 16 rows of 64 bytes. Included by immintrin.h.
#pragma once

#undef _tile_loadconfig
#undef _tile_storeconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#undef _tile_dpbuud

namespace hydra {
namespace emulated {

struct Tile {
  int rows, row_bytes;
  uint8_t data[16][64];
};

struct Tiles {
  bool configured;
  Tile tile[8];
};

inline thread_local Tiles tiles;

inline Tile& tile_at(int number) {
  require(tiles.configured, "a tile is used without a configuration");
  require(number >= 0 && number < 8 && tiles.tile[number].rows > 0, "a tile is used that the configuration leaves out");
  return tiles.tile[number];
}

// The operands of a product: C [m, n] += A [m, k] B [k, n], in groups of 4 bytes of k.
struct Product {
  Tile &c, &a, &b;
  int groups;
};

inline Product product(int c, int a, int b) {
  require(c != a && a != b && c != b, "a product takes one tile twice");
  const Product found{tile_at(c), tile_at(a), tile_at(b), tile_at(a).row_bytes / 4};
  for (const Tile* tile : {&found.c, &found.a, &found.b}) {
    require(tile->row_bytes % 4 == 0, "a product takes a tile whose rows are not whole groups of 4 bytes");
  }
  require(found.c.rows == found.a.rows && found.c.row_bytes == found.b.row_bytes && found.b.rows == found.groups,
          "a product takes tiles whose sizes do not fit");
  return found;
}

inline __m512i group_of(const Tile& tile, int row, int group) {
  int32_t bytes;
  std::memcpy(&bytes, tile.data[row] + 4 * group, 4);
  return _mm512_set1_epi32(bytes);
}

// What lies beyond a row's bytes stays zero.
EMULATED void store_row(Tile& tile, int row, __m512i sums) {
  std::memcpy(tile.data[row], &sums, static_cast<size_t>(tile.row_bytes));
}

template <bool kA, bool kB>
EMULATED void add_byte_products(int c, int a, int b) {
  const Product tiles = product(c, a, b);
  for (int row = 0; row < tiles.c.rows; ++row) {
    __m512i sums = _mm512_loadu_si512(tiles.c.data[row]);
    for (int group = 0; group < tiles.groups; ++group) {
      const __m512i columns = _mm512_loadu_si512(tiles.b.data[group]);
      sums = _mm512_add_epi32(sums, byte_products<kA, kB>(group_of(tiles.a, row, group), columns));
    }
    store_row(tiles.c, row, sums);
  }
}

}  // namespace emulated

EMULATED void _tile_loadconfig(const void* config) {
  const uint8_t* bytes = static_cast<const uint8_t*>(config);
  emulated::Tiles& tiles = emulated::tiles;
  std::memset(&tiles, 0, sizeof(tiles));
  if (bytes[0] == 0) return;  // as released
  emulated::require(bytes[0] == 1, "a tile configuration has palette 0 or 1");
  emulated::require(bytes[1] == 0, "a tile configuration that starts at a row is not emulated");
  for (int i = 2; i < 16; ++i) emulated::require(bytes[i] == 0, "reserved bytes of a tile configuration are not zero");
  for (int i = 0; i < 8; ++i) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * i, 2);
    const int rows = bytes[48 + i];
    emulated::require(rows <= 16 && row_bytes <= 64 && (rows == 0) == (row_bytes == 0),
                      "a tile has 1 to 16 rows of 1 to 64 bytes, or neither");
    tiles.tile[i].rows = rows;
    tiles.tile[i].row_bytes = row_bytes;
  }
  for (int i = 8; i < 16; ++i) {
    emulated::require(bytes[16 + 2 * i] == 0 && bytes[17 + 2 * i] == 0 && bytes[48 + i] == 0,
                      "a tile configuration has eight tiles");
  }
  tiles.configured = true;
}

EMULATED void _tile_release() { std::memset(&emulated::tiles, 0, sizeof(emulated::tiles)); }

EMULATED void _tile_zero(int number) {
  emulated::Tile& tile = emulated::tile_at(number);
  std::memset(tile.data, 0, sizeof(tile.data));
}

EMULATED void _tile_loadd(int number, const void* base, int64_t stride) {
  _tile_zero(number);
  emulated::Tile& tile = emulated::tile_at(number);
  for (int row = 0; row < tile.rows; ++row) {
    std::memcpy(tile.data[row], static_cast<const char*>(base) + row * stride, static_cast<size_t>(tile.row_bytes));
  }
}

EMULATED void _tile_stream_loadd(int number, const void* base, int64_t stride) { _tile_loadd(number, base, stride); }

EMULATED void _tile_stored(int number, void* base, int64_t stride) {
  const emulated::Tile& tile = emulated::tile_at(number);
  for (int row = 0; row < tile.rows; ++row) {
    std::memcpy(static_cast<char*>(base) + row * stride, tile.data[row], static_cast<size_t>(tile.row_bytes));
  }
}

// Even and odd terms have a sum each, from zero; both are added up before they are added to the tile.
EMULATED void _tile_dpbf16ps(int c, int a, int b) {
  using namespace emulated;
  const Product tiles = product(c, a, b);
  for (int row = 0; row < tiles.c.rows; ++row) {
    f32x16 even{}, odd{};
    for (int group = 0; group < tiles.groups; ++group) {
      const __m512i x = group_of(tiles.a, row, group), w = _mm512_loadu_si512(tiles.b.data[group]);
      even = flushed_fma(even_bf16(x), even_bf16(w), even);
      odd = flushed_fma(odd_bf16(x), odd_bf16(w), odd);
    }
    const f32x16 before = (f32x16)_mm512_loadu_si512(tiles.c.data[row]);
    store_row(tiles.c, row, (__m512i)flushed_sum(before, flushed_sum(even, odd)));
  }
}

EMULATED void _tile_dpbssd(int c, int a, int b) { emulated::add_byte_products<true, true>(c, a, b); }
EMULATED void _tile_dpbsud(int c, int a, int b) { emulated::add_byte_products<true, false>(c, a, b); }
EMULATED void _tile_dpbusd(int c, int a, int b) { emulated::add_byte_products<false, true>(c, a, b); }
EMULATED void _tile_dpbuud(int c, int a, int b) { emulated::add_byte_products<false, false>(c, a, b); }

}  // namespace hydra

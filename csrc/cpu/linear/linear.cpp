// Packing of weights, the cut of a product into one rectangle per thread, and the choice of the level.
#include "cpu/linear/linear.h"

#include <algorithm>
#include <cstring>

#include "cpu/isa.h"
#include "cpu/linear/parts.h"
#include "cpu/scratch.h"
#include "cpu/thread_pool.h"

namespace hydra {
namespace {

typedef uint32_t Words __attribute__((vector_size(16)));
typedef uint32_t WordsInMemory __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t HalvesInMemory __attribute__((vector_size(8), aligned(1), may_alias));

constexpr int kTileBytes = 64;               // of a row that is packed at once: a cache line
constexpr int kTileWords = kTileBytes / 4;   // a word is one float or two neighbouring halves
constexpr int64_t kTileLine = kTile * kTileBytes;

// Transposes the words of kTile rows: calls `put(word, row, four)` with that word of rows [row, row + 4).
template <class Put>
inline void transpose_tile(const char* rows, int64_t row_bytes, Put&& put) {
  for (int row = 0; row < kTile; row += 4) {
    for (int word = 0; word < kTileWords; word += 4) {
      Words in[4];
      for (int i = 0; i < 4; ++i) {
        in[i] = *reinterpret_cast<const WordsInMemory*>(rows + (row + i) * row_bytes + word * 4);
      }
      const Words even = {0, 4, 1, 5}, odd = {2, 6, 3, 7}, low = {0, 1, 4, 5}, high = {2, 3, 6, 7};
      const Words a = __builtin_shuffle(in[0], in[1], even), b = __builtin_shuffle(in[0], in[1], odd);
      const Words c = __builtin_shuffle(in[2], in[3], even), d = __builtin_shuffle(in[2], in[3], odd);
      put(word, row, __builtin_shuffle(a, c, low));
      put(word + 1, row, __builtin_shuffle(a, c, high));
      put(word + 2, row, __builtin_shuffle(b, d, low));
      put(word + 3, row, __builtin_shuffle(b, d, high));
    }
  }
}

// kTile columns by kTileWords words of k, the first of them `word`, of a panel's memory.
void pack_tile(const PackedWeight& packed, const char* rows, int64_t row_bytes, int64_t word, int column, char* panel) {
  if (packed.dtype == DType::bf16) {  // tiles follow each other, the two of 32 columns side by side
    char* tile = panel + (word / kTileWords * 2 + column / kTile) * kTileLine;
    transpose_tile(rows, row_bytes, [&](int w, int row, Words words) {
      *reinterpret_cast<WordsInMemory*>(tile + w * kTileBytes + row * 4) = words;
    });
  } else if (packed.dtype == DType::f32) {
    transpose_tile(rows, row_bytes, [&](int w, int row, Words words) {
      if (word + w >= packed.num_in) return;
      *reinterpret_cast<WordsInMemory*>(panel + ((word + w) * kPanel + column + row) * 4) = words;
    });
  } else {
    transpose_tile(rows, row_bytes, [&](int w, int row, Words words) {
      const int64_t k = 2 * (word + w);
      char* target = panel + (k * kPanel + column + row) * 2;
      if (k < packed.num_in) {
        *reinterpret_cast<HalvesInMemory*>(target) = __builtin_convertvector(words & 0xffff, HalvesInMemory);
      }
      if (k + 1 < packed.num_in) {
        *reinterpret_cast<HalvesInMemory*>(target + kPanel * 2) = __builtin_convertvector(words >> 16, HalvesInMemory);
      }
    });
  }
}

void pack_panel(const PackedWeight& packed, const char* weight, int64_t row_bytes, int64_t panel) {
  const int64_t size = element_size(packed.dtype), in_bytes = packed.num_in * size;
  char* target = static_cast<char*>(const_cast<void*>(packed.data)) + panel * packed.panel_elements() * size;
  for (int64_t begin = 0; begin < in_bytes; begin += kTileBytes) {
    const int64_t bytes = std::min<int64_t>(kTileBytes, in_bytes - begin);
    for (int column = 0; column < kPanel; column += kTile) {
      const int64_t first = panel * kPanel + column;
      const int64_t columns = std::clamp<int64_t>(packed.num_out - first, 0, kTile);
      if (columns == kTile && bytes == kTileBytes) {
        pack_tile(packed, weight + first * row_bytes + begin, row_bytes, begin / 4, column, target);
        continue;
      }
      char padded[kTileLine] = {};
      for (int64_t i = 0; i < columns; ++i) {
        std::memcpy(padded + i * kTileBytes, weight + (first + i) * row_bytes + begin, static_cast<size_t>(bytes));
      }
      pack_tile(packed, padded, kTileBytes, begin / 4, column, target);
    }
  }
}

void linear_parts(const LinearCall& call) {
  multiply_parts(call.weight, call.rows, [&](const LinearPart& part) { linear_part(call, part); });
}

#if HYDRA_X86
// Copies the rows into tile order, a bounded number at a time, before the threads multiply them.
void linear_packed_rows(const LinearCall& call) {
  static thread_local Scratch scratch;
  constexpr int64_t kMostRows = 1024, kElementsPerThread = 1 << 17;
  const int64_t grain = ceil_div(kElementsPerThread, std::max<int64_t>(1, call.weight.num_in));
  // Equal chunks: every one reads all weights, which a few left-over rows would not repay.
  const int64_t most = ceil_div(ceil_div(call.rows, ceil_div(call.rows, kMostRows)), kPanel) * kPanel;
  const int64_t out_size = element_size(call.out_dtype);
  for (int64_t begin = 0; begin < call.rows; begin += most) {
    LinearCall chunk = call;
    chunk.rows = std::min(most, call.rows - begin);
    chunk.x = static_cast<const uint16_t*>(call.x) + begin * call.x_stride;
    chunk.out = static_cast<char*>(call.out) + begin * call.out_stride * out_size;
    if (call.residual) {
      chunk.residual = static_cast<const char*>(call.residual) + begin * call.residual_stride * out_size;
    }
    void* packed = scratch.reserve(amx::packed_rows_bytes(chunk));
    parallel_for(chunk.rows, grain, [&](int64_t first, int64_t last) { amx::pack_rows(chunk, first, last, packed); });
    chunk.packed_x = packed;
    linear_parts(chunk);
  }
}
#endif

}  // namespace

void linear_part(const LinearCall& call, const LinearPart& part) {
#if HYDRA_X86
  const Isa isa = current_isa();
  if (isa == Isa::amx && call.weight.is_bf16()) return amx::linear_part_bf16(call, part);
  if (isa >= Isa::avx512bf16 && call.weight.is_bf16()) return avx512bf16::linear_part_bf16(call, part);
  if (isa >= Isa::avx512) return avx512::linear_part(call, part);
  if (isa == Isa::avx2) return avx2::linear_part(call, part);
#endif
  scalar::linear_part(call, part);
}

void pack_weight(const PackedWeight& packed, const void* weight, int64_t weight_stride) {
  const int64_t row_bytes = weight_stride * element_size(packed.dtype), panels = packed.num_panels();
  // Several parts per thread, as for products: one that loses its core holds up little.
  const int parts = static_cast<int>(std::min<int64_t>(panels, num_threads() == 1 ? 1 : 4 * num_threads()));
  run_parts(parts, [&](int part) {
    for (int64_t panel = panels * part / parts; panel < panels * (part + 1) / parts; ++panel) {
      pack_panel(packed, static_cast<const char*>(weight), row_bytes, panel);
    }
  });
}

void linear(const LinearCall& call) {
  if (call.rows == 0 || call.weight.num_out == 0) return;
#if HYDRA_X86
  if (current_isa() == Isa::amx && call.weight.is_bf16() && amx::wants_packed_rows(call)) {
    return linear_packed_rows(call);
  }
#endif
  linear_parts(call);
}

}  // namespace hydra

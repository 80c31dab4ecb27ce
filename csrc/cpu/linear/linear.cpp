// Packing of weights, the cut of a product into one rectangle per thread, and the choice of the level.
#include "cpu/linear/linear.h"

#include <algorithm>
#include <cstring>

#include "cpu/isa.h"
#include "cpu/scratch.h"
#include "cpu/thread_pool.h"

namespace hydra {
namespace {

template <class T>
void pack_panel(const PackedWeight& packed, const T* weight, int64_t stride, int64_t panel) {
  T* target = static_cast<T*>(const_cast<void*>(packed.data)) + panel * packed.panel_elements();
  std::memset(target, 0, static_cast<size_t>(packed.panel_elements()) * sizeof(T));
  const int64_t first = panel * kPanel, columns = std::min<int64_t>(kPanel, packed.num_out - first);
  for (int64_t column = 0; column < columns; ++column) {
    const T* source = weight + (first + column) * stride;
    for (int64_t k = 0; k < packed.num_in; ++k) {
      if (packed.dtype == DType::bf16) {
        const int64_t block = k / kPanel * kPanel * kPanel + column / kTile * kTileElements;
        target[block + k % kPanel / 2 * kPanel + column % kTile * 2 + k % 2] = source[k];
      } else {
        target[k * kPanel + column] = source[k];
      }
    }
  }
}

void linear_part(const LinearCall& call, const LinearPart& part) {
#if HYDRA_X86
  const Isa isa = current_isa();
  if (isa == Isa::amx && call.weight.dtype == DType::bf16) return amx::linear_part_bf16(call, part);
  if (isa >= Isa::avx512bf16) return avx512bf16::linear_part(call, part);
  if (isa == Isa::avx2) return avx2::linear_part(call, part);
#endif
  scalar::linear_part(call, part);
}

// Threads worth waking: each should have about ten microseconds of work, or the hand-over costs more than it saves.
int useful_threads(const LinearCall& call) {
  const int64_t bytes = call.weight.num_bytes();
  const int64_t products = call.rows * call.weight.num_out * call.weight.num_in;
  constexpr int64_t kBytesPerThread = 128 << 10, kProductsPerThread = 1 << 22;
  const int64_t threads = std::max(bytes / kBytesPerThread, products / kProductsPerThread);
  return static_cast<int>(std::clamp<int64_t>(threads, 1, num_threads()));
}

void linear_parts(const LinearCall& call) {
  const int threads = useful_threads(call);
  const int64_t panels = call.weight.num_panels();
  if (threads == 1) return linear_part(call, {0, call.rows, 0, panels});
  // Panels first: each weight is then read by one thread only. Rows too where there are fewer panels than threads.
  // Several parts per thread where they are large enough, so that a thread that loses its core holds up only one.
  constexpr int64_t kPanelsPerPart = 8, kPartsPerThread = 4;
  const int64_t pieces = std::clamp<int64_t>(panels / kPanelsPerPart, threads, kPartsPerThread * threads);
  const int across = static_cast<int>(std::min(pieces, panels));
  const int64_t row_units = ceil_div(call.rows, kPanel);
  const int down = static_cast<int>(std::clamp<int64_t>(threads / across, 1, row_units));
  run_parts(across * down, [&](int part) {
    const int64_t column = part % across, row = part / across;
    linear_part(call, {row * row_units / down * kPanel, std::min((row + 1) * row_units / down * kPanel, call.rows),
                       panels * column / across, panels * (column + 1) / across});
  });
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

void pack_weight(const PackedWeight& packed, const void* weight, int64_t weight_stride) {
  parallel_for(packed.num_panels(), [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      if (packed.dtype == DType::f32) {
        pack_panel(packed, static_cast<const float*>(weight), weight_stride, panel);
      } else {
        pack_panel(packed, static_cast<const uint16_t*>(weight), weight_stride, panel);
      }
    }
  });
}

void linear(const LinearCall& call) {
  if (call.rows == 0 || call.weight.num_out == 0) return;
#if HYDRA_X86
  if (current_isa() == Isa::amx && call.weight.dtype == DType::bf16 && amx::wants_packed_rows(call)) {
    return linear_packed_rows(call);
  }
#endif
  linear_parts(call);
}

}  // namespace hydra

// Row and block copies, cut over threads by bytes, and the choice of the instruction-set level.
#include "cpu/cache/cache.h"

#include <algorithm>
#include <cstring>

#include "cpu/cache/stream.h"
#include "cpu/isa.h"
#include "cpu/thread_pool.h"

namespace hydra {
namespace {

// About ten microseconds of copying, below which waking a thread does not pay.
constexpr int64_t kBytesPerThread = 1 << 17;
constexpr int64_t kPieceBytes = 1 << 16;

template <class Fn>
void parallel_rows(int64_t rows, int64_t row_bytes, Fn&& fn) {
  parallel_for(rows, std::max<int64_t>(1, kBytesPerThread / std::max<int64_t>(1, row_bytes)), fn);
}

}  // namespace

namespace {

void quantize_level(const WriteCall& call, int64_t begin, int64_t end) {
#if HYDRA_X86
  const Isa isa = current_isa();
  if (isa >= Isa::avx512bf16) return avx512bf16::write_quantized(call, begin, end);
  if (isa >= Isa::avx2) return avx2::write_quantized(call, begin, end);
#endif
  scalar::write_quantized(call, begin, end);
}

void copy_rows(const WriteCall& call, int64_t begin, int64_t end) {
  const CacheView& cache = call.cache;
  const int64_t bytes = cache.row_bytes();
  for (int64_t t = begin; t < end; ++t) {
    if (call.slots[t] < 0) continue;
    for (int64_t x = 0; x < cache.num_tensors; ++x) {
      std::memcpy(cache.row(cache.plane(call.layer, x), call.slots[t]),
                  call.sources[x].data + t * call.sources[x].stride, static_cast<size_t>(bytes));
    }
  }
}

}  // namespace

void write_rows(const WriteCall& call) {
  parallel_rows(call.rows, call.cache.row_bytes() * call.cache.num_tensors, [&](int64_t begin, int64_t end) {
    if (call.cache.quantized) {
      quantize_level(call, begin, end);
    } else {
      copy_rows(call, begin, end);
    }
  });
}

void gather_rows(const CacheView& cache, int64_t layer, int64_t tensor, const int64_t* slots, int64_t rows, char* out) {
  const int64_t bytes = cache.row_bytes();
  char* plane = cache.plane(layer, tensor);
  parallel_rows(rows, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      if (slots[m] < 0) continue;
      std::memcpy(out + m * bytes, cache.row(plane, slots[m]), static_cast<size_t>(bytes));
    }
  });
}

void copy_blocks(const CacheView& source, const CacheView& target, const int64_t* pairs, int64_t count) {
  const int64_t bytes = source.block_bytes();
  const int64_t piece = std::min(bytes, kPieceBytes);
  const int64_t pieces = (bytes + piece - 1) / piece;  // of a block, so that threads share a single one
  parallel_rows(count * pieces, piece, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t* pair = pairs + i / pieces * 2;
      const int64_t offset = i % pieces * piece;
      stream_copy(target.data + pair[1] * bytes + offset, source.data + pair[0] * bytes + offset,
                  std::min(piece, bytes - offset));
    }
    finish_streams();
  });
}

namespace {

void rope_level(const RopeCall& call, int64_t begin, int64_t end) {
#if HYDRA_X86
  const Isa isa = current_isa();
  if (isa >= Isa::avx512bf16) return avx512bf16::rope_tokens(call, begin, end);
  if (isa >= Isa::avx2) return avx2::rope_tokens(call, begin, end);
#endif
  scalar::rope_tokens(call, begin, end);
}

void add_level(const MergeCall& call, int64_t begin, int64_t end) {
#if HYDRA_X86
  const Isa isa = current_isa();
  if (isa >= Isa::avx512bf16) return avx512bf16::add_merged(call, begin, end);
  if (isa >= Isa::avx2) return avx2::add_merged(call, begin, end);
#endif
  scalar::add_merged(call, begin, end);
}

void copy_merged(const MergeCall& call, int64_t begin, int64_t end) {
  const int64_t bytes = call.cache.row_bytes();
  char* plane = call.cache.plane(call.layer, 0);
  for (int64_t m = begin; m < end; ++m) {
    if (call.slots[m] < 0) continue;
    std::memcpy(static_cast<char*>(call.hidden) + call.targets[m] * bytes, call.cache.row(plane, call.slots[m]),
                static_cast<size_t>(bytes));
  }
}

}  // namespace

void merge_rows(const MergeCall& call) {
  parallel_rows(call.rows, call.cache.row_bytes(), [&](int64_t begin, int64_t end) {
    if (call.accumulate) {
      add_level(call, begin, end);
    } else {
      copy_merged(call, begin, end);
    }
  });
}

void rope_and_write(const RopeCall& call) {
  const int64_t heads = call.num_q_heads + 2 * call.cache.num_heads;
  const int64_t bytes = heads * call.cache.head_dim * element_size(call.cache.dtype);
  parallel_rows(call.tokens, bytes, [&](int64_t begin, int64_t end) { rope_level(call, begin, end); });
}

}  // namespace hydra

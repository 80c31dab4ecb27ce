// The moves of csrc/cpu/cache/cache.h on a device, with the same calls: rows and blocks into, out of and between paged
// caches. All addresses are device memory unless said otherwise. Every function launches on the target's stream, never
// allocates and never waits (unless launches are synchronous), so it can be captured in a graph.
#pragma once

#include <cstdint>

#include "cpu/cache/cache.h"

namespace hydra::cuda {

struct Target {
  int device = 0;
  std::uintptr_t stream = 0;  // cudaStream_t
};

void write_rows(const Target& target, const CacheView& cache, int64_t layer, const RowSource* sources,
                const int64_t* slots, int64_t rows);

void gather_rows(const Target& target, const CacheView& cache, int64_t layer, int64_t tensor, const int64_t* slots,
                 int64_t rows, char* out);

// `hidden_rows` bounds the targets, which a kernel checks.
void merge_rows(const Target& target, const MergeCall& call, int64_t hidden_rows);

// `pairs` is host memory, checked by the caller, and free again on return. `to` may lie on the target's device while
// `from` is a peer's pool mapped there.
void copy_blocks(const Target& target, const CacheView& from, const CacheView& to, const int64_t* pairs, int64_t count);

void rope_and_write(const Target& target, const RopeCall& call);

}  // namespace hydra::cuda

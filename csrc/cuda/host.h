// Host memory that a device copies from and to: pinned, and whole blocks between it and a cache on the device.
#pragma once

#include <cstdint>

#include "cuda/cache.h"

namespace hydra::cuda {

// In place of a device's number: the cache lies in host memory.
constexpr int kHost = -1;

// Pins memory of this process that others may have mapped too, for all devices; before that, and where the system
// refuses, copies from and to it are slower. What is pinned is unpinned before it is unmapped.
void pin_memory(std::uintptr_t address, int64_t nbytes, int device);
void unpin_memory(std::uintptr_t address, int device);

// Copies blocks between a cache in host memory and one on `target`'s device, in either direction. Memory that is not
// pinned may be read and written before this returns, other memory in the order of the stream.
void copy_host_blocks(const Target& target, const CacheView& from, const CacheView& to, const int64_t* pairs,
                      int64_t count);

}  // namespace hydra::cuda

// Device memory that other processes can map. Mechanism only: who may open what, and when it is closed, is decided in
// hydra_engine/backend/cuda/shared_memory.py.
#pragma once

#include <cstdint>
#include <string>

namespace hydra::cuda {

// Allocations are multiples of this: smaller ones would share a driver allocation, and a handle names all of one.
constexpr int64_t kPoolGranularity = 2 << 20;

std::uintptr_t allocate(int64_t nbytes, int device);
void release(std::uintptr_t address, int device);

// 64 bytes that name the allocation which begins at `address`.
std::string export_memory(std::uintptr_t address, int device);

// Maps another process's allocation and checks that it has at least `nbytes`; the exporting process cannot do this.
std::uintptr_t open_memory(const std::string& handle, int64_t nbytes, int device);
void close_memory(std::uintptr_t address, int device);

}  // namespace hydra::cuda

// Kernels that keep or break the rules of executor.h, by name.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace host_cuda {

// The error of a launch of this shape, 0 for none.
int try_launch(const std::array<unsigned, 3>& grid, const std::array<unsigned, 3>& block, size_t shared_bytes,
               uintptr_t stream);

// What the kernel `name` leaves in `words`: one block of `threads`. Throws what the executor says.
std::vector<uint32_t> run_rule(const std::string& name, unsigned threads, std::vector<uint32_t> words);

}  // namespace host_cuda

// What tests ask of runtime.cpp.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace host_cuda {

struct Seen {
  std::string kernel;  // as the launch spells it
  std::array<unsigned, 3> grid;
  unsigned threads;
  int device;
  uintptr_t stream;
  size_t widest;  // bytes of the widest access through __ldg
};

// Those since the last call that CUDA did not refuse, in order.
std::vector<Seen> take_launches();

// From now on the runtime's `call` returns `error`; 0: it works again.
void make_fail(const std::string& call, int error);

uintptr_t new_stream(int device, bool capturing);
void end_stream(uintptr_t stream);

}  // namespace host_cuda

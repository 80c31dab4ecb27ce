// Runs a grid of CUDA threads on the calling processor thread: every block, every thread, those of a block as
// coroutines that change places where they meet. Rules that a device leaves undefined are errors with a sentence here.
#pragma once

#include <functional>
#include <tuple>
#include <type_traits>

#include "cuda_runtime_api.h"

namespace host_cuda {

constexpr size_t kMaxParameterBytes = 32764;
constexpr size_t kMaxSharedBytes = 48 << 10;

struct Launch {
  const char* kernel;
  unsigned max_threads;  // its __launch_bounds__
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};

// A launch that CUDA refuses leaves its error for cudaGetLastError. Throws std::runtime_error for a broken rule.
void run(const Launch& launch, const std::function<void()>& thread);

// Arguments are copied once, before the first thread runs, and shared by all of them.
template <class... Parameters, class... Arguments>
void launch(const Launch& launch, void (*kernel)(const Parameters&...), const Arguments&... arguments) {
  static_assert((std::is_trivially_copyable_v<Parameters> && ...), "parameters travel as bytes");
  const std::tuple<Parameters...> held(arguments...);
  static_assert(sizeof(held) <= kMaxParameterBytes, "kernel parameters: at most 32764 bytes");
  run(launch, [&] { std::apply(kernel, held); });
}

// ---- for the thread that runs

const dim3& thread_index();
const dim3& block_index();
const dim3& block_size();
const dim3& grid_size();

void note_read_only(const void* source, const void* value, size_t bytes);
uint32_t shuffle_xor(uint32_t mask, uint32_t value, int lane_mask);
void barrier();

// ---- what runtime.cpp keeps for the executor

// The last error of this processor thread, as cudaGetLastError returns it.
void set_last_error(cudaError_t error);
int current_device();
// cudaErrorInvalidResourceHandle for the stream of another device than the current one.
cudaError_t check_stream(cudaStream_t stream);
void note_launch(const Launch& launch, size_t widest);

}  // namespace host_cuda

// Shared parts of launches: sets the current device, throws errors with file and line, has the word in which kernels
// report a fault. Only for files compiled with a CUDA toolkit.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/cache.h"
#include "cuda/device.h"

#if CUDART_VERSION < 12050
#error "CUDA 12.5 or newer is needed: for kernel arguments of up to 32764 bytes and versioned driver entry points"
#endif

namespace hydra::cuda {

// std::runtime_error: CUDA's number, name and text, what was called and where.
[[noreturn]] void fail_call(cudaError_t error, const char* what, const char* file, int line);

inline void check_call(cudaError_t error, const char* what, const char* file, int line) {
  if (error != cudaSuccess) fail_call(error, what, file, line);
}

// A driver function with the arguments that it had in `version` (12040 is CUDA 12.4), asked for through the runtime:
// linking against libcuda would need a driver to import the module. Throws std::runtime_error where there is none.
void* driver_function(const char* name, unsigned int version);

// Makes a device current for a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

inline cudaStream_t stream_of(const Target& target) { return reinterpret_cast<cudaStream_t>(target.stream); }

enum class FaultKind : uint64_t { slots = 1, rows = 2 };

// One word of host memory per device that its kernels can write: the kind in the top byte, the index below. Zero: none.
uint64_t* fault_word(int device);

// After a launch: reports a bad one; when synchronous waits for it and reports what it met, unless it is being captured.
void finish_launch(const Target& target, const char* kernel, const char* file, int line);

}  // namespace hydra::cuda

#define HYDRA_CUDA(call) ::hydra::cuda::check_call(call, #call, __FILE__, __LINE__)
#define HYDRA_LAUNCHED(target, kernel) ::hydra::cuda::finish_launch(target, kernel, __FILE__, __LINE__)

// Allocation, export and mapping of pools, and interprocess events. Compiled by the host compiler against the runtime.
#include "cuda/ipc.h"

#include <cuda.h>

#include <cstring>

#include "check.h"
#include "cuda/launch.h"

namespace hydra::cuda {
namespace {

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }
cudaEvent_t event_of(std::uintptr_t event) { return reinterpret_cast<cudaEvent_t>(event); }

template <class Handle>
std::string bytes_of(const Handle& handle) {
  return std::string(reinterpret_cast<const char*>(&handle), sizeof(handle));
}

template <class Handle>
Handle handle_of(const std::string& bytes) {
  Handle handle;
  HYDRA_CHECK(bytes.size() == sizeof(handle), "handle: expected ", sizeof(handle), " bytes, got ", bytes.size());
  std::memcpy(&handle, bytes.data(), sizeof(handle));
  return handle;
}

using AddressRange = CUresult (*)(CUdeviceptr*, size_t*, CUdeviceptr);

// The version names the function's arguments, which are as old as the lowest one that is asked for here.
AddressRange address_range() { return reinterpret_cast<AddressRange>(driver_function("cuMemGetAddressRange", 12000)); }

void check_mapped_size(void* address, int64_t nbytes) {
  CUdeviceptr base = 0;
  size_t size = 0;
  const CUresult result = address_range()(&base, &size, reinterpret_cast<CUdeviceptr>(address));
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("CUDA driver error " + std::to_string(result) + " in cuMemGetAddressRange [" __FILE__ ":" +
                             std::to_string(__LINE__) + "]");
  }
  HYDRA_CHECK(base == reinterpret_cast<CUdeviceptr>(address) && static_cast<int64_t>(size) >= nbytes,
              "nbytes: the handle's allocation has ", size, " bytes, fewer than ", nbytes);
}

}  // namespace

std::uintptr_t allocate(int64_t nbytes, int device) {
  HYDRA_CHECK(nbytes > 0 && nbytes % kPoolGranularity == 0, "nbytes: expected a positive multiple of ",
              kPoolGranularity, ", got ", nbytes);
  require_device(device);
  const DeviceGuard guard(device);
  void* address = nullptr;
  HYDRA_CUDA(cudaMalloc(&address, static_cast<size_t>(nbytes)));
  return reinterpret_cast<std::uintptr_t>(address);
}

void release(std::uintptr_t address, int device) {
  require_device(device);
  const DeviceGuard guard(device);
  HYDRA_CUDA(cudaFree(pointer(address)));
}

std::string export_memory(std::uintptr_t address, int device) {
  require_device(device);
  const DeviceGuard guard(device);
  cudaIpcMemHandle_t handle;
  HYDRA_CUDA(cudaIpcGetMemHandle(&handle, pointer(address)));
  return bytes_of(handle);
}

std::uintptr_t open_memory(const std::string& bytes, int64_t nbytes, int device) {
  const auto handle = handle_of<cudaIpcMemHandle_t>(bytes);
  require_device(device);
  const DeviceGuard guard(device);
  void* address = nullptr;
  HYDRA_CUDA(cudaIpcOpenMemHandle(&address, handle, cudaIpcMemLazyEnablePeerAccess));
  try {
    check_mapped_size(address, nbytes);
  } catch (...) {
    if (cudaIpcCloseMemHandle(address) != cudaSuccess) cudaGetLastError();
    throw;
  }
  return reinterpret_cast<std::uintptr_t>(address);
}

void close_memory(std::uintptr_t address, int device) {
  require_device(device);
  const DeviceGuard guard(device);
  HYDRA_CUDA(cudaIpcCloseMemHandle(pointer(address)));
}

std::uintptr_t create_event(int device) {
  require_device(device);
  const DeviceGuard guard(device);
  cudaEvent_t event = nullptr;
  HYDRA_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess));
  return reinterpret_cast<std::uintptr_t>(event);
}

std::string export_event(std::uintptr_t event, int device) {
  require_device(device);
  const DeviceGuard guard(device);
  cudaIpcEventHandle_t handle;
  HYDRA_CUDA(cudaIpcGetEventHandle(&handle, event_of(event)));
  return bytes_of(handle);
}

std::uintptr_t open_event(const std::string& bytes, int device) {
  const auto handle = handle_of<cudaIpcEventHandle_t>(bytes);
  require_device(device);
  const DeviceGuard guard(device);
  cudaEvent_t event = nullptr;
  HYDRA_CUDA(cudaIpcOpenEventHandle(&event, handle));
  return reinterpret_cast<std::uintptr_t>(event);
}

void record_event(std::uintptr_t event, std::uintptr_t stream, int device) {
  require_device(device);
  const DeviceGuard guard(device);
  HYDRA_CUDA(cudaEventRecord(event_of(event), stream_of({device, stream})));
}

void wait_event(std::uintptr_t event, std::uintptr_t stream, int device) {
  require_device(device);
  const DeviceGuard guard(device);
  HYDRA_CUDA(cudaStreamWaitEvent(stream_of({device, stream}), event_of(event), 0));
}

bool event_is_done(std::uintptr_t event, int device) {
  require_device(device);
  const DeviceGuard guard(device);
  const cudaError_t state = cudaEventQuery(event_of(event));
  if (state == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  check_call(state, "cudaEventQuery", __FILE__, __LINE__);
  return true;
}

void destroy_event(std::uintptr_t event, int device) {
  require_device(device);
  const DeviceGuard guard(device);
  HYDRA_CUDA(cudaEventDestroy(event_of(event)));
}

}  // namespace hydra::cuda

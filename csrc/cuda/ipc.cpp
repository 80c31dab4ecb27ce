// Allocation, export and mapping of pools. Compiled by the host compiler against the runtime.
#include "cuda/ipc.h"

#include <cuda.h>

#include <cstring>

#include "check.h"
#include "cuda/launch.h"

namespace hydra::cuda {
namespace {

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

using AddressRange = CUresult (*)(CUdeviceptr*, size_t*, CUdeviceptr);

// The version selects the function's signature: the oldest that has it.
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
  return std::string(handle.reserved, sizeof(handle));
}

std::uintptr_t open_memory(const std::string& bytes, int64_t nbytes, int device) {
  cudaIpcMemHandle_t handle;
  HYDRA_CHECK(bytes.size() == sizeof(handle), "handle: expected ", sizeof(handle), " bytes, got ", bytes.size());
  std::memcpy(&handle, bytes.data(), sizeof(handle));
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

}  // namespace hydra::cuda

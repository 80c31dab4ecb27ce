// The CUDA runtime of a host that has two devices of two multiprocessors each. Every address is device memory except
// null and what cudaHostAlloc gave out. Tests make calls fail by name and read which kernels were launched.
#include "runtime.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>

#include "driver.h"
#include "executor.h"

struct CUstream_st {
  int device;
  bool capturing;
};

namespace host_cuda {
namespace {

constexpr int kDevices = 2;
constexpr int kMultiprocessors = 2;

thread_local cudaError_t last_error = cudaSuccess;
thread_local int device_of_thread = 0;

std::mutex lock;
std::map<std::string, cudaError_t> failures;
std::map<const char*, size_t> host_memory;
std::vector<Seen> seen;

cudaError_t outcome(const char* call, cudaError_t error = cudaSuccess) {
  const std::lock_guard<std::mutex> guard(lock);
  if (const auto found = failures.find(call); found != failures.end()) error = found->second;
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t device_exists(int device) {
  return device >= 0 && device < kDevices ? cudaSuccess : cudaErrorInvalidDevice;
}

}  // namespace

void set_last_error(cudaError_t error) { last_error = error; }
int current_device() { return device_of_thread; }

cudaError_t check_stream(cudaStream_t stream) {
  return stream == nullptr || stream->device == device_of_thread ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

void note_launch(const Launch& launch, size_t widest) {
  const std::lock_guard<std::mutex> guard(lock);
  seen.push_back({launch.kernel, {launch.grid.x, launch.grid.y, launch.grid.z}, launch.block.x, device_of_thread,
                  reinterpret_cast<uintptr_t>(launch.stream), widest});
}

std::vector<Seen> take_launches() {
  const std::lock_guard<std::mutex> guard(lock);
  return std::exchange(seen, {});
}

void make_fail(const std::string& call, int error) {
  const std::lock_guard<std::mutex> guard(lock);
  failures.erase(call);
  if (error != cudaSuccess) failures[call] = static_cast<cudaError_t>(error);
}

uintptr_t new_stream(int device, bool capturing) {
  return reinterpret_cast<uintptr_t>(new CUstream_st{device, capturing});
}
void end_stream(uintptr_t stream) { delete reinterpret_cast<cudaStream_t>(stream); }

}  // namespace host_cuda

using namespace host_cuda;

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    default:
      return "cudaErrorOfTheHost";
  }
}

const char* cudaGetErrorString(cudaError_t) { return "the text of the error"; }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return outcome("cudaDriverGetVersion");
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return outcome("cudaGetDeviceCount");
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  std::strcpy(properties->name, "the host");
  properties->totalGlobalMem = size_t{1} << 34;
  properties->major = 9;
  properties->multiProcessorCount = kMultiprocessors;
  return outcome("cudaGetDeviceProperties", device_exists(device));
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  *value = attribute == cudaDevAttrMpsEnabled ? device == 1 : kMultiprocessors;
  if (attribute == cudaDevAttrComputeCapabilityMajor) *value = compute_capability();
  return outcome("cudaDeviceGetAttribute", device_exists(device));
}

cudaError_t cudaGetDevice(int* device) {
  *device = device_of_thread;
  return outcome("cudaGetDevice");
}

cudaError_t cudaSetDevice(int device) {
  const cudaError_t error = outcome("cudaSetDevice", device_exists(device));
  if (error == cudaSuccess) device_of_thread = device;
  return error;
}

// Memory of a device is not played: what makes a context alone.
cudaError_t cudaFree(void* memory) { return outcome("cudaFree", memory ? cudaErrorInvalidValue : cudaSuccess); }

cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned flags) {
  // Kernels of every device use the host's address, which only memory that is mapped and portable has.
  const bool for_kernels = flags == (cudaHostAllocMapped | cudaHostAllocPortable);
  const cudaError_t error = outcome("cudaHostAlloc", for_kernels ? cudaSuccess : cudaErrorInvalidValue);
  if (error != cudaSuccess) return error;
  *memory = ::operator new(bytes);
  std::memset(*memory, 0xff, bytes);
  const std::lock_guard<std::mutex> guard(lock);
  host_memory[static_cast<char*>(*memory)] = bytes;
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned flags) {
  const std::lock_guard<std::mutex> guard(lock);
  const bool added = flags == cudaHostRegisterPortable && host_memory.emplace(static_cast<char*>(memory), bytes).second;
  return added ? cudaSuccess : last_error = cudaErrorInvalidValue;
}

cudaError_t cudaHostUnregister(void* memory) {
  const std::lock_guard<std::mutex> guard(lock);
  return host_memory.erase(static_cast<char*>(memory)) == 1 ? cudaSuccess : last_error = cudaErrorInvalidValue;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  const cudaError_t error = outcome("cudaMemcpyAsync", check_stream(stream));
  if (error != cudaSuccess) return error;
  std::memcpy(to, from, bytes);
  note_launch({"cudaMemcpyAsync", 1, dim3(1), dim3(1), 0, stream}, bytes);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  *attributes = {};
  attributes->type = address == nullptr ? cudaMemoryTypeUnregistered : cudaMemoryTypeDevice;
  {
    const std::lock_guard<std::mutex> guard(lock);
    for (const auto& [begin, bytes] : host_memory) {
      if (address >= begin && address < begin + bytes) attributes->type = cudaMemoryTypeHost;
    }
  }
  return outcome("cudaPointerGetAttributes");
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = stream != nullptr && stream->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return outcome("cudaStreamIsCapturing");
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const bool capturing = stream != nullptr && stream->capturing;
  return outcome("cudaStreamSynchronize", capturing ? cudaErrorInvalidValue : cudaSuccess);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = driver_entry(name, version);
  *found = *function == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return outcome("cudaGetDriverEntryPointByVersion");
}

// What device.cpp looks for the driver with, under the name that ../build.py gives it there.
extern "C" void* host_cuda_dlopen(const char*, int) {
  static int driver;
  return outcome("dlopen") == cudaSuccess ? &driver : nullptr;
}
extern "C" int host_cuda_dlclose(void*) { return 0; }

// The probe, the current device, errors and faults. Compiled by the host compiler against the CUDA runtime.
#include "cuda/device.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "check.h"
#include "cuda/launch.h"

namespace hydra::cuda {
namespace {

constexpr int kMaxDevices = 64;

std::atomic<uint64_t> known_usable{0};  // bit per device that require_device found usable
std::atomic<bool> wait_for_launches{[] {
  const char* value = std::getenv("HYDRA_CUDA_SYNC");
  return value != nullptr && std::string(value) != "0";
}()};

std::vector<std::string> built_codes() {
  std::istringstream words(HYDRA_CUDA_CODE);  // from setup.py: "sm_80 sm_90 compute_90"
  std::vector<std::string> codes;
  for (std::string word; words >> word;) codes.push_back(word);
  return codes;
}

// Machine code runs on its own major version from its minor version on, PTX on everything newer.
bool has_code(const std::vector<std::string>& codes, int major, int minor) {
  for (const std::string& code : codes) {
    const int version = std::atoi(code.c_str() + code.find('_') + 1);
    if (code[0] == 'c' ? version <= 10 * major + minor : version / 10 == major && version % 10 <= minor) return true;
  }
  return false;
}

bool driver_is_installed() {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (library != nullptr) dlclose(library);
  return library != nullptr;
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string error_text(cudaError_t error) {
  return std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error);
}

Probe& fail_probe(Probe& result, const char* status, const std::string& problem) {
  result.status = status;
  result.problem = problem;
  cudaGetLastError();  // clears the error, which the next launch would report as its own
  return result;
}

DeviceInfo device_info(int index, const std::vector<std::string>& codes) {
  DeviceInfo info;
  info.index = index;
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) return info;
  info.name = properties.name;
  info.major = properties.major;
  info.minor = properties.minor;
  info.num_sms = properties.multiProcessorCount;
  info.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  info.usable = has_code(codes, info.major, info.minor);
  int has_mps = 0;  // stays 0 if the driver is too old to know the attribute
  info.has_mps = cudaDeviceGetAttribute(&has_mps, cudaDevAttrMpsEnabled, index) == cudaSuccess && has_mps != 0;
  return info;
}

}  // namespace

Probe probe() {
  Probe result;
  result.codes = built_codes();
  result.runtime_version = CUDART_VERSION;
  if (!driver_is_installed()) {
    return fail_probe(result, "no_driver", "no NVIDIA driver is installed: libcuda.so.1 cannot be loaded");
  }
  if (cudaDriverGetVersion(&result.driver_version) != cudaSuccess) result.driver_version = 0;
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorInsufficientDriver) {
    return fail_probe(result, "driver_too_old",
                      "the NVIDIA driver runs CUDA up to " + version_text(result.driver_version) +
                          ", the extension was built with " + version_text(CUDART_VERSION) +
                          ": update the driver or build with an older toolkit");
  }
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0)) {
    return fail_probe(result, "no_device", "the NVIDIA driver shows no device; see CUDA_VISIBLE_DEVICES");
  }
  if (error != cudaSuccess) return fail_probe(result, "error", "the NVIDIA driver does not start: " + error_text(error));
  bool usable = false;
  for (int i = 0; i < count; ++i) {
    result.devices.push_back(device_info(i, result.codes));
    usable |= result.devices.back().usable;
  }
  cudaGetLastError();
  if (!usable) {
    return fail_probe(result, "no_code", std::string("no device can run the extension, which was built for ") +
                                             HYDRA_CUDA_CODE + ": build it again with HYDRA_CUDA_ARCHS");
  }
  result.status = "ok";
  return result;
}

void require_device(int device) {
  HYDRA_CHECK(device >= 0 && device < kMaxDevices, "device: expected 0 to ", kMaxDevices - 1, ", got ", device);
  const uint64_t bit = uint64_t{1} << device;
  if (known_usable.load() & bit) return;
  const Probe found = probe();
  if (found.devices.empty()) throw std::runtime_error("CUDA cannot be used: " + found.problem);
  HYDRA_CHECK(static_cast<size_t>(device) < found.devices.size(), "device: expected 0 to ", found.devices.size() - 1,
              ", got ", device);
  if (!found.devices[static_cast<size_t>(device)].usable) {
    throw std::runtime_error("CUDA cannot be used on device " + std::to_string(device) +
                             ": the extension was built for " + HYDRA_CUDA_CODE +
                             "; build it again with HYDRA_CUDA_ARCHS");
  }
  const DeviceGuard guard(device);
  fault_word(device);  // now, since nothing may be allocated once a graph is being captured
  known_usable |= bit;
}

bool synchronous() { return wait_for_launches.load(); }
void set_synchronous(bool on) { wait_for_launches.store(on); }

void fail_call(cudaError_t error, const char* what, const char* file, int line) {
  cudaGetLastError();
  std::ostringstream text;
  text << "CUDA error " << static_cast<int>(error) << " (" << error_text(error) << ") in " << what << " [" << file
       << ":" << line << "]";
  throw std::runtime_error(text.str());
}

void* driver_function(const char* name, unsigned int version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  HYDRA_CUDA(cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    throw std::runtime_error(std::string("the NVIDIA driver has no ") + name + " of CUDA " +
                             version_text(static_cast<int>(version)));
  }
  return function;
}

DeviceGuard::DeviceGuard(int device) {
  int current = -1;
  HYDRA_CUDA(cudaGetDevice(&current));
  if (current == device) return;
  HYDRA_CUDA(cudaSetDevice(device));
  previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  // A destructor cannot report an error; clear it, or the next launch would report it as its own.
  if (previous_ >= 0 && cudaSetDevice(previous_) != cudaSuccess) cudaGetLastError();
}

uint64_t* fault_word(int device) {
  // Never freed: kernels may be in flight until the process ends.
  static uint64_t* const words = [] {
    void* memory = nullptr;
    HYDRA_CUDA(cudaHostAlloc(&memory, kMaxDevices * sizeof(uint64_t), cudaHostAllocMapped | cudaHostAllocPortable));
    std::memset(memory, 0, kMaxDevices * sizeof(uint64_t));
    return static_cast<uint64_t*>(memory);
  }();
  return words + device;
}

void check_faults(int device) {
  require_device(device);
  uint64_t* word = fault_word(device);
  if (__atomic_load_n(word, __ATOMIC_RELAXED) == 0) return;
  const uint64_t fault = __atomic_exchange_n(word, uint64_t{0}, __ATOMIC_RELAXED);
  const char* name = static_cast<FaultKind>(fault >> 56) == FaultKind::slots ? "slots" : "rows";
  const uint64_t index = fault & ((uint64_t{1} << 56) - 1);
  HYDRA_CHECK(fault == 0, name, ": a kernel on device ", device, " skipped index ", index,
              ", whose value is out of range; HYDRA_CUDA_SYNC=1 shows in which call");
}

void check_device_address(const char* name, std::uintptr_t address) {
  cudaPointerAttributes attributes;
  HYDRA_CUDA(cudaPointerGetAttributes(&attributes, reinterpret_cast<void*>(address)));
  HYDRA_CHECK(attributes.type == cudaMemoryTypeDevice, name, ": expected the address of device memory");
}

void finish_launch(const Target& target, const char* kernel, const char* file, int line) {
  check_call(cudaGetLastError(), kernel, file, line);
  if (!synchronous()) return;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  HYDRA_CUDA(cudaStreamIsCapturing(stream_of(target), &capture));
  if (capture != cudaStreamCaptureStatusNone) return;
  check_call(cudaStreamSynchronize(stream_of(target)), kernel, file, line);
  check_faults(target.device);
}

}  // namespace hydra::cuda

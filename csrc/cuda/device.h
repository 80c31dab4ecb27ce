// Devices and their errors, as the rest of the extension sees them. No CUDA header here: csrc/api includes this in every
// build, and absent.cpp stands in for the implementation where no toolkit was found.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hydra::cuda {

struct DeviceInfo {
  int index = 0;
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int num_sms = 0;
  int64_t memory_bytes = 0;
  bool usable = false;  // the extension has code for it
  bool has_mps = false;  // processes share it by NVIDIA's multi-process service instead of taking turns
};

struct Probe {
  // ok, not_built, no_driver, driver_too_old, no_device, no_code (devices, but of no built architecture) or error.
  std::string status;
  std::string problem;             // a sentence, empty when ok
  std::vector<std::string> codes;  // "sm_80", "compute_90": what the extension was compiled for
  int runtime_version = 0;         // 13000 is 13.0; 0 where not built
  int driver_version = 0;          // the newest CUDA that the driver runs; 0 where unknown
  std::vector<DeviceInfo> devices;
};

// Asks the driver without making a context. Never throws. Initialises the driver where there is one, so a process that
// called this must not fork workers.
Probe probe();

// Throws std::runtime_error with the probe's sentence unless `device` can run the extension's code.
void require_device(int device);

// Waits for every launch and checks the addresses given to it; on at start with HYDRA_CUDA_SYNC=1.
bool synchronous();
void set_synchronous(bool on);

// Throws std::invalid_argument if a kernel on `device` met a slot or row out of range since the last call. A kernel
// skips such a row; what it saw is known once it ran, so later launches report it too.
void check_faults(int device);

// `address` is memory that kernels on `device` can read: its own, or a peer's mapped here. Throws std::invalid_argument.
void check_device_address(const char* name, std::uintptr_t address);

}  // namespace hydra::cuda

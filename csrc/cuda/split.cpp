// Green contexts through the driver API: the runtime has them from CUDA 13.1 on only.
#include "cuda/split.h"

#include <cuda.h>

#include <string>

#include "check.h"
#include "cuda/launch.h"

namespace hydra::cuda {
namespace {

// The version names the function's arguments: the oldest one that has it.
template <class Function>
Function green(const char* name, unsigned int version) {
  return reinterpret_cast<Function>(driver_function(name, version));
}

std::string last_error(CUresult result) {
  using ErrorName = CUresult (*)(CUresult, const char**);
  const char* text = nullptr;
  if (green<ErrorName>("cuGetErrorName", 12000)(result, &text) != CUDA_SUCCESS || text == nullptr) text = "unknown";
  return std::to_string(result) + " (" + text + ")";
}

void check_driver(CUresult result, const char* name) {
  if (result == CUDA_SUCCESS) return;
  throw std::runtime_error("CUDA driver error " + last_error(result) + " in " + name);
}

struct Driver {
  CUresult (*get_device)(CUdevice*, int) = green<decltype(get_device)>("cuDeviceGet", 12000);
  CUresult (*get_resource)(CUdevice, CUdevResource*, CUdevResourceType) =
      green<decltype(get_resource)>("cuDeviceGetDevResource", 12040);
  CUresult (*split)(CUdevResource*, unsigned int*, const CUdevResource*, CUdevResource*, unsigned int, unsigned int) =
      green<decltype(split)>("cuDevSmResourceSplitByCount", 12040);
  CUresult (*describe)(CUdevResourceDesc*, CUdevResource*, unsigned int) =
      green<decltype(describe)>("cuDevResourceGenerateDesc", 12040);
  CUresult (*create)(CUgreenCtx*, CUdevResourceDesc, CUdevice, unsigned int) =
      green<decltype(create)>("cuGreenCtxCreate", 12040);
  CUresult (*create_stream)(CUstream*, CUgreenCtx, unsigned int, int) =
      green<decltype(create_stream)>("cuGreenCtxStreamCreate", 12050);
};

// What is left after a split may be less than the least part that a device makes.
void check_part(CUresult result, const char* name, const CUdevResource& part) {
  HYDRA_CHECK(result != CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, "counts: the device makes no part of ",
              part.sm.smCount, " multiprocessors");
  check_driver(result, name);
}

// Neither the context nor the stream is ever destroyed: kernels may be in flight until the process ends. Threads keep
// the primary context current: the stream alone says where kernels run, and its events are those of the primary context.
std::uintptr_t stream_on(const Driver& driver, CUdevice device, CUdevResource& part, int priority) {
  CUdevResourceDesc description = nullptr;
  CUgreenCtx context = nullptr;
  CUstream stream = nullptr;
  check_part(driver.describe(&description, &part, 1), "cuDevResourceGenerateDesc", part);
  check_part(driver.create(&context, description, device, CU_GREEN_CTX_DEFAULT_STREAM), "cuGreenCtxCreate", part);
  check_driver(driver.create_stream(&stream, context, CU_STREAM_NON_BLOCKING, priority), "cuGreenCtxStreamCreate");
  return reinterpret_cast<std::uintptr_t>(stream);
}

}  // namespace

std::vector<Split> split_streams(int device, const std::vector<int>& counts, int language_priority,
                                 int vision_priority) {
  require_device(device);
  const DeviceGuard guard(device);
  HYDRA_CUDA(cudaFree(nullptr));  // makes the primary context, whose memory the parts use
  const Driver driver;
  CUdevice handle = 0;
  CUdevResource whole{};  // newer drivers know more fields than older headers, which are zero then
  check_driver(driver.get_device(&handle, device), "cuDeviceGet");
  check_driver(driver.get_resource(handle, &whole, CU_DEV_RESOURCE_TYPE_SM), "cuDeviceGetDevResource");
  const int num_sms = static_cast<int>(whole.sm.smCount);
  std::vector<Split> splits;
  for (const int count : counts) {
    HYDRA_CHECK(count > 0 && count < num_sms, "counts: expected 1 to ", num_sms - 1, " of the device's ", num_sms,
                " multiprocessors, got ", count);
    CUdevResource part{}, rest{};
    unsigned int num_parts = 1;
    const CUresult result = driver.split(&part, &num_parts, &whole, &rest, 0, static_cast<unsigned int>(count));
    HYDRA_CHECK(result != CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION && result != CUDA_ERROR_INVALID_VALUE,
                "counts: the device cannot be divided into ", count, " and the rest of its ", num_sms,
                " multiprocessors");
    check_driver(result, "cuDevSmResourceSplitByCount");
    HYDRA_CHECK(num_parts == 1 && rest.type == CU_DEV_RESOURCE_TYPE_SM && rest.sm.smCount > 0,
                "counts: of the device's ", num_sms, " multiprocessors ", count, " leave none");
    splits.push_back({stream_on(driver, handle, part, language_priority), stream_on(driver, handle, rest, vision_priority),
                      static_cast<int>(part.sm.smCount), static_cast<int>(rest.sm.smCount)});
  }
  return splits;
}

}  // namespace hydra::cuda

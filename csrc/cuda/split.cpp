// Green contexts through the driver API: the runtime has them from CUDA 13.1 on only.
#include "cuda/split.h"

#include <cuda.h>

#include <string>

#include "check.h"
#include "cuda/launch.h"

namespace hydra::cuda {
namespace {

// The version selects the function's signature: the oldest that has it.
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

// All groups of one split: only groups of the same split can be combined in one description.
struct Groups {
  std::vector<CUdevResource> groups;  // of equally many multiprocessors
  CUdevResource rest{};               // fewer than a group has; may be none
};

unsigned int sms_of(const std::vector<CUdevResource>& parts) {
  unsigned int count = 0;
  for (const CUdevResource& part : parts) count += part.sm.smCount;
  return count;
}

// The driver's smallest group: 4 multiprocessors on compute capability 8.x, 8 from 9.0 on (CUDA programming
// guide, green contexts).
unsigned int min_group(int device) {
  int major = 0;
  HYDRA_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return major >= 9 ? 8 : 4;
}

Groups divide(const Driver& driver, const CUdevResource& whole, unsigned int least) {
  Groups found;
  unsigned int count = whole.sm.smCount / least;
  found.groups.resize(count);
  CUresult result = CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
  if (count > 0) result = driver.split(found.groups.data(), &count, &whole, &found.rest, 0, least);
  HYDRA_CHECK(result != CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION && result != CUDA_ERROR_INVALID_VALUE,
              "counts: the device's ", whole.sm.smCount, " multiprocessors cannot be divided into groups of ", least);
  check_driver(result, "cuDevSmResourceSplitByCount");
  found.groups.resize(count);
  HYDRA_CHECK(count > 1, "counts: each lane needs a group of ", least, " multiprocessors, and the device's ",
              whole.sm.smCount, " make ", count);
  for (const CUdevResource& group : found.groups) {
    HYDRA_CHECK(group.sm.smCount == found.groups[0].sm.smCount, "counts: the driver makes groups of ",
                found.groups[0].sm.smCount, " and of ", group.sm.smCount, " multiprocessors");
  }
  if (found.rest.type != CU_DEV_RESOURCE_TYPE_SM) found.rest.sm.smCount = 0;
  return found;
}

// Group numbers in the order in which the language lane gets them: as the driver has them, or every second one first.
std::vector<std::size_t> order_of(std::size_t num_groups, bool spread) {
  std::vector<std::size_t> order;
  for (std::size_t first = 0; first < (spread ? 2 : 1); ++first) {
    for (std::size_t number = first; number < num_groups; number += spread ? 2 : 1) order.push_back(number);
  }
  return order;
}

// Neither the context nor the stream is ever destroyed: kernels may be in flight until the process ends. Threads keep
// the primary context current: the stream alone says where kernels run, and its events are those of the primary context.
// null: the driver does not take these groups together.
CUgreenCtx context_on(const Driver& driver, CUdevice device, std::vector<CUdevResource>& parts) {
  CUdevResourceDesc description = nullptr;
  CUgreenCtx context = nullptr;
  const char* name = "cuDevResourceGenerateDesc";
  CUresult result = driver.describe(&description, parts.data(), static_cast<unsigned int>(parts.size()));
  if (result == CUDA_SUCCESS) {
    name = "cuGreenCtxCreate";
    result = driver.create(&context, description, device, CU_GREEN_CTX_DEFAULT_STREAM);
  }
  if (result == CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION) return nullptr;
  check_driver(result, name);
  return context;
}

// Makes a stream on a lane's groups, and on `rest` if there is one and the driver accepts it together with groups.
// Returns the stream's multiprocessors.
int stream_on(const Driver& driver, CUdevice device, std::vector<CUdevResource> parts, const CUdevResource& rest,
              int priority, std::uintptr_t& made) {
  CUgreenCtx context = nullptr;
  if (rest.sm.smCount > 0) {
    parts.push_back(rest);
    context = context_on(driver, device, parts);
    if (context == nullptr) parts.pop_back();
  }
  if (context == nullptr) context = context_on(driver, device, parts);
  HYDRA_CHECK(context != nullptr, "counts: the driver makes no part of ", parts.size(), " groups of ",
              parts[0].sm.smCount, " multiprocessors");
  CUstream stream = nullptr;
  check_driver(driver.create_stream(&stream, context, CU_STREAM_NON_BLOCKING, priority), "cuGreenCtxStreamCreate");
  made = reinterpret_cast<std::uintptr_t>(stream);
  return static_cast<int>(sms_of(parts));
}

}  // namespace

std::vector<Split> split_streams(int device, const std::vector<int>& counts, int language_priority, int vision_priority,
                                 bool spread) {
  require_device(device);
  const DeviceGuard guard(device);
  HYDRA_CUDA(cudaFree(nullptr));  // makes the primary context, whose memory the parts use
  const Driver driver;
  CUdevice handle = 0;
  CUdevResource whole{};  // newer drivers know more fields than older headers, which are zero then
  check_driver(driver.get_device(&handle, device), "cuDeviceGet");
  check_driver(driver.get_resource(handle, &whole, CU_DEV_RESOURCE_TYPE_SM), "cuDeviceGetDevResource");
  const int num_sms = static_cast<int>(whole.sm.smCount);
  for (const int count : counts) {
    HYDRA_CHECK(count > 0 && count < num_sms, "counts: expected 1 to ", num_sms - 1, " of the device's ", num_sms,
                " multiprocessors, got ", count);
  }
  const Groups divided = divide(driver, whole, min_group(device));
  const std::vector<std::size_t> order = order_of(divided.groups.size(), spread);
  const std::size_t group = divided.groups[0].sm.smCount;
  std::vector<Split> splits;
  for (const int count : counts) {
    const std::size_t taken = (static_cast<std::size_t>(count) + group - 1) / group;
    HYDRA_CHECK(taken < order.size(), "counts: of the device's ", order.size(), " groups of ", group,
                " multiprocessors ", count, " leave none");
    std::vector<CUdevResource> language, vision;
    for (std::size_t place = 0; place < order.size(); ++place) {
      (place < taken ? language : vision).push_back(divided.groups[order[place]]);
    }
    Split made;
    made.language_sms = stream_on(driver, handle, language, {}, language_priority, made.language);
    made.vision_sms = stream_on(driver, handle, vision, divided.rest, vision_priority, made.vision);
    splits.push_back(made);
  }
  return splits;
}

}  // namespace hydra::cuda

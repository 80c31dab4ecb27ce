// The CUDA driver as csrc/cuda/split.cpp uses it: resources are sets of numbered multiprocessors, and what the driver's
// documentation forbids is refused as it says.
#include "driver.h"

#include <cuda.h>

#include <algorithm>
#include <bitset>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "executor.h"
#include "runtime.h"

namespace {

constexpr int kMost = 256;

// What the driver keeps in a resource, which only its own calls read.
struct Inside {
  int split;  // by which call it was made; 0: the whole device
  bool is_rest;
  std::bitset<kMost> sms;
};
static_assert(sizeof(Inside) <= sizeof(CUdevResource::_internal_padding));

}  // namespace

struct CUdevResourceDesc_st {
  std::bitset<kMost> sms;
};
struct CUgreenCtx_st {
  std::bitset<kMost> sms;
};

namespace host_cuda {
namespace {

std::mutex lock;
Divided device;
int num_splits = 0, splits_taken = 0;
std::vector<GreenStream> made;

unsigned least() { return device.major >= 9 ? 8 : device.major == 8 ? 4 : 2; }

CUdevResource resource(const Inside& inside) {
  CUdevResource result{};
  result.type = inside.sms.any() ? CU_DEV_RESOURCE_TYPE_SM : CU_DEV_RESOURCE_TYPE_INVALID;
  result.sm.smCount = static_cast<unsigned>(inside.sms.count());
  std::memcpy(result._internal_padding, &inside, sizeof(inside));
  return result;
}

Inside inside_of(const CUdevResource& resource) {
  Inside result;
  std::memcpy(static_cast<void*>(&result), resource._internal_padding, sizeof(result));
  return result;
}

CUresult get_device(CUdevice* found, int index) {
  *found = index;
  return CUDA_SUCCESS;
}

CUresult get_resource(CUdevice, CUdevResource* found, CUdevResourceType type) {
  if (type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
  Inside all{};
  for (unsigned sm = 0; sm < device.num_sms; ++sm) all.sms.set(sm);
  *found = resource(all);
  return CUDA_SUCCESS;
}

CUresult split(CUdevResource* result, unsigned* count, const CUdevResource* input, CUdevResource* rest, unsigned flags,
               unsigned min_count) {
  const Inside whole = inside_of(*input);
  if (flags != 0 || result == nullptr || min_count > whole.sms.count()) return CUDA_ERROR_INVALID_VALUE;
  if (whole.split != 0) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
  const unsigned size = std::max(least(), (min_count + least() - 1) / least() * least());
  const unsigned fitting = static_cast<unsigned>(whole.sms.count()) / size;
  *count = std::min(*count, fitting - std::min(fitting, device.lost));
  const int number = ++num_splits;
  unsigned next = 0;
  for (unsigned group = 0; group < *count; ++group) {
    Inside part{number, false, {}};
    for (unsigned sm = 0; sm < size; ++sm) part.sms.set(next++);
    result[group] = resource(part);
  }
  Inside left{number, true, {}};
  while (next < whole.sms.count()) left.sms.set(next++);
  *rest = resource(left);
  return CUDA_SUCCESS;
}

CUresult describe(CUdevResourceDesc* description, CUdevResource* parts, unsigned count) {
  if (count == 0) return CUDA_ERROR_INVALID_VALUE;
  std::bitset<kMost> sms;
  for (unsigned number = 0; number < count; ++number) {
    const Inside part = inside_of(parts[number]);
    const bool is_foreign = part.split == 0 || part.split != inside_of(parts[0]).split || (part.sms & sms).any();
    const bool stands_alone = count > 1 && ((part.is_rest && !device.rest_joins) || !device.groups_join);
    if (is_foreign || stands_alone) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
    sms |= part.sms;
  }
  *description = new CUdevResourceDesc_st{sms};
  return CUDA_SUCCESS;
}

CUresult create(CUgreenCtx* context, CUdevResourceDesc description, CUdevice, unsigned flags) {
  if (flags != CU_GREEN_CTX_DEFAULT_STREAM) return CUDA_ERROR_INVALID_VALUE;
  if (description->sms.count() < least()) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
  *context = new CUgreenCtx_st{description->sms};
  return CUDA_SUCCESS;
}

CUresult create_stream(CUstream* stream, CUgreenCtx context, unsigned flags, int priority) {
  if (flags != CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  const uintptr_t handle = new_stream(current_device(), false);
  *stream = reinterpret_cast<CUstream>(handle);
  std::vector<int> sms;
  for (int sm = 0; sm < kMost; ++sm) {
    if (context->sms[static_cast<size_t>(sm)]) sms.push_back(sm);
  }
  const std::lock_guard<std::mutex> guard(lock);
  made.push_back({handle, priority, std::move(sms)});
  return CUDA_SUCCESS;
}

CUresult error_name(CUresult result, const char** text) {
  *text = result == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_OF_THE_HOST";
  return CUDA_SUCCESS;
}

template <class Function>
void* address(Function* function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace

void divide_device(const Divided& wanted) { device = wanted; }

int compute_capability() { return device.major; }

std::vector<GreenStream> take_green_streams() {
  const std::lock_guard<std::mutex> guard(lock);
  return std::exchange(made, {});
}

int take_splits() { return num_splits - std::exchange(splits_taken, num_splits); }

void* driver_entry(const std::string& name, unsigned version) {
  static const std::map<std::string, std::pair<void*, unsigned>> entries = {
      {"cuGetErrorName", {address(error_name), 6000}},
      {"cuDeviceGet", {address(get_device), 2000}},
      {"cuDeviceGetDevResource", {address(get_resource), 12040}},
      {"cuDevSmResourceSplitByCount", {address(split), 12040}},
      {"cuDevResourceGenerateDesc", {address(describe), 12040}},
      {"cuGreenCtxCreate", {address(create), 12040}},
      {"cuGreenCtxStreamCreate", {address(create_stream), 12050}},
  };
  const auto found = entries.find(name);
  return found == entries.end() || version < found->second.second ? nullptr : found->second.first;
}

}  // namespace host_cuda

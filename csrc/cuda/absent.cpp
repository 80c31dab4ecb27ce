// The CUDA side of a build without a CUDA toolkit: the same entry points, all of which say so.
#include <stdexcept>

#include "cuda/cache.h"
#include "cuda/device.h"
#include "cuda/host.h"
#include "cuda/ipc.h"
#include "cuda/split.h"

namespace hydra::cuda {
namespace {

constexpr const char* kProblem =
    "the extension was built without CUDA: there was no driver of a GPU or no nvcc 12.5 or newer, or HYDRA_CPU_ONLY was "
    "set; build it again where there are both";

[[noreturn]] void fail() { throw std::runtime_error(kProblem); }

}  // namespace

Probe probe() {
  Probe result;
  result.status = "not_built";
  result.problem = kProblem;
  return result;
}

void require_device(int) { fail(); }
bool synchronous() { return false; }
void set_synchronous(bool) {}
void check_faults(int) { fail(); }
void check_device_address(const char*, std::uintptr_t) { fail(); }

void write_rows(const Target&, const CacheView&, int64_t, const RowSource*, const int64_t*, int64_t) { fail(); }
void gather_rows(const Target&, const CacheView&, int64_t, int64_t, const int64_t*, int64_t, char*) { fail(); }
void merge_rows(const Target&, const MergeCall&, int64_t) { fail(); }
void copy_blocks(const Target&, const CacheView&, const CacheView&, const int64_t*, int64_t) { fail(); }
void rope_and_write(const Target&, const RopeCall&) { fail(); }

std::uintptr_t allocate(int64_t, int) { fail(); }
void release(std::uintptr_t, int) { fail(); }
std::string export_memory(std::uintptr_t, int) { fail(); }
std::uintptr_t open_memory(const std::string&, int64_t, int) { fail(); }
void close_memory(std::uintptr_t, int) { fail(); }

void pin_memory(std::uintptr_t, int64_t, int) { fail(); }
void unpin_memory(std::uintptr_t, int) { fail(); }
void copy_host_blocks(const Target&, const CacheView&, const CacheView&, const int64_t*, int64_t) { fail(); }

std::vector<Split> split_streams(int, const std::vector<int>&, int, int, bool) { fail(); }

}  // namespace hydra::cuda

// Pinning by the runtime and copies by its copy engines, which leave the multiprocessors to the lanes. Compiled by the
// host compiler against the runtime.
#include "cuda/host.h"

#include "cuda/launch.h"

namespace hydra::cuda {

void pin_memory(std::uintptr_t address, int64_t nbytes, int device) {
  require_device(device);
  const DeviceGuard guard(device);
  HYDRA_CUDA(cudaHostRegister(reinterpret_cast<void*>(address), static_cast<size_t>(nbytes), cudaHostRegisterPortable));
}

void unpin_memory(std::uintptr_t address, int device) {
  require_device(device);
  const DeviceGuard guard(device);
  HYDRA_CUDA(cudaHostUnregister(reinterpret_cast<void*>(address)));
}

void copy_host_blocks(const Target& target, const CacheView& from, const CacheView& to, const int64_t* pairs,
                      int64_t count) {
  const DeviceGuard guard(target.device);
  const int64_t bytes = from.block_bytes();
  for (int64_t done = 0; done < count;) {
    const int64_t source = pairs[2 * done], drain = pairs[2 * done + 1];
    int64_t run = 1;  // blocks that follow each other on both sides are one copy
    while (done + run < count && pairs[2 * (done + run)] == source + run &&
           pairs[2 * (done + run) + 1] == drain + run) {
      ++run;
    }
    HYDRA_CUDA(cudaMemcpyAsync(to.data + drain * bytes, from.data + source * bytes, static_cast<size_t>(run * bytes),
                               cudaMemcpyDefault, stream_of(target)));
    done += run;
  }
}

}  // namespace hydra::cuda

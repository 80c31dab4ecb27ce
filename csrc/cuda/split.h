// Parts of a device's multiprocessors, each with streams of its own. Mechanism only: which work runs where is decided in
// hydra_engine/backend/cuda/sm_split.py.
#pragma once

#include <cstdint>
#include <vector>

namespace hydra::cuda {

// Two streams whose kernels share no multiprocessor, and how many each has. Under MPS with a share of threads, and on
// compute capability 9.x once a module with dynamic parallelism was loaded (2 more for all), CUDA lends them others.
struct Split {
  std::uintptr_t language = 0, vision = 0;
  int language_sms = 0, vision_sms = 0;
};

// One split of the whole device for each count: at least so many multiprocessors for the language stream, rounded up to
// what the device can divide by, the rest for the vision stream. Both of a split are green contexts: work of ordinary
// streams runs on every multiprocessor. They stay until the process ends. Throws std::runtime_error where the driver has
// no green contexts, std::invalid_argument for a count that leaves nothing.
std::vector<Split> split_streams(int device, const std::vector<int>& counts, int language_priority,
                                 int vision_priority);

}  // namespace hydra::cuda

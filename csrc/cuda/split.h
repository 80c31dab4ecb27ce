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

// For each count, at least so many multiprocessors for the language stream and the others for the vision stream. The
// device is divided once, into the smallest groups that it makes, and all parts are made of these: of two counts the
// smaller one's language part lies in the larger one's, and shares nothing with that one's vision part. `spread`: the
// language stream gets every second group first, instead of those that the driver names first. What is left over when
// the device is divided is the vision stream's, or nobody's where the driver does not take it together with groups.
// All are green contexts, since work of ordinary streams runs on every multiprocessor. They stay until the process
// ends. Throws std::runtime_error where the driver has no green contexts, std::invalid_argument for a count that leaves
// nothing and where the device cannot be divided so.
std::vector<Split> split_streams(int device, const std::vector<int>& counts, int language_priority, int vision_priority,
                                 bool spread);

}  // namespace hydra::cuda

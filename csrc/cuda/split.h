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

// Two streams for each count: at least that many SMs for the language stream, the rest for the vision stream. The
// device is divided once, into the smallest groups that the driver makes, and all parts consist of these: the language
// part of the smaller of two counts is a subset of the larger one's, and disjoint from the latter's vision part.
// `spread`: the language stream gets every second group first, instead of the driver's first groups. SMs left over when
// the device is divided are the vision stream's, or unused if the driver does not accept them together with groups.
// All are green contexts, since work of ordinary streams runs on every multiprocessor. They stay until the process
// ends. Throws std::runtime_error where the driver has no green contexts, std::invalid_argument for a count that leaves
// nothing and where the device cannot be divided so.
std::vector<Split> split_streams(int device, const std::vector<int>& counts, int language_priority, int vision_priority,
                                 bool spread);

}  // namespace hydra::cuda

// A driver that divides devices, as tests ask for them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace host_cuda {

// The device that is divided. `lost`: of its groups, so many are left over although they would fit.
struct Divided {
  int major = 9;
  unsigned num_sms = 132, lost = 0;
  bool rest_joins = true;   // what is left over may stand beside groups in one description
  bool groups_join = true;  // several groups may
};

void divide_device(const Divided& device);
int compute_capability();

struct GreenStream {
  uintptr_t handle;
  int priority;
  std::vector<int> sms;
};

// Those that were made since the last call.
std::vector<GreenStream> take_green_streams();
// Of all calls that divide a device, since the last call.
int take_splits();

// null: there is no such function in that version.
void* driver_entry(const std::string& name, unsigned version);

}  // namespace host_cuda

// Entry point of divided devices: counts in, streams out.
#include "cuda/split.h"

#include <pybind11/stl.h>

#include <tuple>

#include "api/api.h"

namespace hydra {

namespace py = pybind11;

void register_cuda_split(py::module_& m) {
  m.def(
      "cuda_split_streams",
      [](int device, const std::vector<int>& counts, int language_priority, int vision_priority, bool spread) {
        std::vector<std::tuple<Address, Address, int, int>> splits;
        for (const cuda::Split& split :
             cuda::split_streams(device, counts, language_priority, vision_priority, spread)) {
          splits.emplace_back(split.language, split.vision, split.language_sms, split.vision_sms);
        }
        return splits;
      },
      py::arg("device"), py::arg("counts"), py::arg("language_priority"), py::arg("vision_priority"),
      py::arg("spread") = false, ReleaseGil());
}

}  // namespace hydra

// Entry points about the processor and the calling thread's threads.
#include <pybind11/stl.h>

#include "api/api.h"
#include "check.h"
#include "cpu/isa.h"
#include "cpu/thread_pool.h"

namespace hydra {

void register_cpu_info(pybind11::module_& m) {
  m.def("isa", [] { return isa_name(current_isa()); });
  m.def("cpu_features", &cpu_features);
  m.def("force_isa", &force_isa, pybind11::arg("name"));
  m.def("num_threads", &num_threads);
  m.def(
      "set_num_threads",
      [](int n) {
        HYDRA_CHECK(n >= 1 && n <= 1024, "n: expected 1 to 1024 threads, got ", n);
        set_num_threads(n);
      },
      pybind11::arg("n"), ReleaseGil());
}

}  // namespace hydra

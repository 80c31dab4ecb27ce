// Entry points of memory that crosses processes: addresses and handles in, addresses and handles out.
#include "cuda/ipc.h"

#include "api/api.h"
#include "cuda/host.h"

namespace hydra {

namespace py = pybind11;

void register_cuda_ipc(py::module_& m) {
  m.attr("CUDA_POOL_GRANULARITY") = cuda::kPoolGranularity;
  m.def("cuda_allocate", &cuda::allocate, py::arg("nbytes"), py::arg("device"), ReleaseGil());
  m.def("cuda_release", &cuda::release, py::arg("address"), py::arg("device"), ReleaseGil());
  m.def(
      "cuda_ipc_export",
      [](Address address, int device) {
        std::string handle;
        {
          py::gil_scoped_release release;
          handle = cuda::export_memory(address, device);
        }
        return py::bytes(handle);
      },
      py::arg("address"), py::arg("device"));
  // A std::string argument takes Python's bytes unchanged.
  m.def("cuda_ipc_open", &cuda::open_memory, py::arg("handle"), py::arg("nbytes"), py::arg("device"), ReleaseGil());
  m.def("cuda_ipc_close", &cuda::close_memory, py::arg("address"), py::arg("device"), ReleaseGil());
  m.def("cuda_pin", &cuda::pin_memory, py::arg("address"), py::arg("nbytes"), py::arg("device"), ReleaseGil());
  m.def("cuda_unpin", &cuda::unpin_memory, py::arg("address"), py::arg("device"), ReleaseGil());
}

}  // namespace hydra

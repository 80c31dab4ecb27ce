// Entry points of device memory and events that cross processes: addresses and handles in, addresses and handles out.
#include "cuda/ipc.h"

#include "api/api.h"

namespace hydra {
namespace {

namespace py = pybind11;

py::bytes as_bytes(std::string (*make)(std::uintptr_t, int), Address of, int device) {
  std::string handle;
  {
    py::gil_scoped_release release;
    handle = make(of, device);
  }
  return py::bytes(handle);
}

}  // namespace

void register_cuda_ipc(py::module_& m) {
  m.attr("CUDA_POOL_GRANULARITY") = cuda::kPoolGranularity;
  m.def("cuda_allocate", &cuda::allocate, py::arg("nbytes"), py::arg("device"), ReleaseGil());
  m.def("cuda_release", &cuda::release, py::arg("address"), py::arg("device"), ReleaseGil());
  m.def(
      "cuda_ipc_export",
      [](Address address, int device) { return as_bytes(&cuda::export_memory, address, device); },
      py::arg("address"), py::arg("device"));
  // A std::string argument takes Python's bytes as they are.
  m.def("cuda_ipc_open", &cuda::open_memory, py::arg("handle"), py::arg("nbytes"), py::arg("device"), ReleaseGil());
  m.def("cuda_ipc_close", &cuda::close_memory, py::arg("address"), py::arg("device"), ReleaseGil());
  m.def("cuda_event_create", &cuda::create_event, py::arg("device"), ReleaseGil());
  m.def(
      "cuda_event_export",
      [](Address event, int device) { return as_bytes(&cuda::export_event, event, device); }, py::arg("event"),
      py::arg("device"));
  m.def("cuda_event_open", &cuda::open_event, py::arg("handle"), py::arg("device"), ReleaseGil());
  m.def("cuda_event_record", &cuda::record_event, py::arg("event"), py::arg("stream"), py::arg("device"),
        ReleaseGil());
  m.def("cuda_event_wait", &cuda::wait_event, py::arg("event"), py::arg("stream"), py::arg("device"), ReleaseGil());
  m.def("cuda_event_is_done", &cuda::event_is_done, py::arg("event"), py::arg("device"), ReleaseGil());
  m.def("cuda_event_destroy", &cuda::destroy_event, py::arg("event"), py::arg("device"), ReleaseGil());
}

}  // namespace hydra

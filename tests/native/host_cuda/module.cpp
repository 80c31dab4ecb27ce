// The entry points of csrc/api/cuda_cache.cpp, which end in kernels on the host, and what tests ask of both. One file
// with them: most of the time of compiling either goes into pybind11.
#include "api/cuda_cache.cpp"
#include "api/cuda_split.cpp"

#include <pybind11/stl.h>

#include "cuda/host.h"
#include "driver.h"
#include "executor.h"
#include "rules.h"
#include "runtime.h"

PYBIND11_MODULE(host_cuda, m) {
  namespace py = pybind11;
  hydra::register_cuda_cache(m);
  hydra::register_cuda_split(m);
  m.def("cuda_pin", &hydra::cuda::pin_memory);
  m.def("cuda_unpin", &hydra::cuda::unpin_memory);
  m.def("take_launches", [] {
    py::list launches;
    for (const host_cuda::Seen& seen : host_cuda::take_launches()) {
      launches.append(py::make_tuple(seen.kernel, seen.grid, seen.threads, seen.device, seen.stream, seen.widest));
    }
    return launches;
  });
  m.def("divide_device", [](int major, unsigned num_sms, unsigned lost, bool rest_joins, bool groups_join) {
    host_cuda::divide_device({major, num_sms, lost, rest_joins, groups_join});
  });
  m.def("take_splits", &host_cuda::take_splits);
  m.def("take_green_streams", [] {
    py::list streams;
    for (const host_cuda::GreenStream& stream : host_cuda::take_green_streams()) {
      streams.append(py::make_tuple(stream.handle, stream.priority, stream.sms));
    }
    return streams;
  });
  m.def("make_fail", &host_cuda::make_fail);
  m.def("new_stream", &host_cuda::new_stream);
  m.def("end_stream", &host_cuda::end_stream);
  m.def("current_device", &host_cuda::current_device);
  m.def("try_launch", &host_cuda::try_launch);
  m.def("run_rule", &host_cuda::run_rule);
}

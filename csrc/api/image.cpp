// Entry point of resizing. Memory is the caller's: the pyi says which bytes must be there.
#include "api/api.h"
#include "cpu/image/resize.h"

namespace hydra {
namespace {

namespace py = pybind11;

void resize(Address source, int64_t source_stride, int64_t source_width, int64_t source_height, int64_t width,
            int64_t height, int64_t left, int64_t top, int64_t columns, int64_t rows, Address out, int64_t out_stride,
            int filter, bool down_first) {
  ResizeCall call;
  call.source = pointer<uint8_t>(source);
  call.source_stride = source_stride;
  call.source_width = source_width;
  call.source_height = source_height;
  call.width = width;
  call.height = height;
  call.left = left;
  call.top = top;
  call.columns = columns;
  call.rows = rows;
  call.out = pointer<uint8_t>(out);
  call.out_stride = out_stride;
  call.filter = filter_from_int(filter);
  call.down_first = down_first;
  resize_rgb(call);
}

}  // namespace

void register_image(py::module_& m) {
  m.def("resize_rgb", &resize, py::arg("source"), py::arg("source_stride"), py::arg("source_width"),
        py::arg("source_height"), py::arg("width"), py::arg("height"), py::arg("left"), py::arg("top"),
        py::arg("columns"), py::arg("rows"), py::arg("out"), py::arg("out_stride"), py::arg("filter"),
        py::arg("down_first"), ReleaseGil());
}

}  // namespace hydra

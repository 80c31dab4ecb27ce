// Entry points of the matrix products. PackedLinear holds a packed weight's addresses and sizes (not the memory, which
// Python owns), so that a call passes five integers.
#include "cpu/linear/linear.h"

#include "api/api.h"
#include "api/recording.h"

namespace hydra {
namespace {

namespace py = pybind11;

constexpr Address kAlignment = 64;

PackedWeight make_weight(Address data, Address bias, int64_t num_out, int64_t num_in, int dtype, int x_dtype) {
  HYDRA_CHECK(num_out >= 0 && num_in >= 0, "num_out, num_in: expected sizes of at least 0, got ", num_out, ", ",
              num_in);
  HYDRA_CHECK(data % kAlignment == 0, "data: expected an address aligned to 64 bytes, got ", data);
  HYDRA_CHECK(bias % 4 == 0, "bias: expected an address aligned to 4 bytes, got ", bias);
  const PackedWeight weight{pointer<void>(data), pointer<float>(bias), num_out,
                            num_in,              dtype_from_int(dtype), dtype_from_int(x_dtype)};
  HYDRA_CHECK(weight.x_dtype == DType::f32 || weight.x_dtype == weight.dtype,
              "x_dtype: expected float32 or the weight's ", dtype, ", got ", x_dtype);
  return weight;
}

int64_t packed_bytes(int64_t num_out, int64_t num_in, int dtype) {
  return make_weight(0, 0, num_out, num_in, dtype, dtype).num_bytes();
}

void pack(const PackedWeight& packed, Address weight, int64_t weight_stride) {
  HYDRA_CHECK(packed.data && weight, "data, weight: expected addresses, got 0");
  pack_weight(packed, pointer<void>(weight), weight_stride);
}

void run_linear(const PackedWeight& weight, Address x, int64_t x_stride, int64_t rows, Address out, int act,
                int out_dtype, Address residual, int64_t residual_stride) {
  LinearCall call;
  call.weight = weight;
  call.x = pointer<void>(x);
  call.x_stride = x_stride;
  call.out = pointer<void>(out);
  call.out_stride = weight.num_out;
  call.residual = pointer<void>(residual);
  call.residual_stride = residual_stride;
  call.rows = rows;
  call.act = activation_from_int(act);
  call.out_dtype = dtype_from_int(out_dtype);
  HYDRA_CHECK(rows >= 0, "rows: expected at least 0, got ", rows);
  HYDRA_CHECK(call.out_dtype == DType::f32 || call.out_dtype == weight.x_dtype,
              "out_dtype: expected float32 or that of x, ", static_cast<int>(weight.x_dtype), ", got ", out_dtype);
  perform([call] { linear(call); });
}

}  // namespace

void register_linear(py::module_& m) {
  m.def("packed_bytes", &packed_bytes, py::arg("num_out"), py::arg("num_in"), py::arg("dtype"));
  py::class_<PackedWeight>(m, "PackedWeight")
      .def(py::init(&make_weight), py::arg("data"), py::arg("bias"), py::arg("num_out"), py::arg("num_in"),
           py::arg("dtype"), py::arg("x_dtype"))
      .def("pack", &pack, py::arg("weight"), py::arg("weight_stride"), ReleaseGil());
  m.def("linear", &run_linear, py::arg("weight"), py::arg("x"), py::arg("x_stride"), py::arg("rows"), py::arg("out"),
        py::arg("act"), py::arg("out_dtype"), py::arg("residual") = 0, py::arg("residual_stride") = 0, ReleaseGil());
}

}  // namespace hydra

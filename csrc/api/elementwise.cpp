// Entry points of the norms, gated activations, rotations and largest numbers. Outputs are contiguous, inputs may have any row stride.
#include "cpu/elementwise/elementwise.h"

#include <utility>

#include "api/api.h"
#include "api/recording.h"

namespace hydra {
namespace {

namespace py = pybind11;

RowsCall make_call(Address x, int64_t x_stride, Address out, int64_t rows, int64_t columns, int dtype) {
  HYDRA_CHECK(rows >= 0, "rows: expected at least 0, got ", rows);
  HYDRA_CHECK(columns >= 1, "columns: expected at least 1, got ", columns);
  RowsCall call;
  call.x = pointer<void>(x);
  call.x_stride = x_stride;
  call.out = pointer<void>(out);
  call.rows = rows;
  call.columns = columns;
  call.dtype = dtype_from_int(dtype);
  return call;
}

// Every token of x has `heads` rows, head_stride elements apart.
void set_heads(RowsCall& call, int64_t heads, int64_t head_stride) {
  HYDRA_CHECK(heads >= 0, "heads: expected at least 0, got ", heads);
  call.rows *= heads;
  call.heads = heads > 0 ? heads : 1;
  call.head_stride = head_stride;
}

void rms_norm(Address x, int64_t x_stride, Address weight, Address out, int64_t rows, int64_t columns, float eps,
              int dtype, int64_t heads, int64_t head_stride, bool wide_weight) {
  RowsCall call = make_call(x, x_stride, out, rows, columns, dtype);
  call.wide_weight = wide_weight;
  set_heads(call, heads, head_stride);
  call.weight = pointer<void>(weight);
  call.eps = eps;
  perform([call] { run_rows(RowsOp::rms_norm, call); });
}

void add_rms_norm(Address x, int64_t x_stride, Address residual, int64_t residual_stride, Address weight, Address out,
                  Address sum, int64_t rows, int64_t columns, float eps, int dtype, bool wide_weight) {
  RowsCall call = make_call(x, x_stride, out, rows, columns, dtype);
  call.wide_weight = wide_weight;
  call.residual = pointer<void>(residual);
  call.residual_stride = residual_stride;
  call.weight = pointer<void>(weight);
  call.sum = pointer<void>(sum);
  call.eps = eps;
  perform([call] { run_rows(RowsOp::add_rms_norm, call); });
}

void layer_norm(Address x, int64_t x_stride, Address weight, Address bias, Address out, int64_t rows, int64_t columns,
                float eps, int dtype) {
  RowsCall call = make_call(x, x_stride, out, rows, columns, dtype);
  call.weight = pointer<void>(weight);
  call.bias = pointer<void>(bias);
  call.eps = eps;
  perform([call] { run_rows(RowsOp::layer_norm, call); });
}

void act_and_mul(Address gate_up, int64_t stride, Address out, int64_t rows, int64_t columns, int act, int dtype) {
  RowsCall call = make_call(gate_up, stride, out, rows, columns, dtype);
  call.act = activation_from_int(act);
  perform([call] { run_rows(RowsOp::act_and_mul, call); });
}

void rotate(Address x, int64_t x_stride, int64_t heads, int64_t head_stride, Address cos, int64_t cos_stride,
            Address sin, int64_t sin_stride, Address out, int64_t tokens, int64_t columns, int dtype) {
  HYDRA_CHECK(columns % 2 == 0, "columns: expected an even head dim, got ", columns);
  RowsCall call = make_call(x, x_stride, out, tokens, columns, dtype);
  set_heads(call, heads, head_stride);
  call.cos = pointer<float>(cos);
  call.sin = pointer<float>(sin);
  call.cos_stride = cos_stride;
  call.sin_stride = sin_stride;
  perform([call] { run_rows(RowsOp::rotate, call); });
}

using Strides = std::pair<int64_t, int64_t>;  // between tokens, between heads

RowsCall gated_call(Address x, Strides x_strides, Address gate, Strides gate_strides, Address out, int64_t tokens,
                    int64_t heads, int64_t columns, int dtype) {
  RowsCall call = make_call(x, x_strides.first, out, tokens, columns, dtype);
  set_heads(call, heads, x_strides.second);
  call.gate = pointer<void>(gate);
  call.gate_stride = gate_strides.first;
  call.gate_head_stride = gate_strides.second;
  return call;
}

void gated_rms_norm(Address x, Strides x_strides, Address weight, Address gate, Strides gate_strides, Address out,
                    int64_t tokens, int64_t heads, int64_t columns, float eps, int dtype) {
  RowsCall call = gated_call(x, x_strides, gate, gate_strides, out, tokens, heads, columns, dtype);
  call.weight = pointer<void>(weight);
  call.eps = eps;
  perform([call] { run_rows(RowsOp::gated_rms_norm, call); });
}

void sigmoid_mul(Address x, Strides x_strides, Address gate, Strides gate_strides, Address out, int64_t tokens,
                 int64_t heads, int64_t columns, int dtype) {
  const RowsCall call = gated_call(x, x_strides, gate, gate_strides, out, tokens, heads, columns, dtype);
  perform([call] { run_rows(RowsOp::sigmoid_mul, call); });
}

void find_best(Address x, int64_t x_stride, int64_t rows, int64_t columns, Address best) {
  HYDRA_CHECK(rows >= 0, "rows: expected at least 0, got ", rows);
  HYDRA_CHECK(columns >= 1, "columns: expected at least 1, got ", columns);
  best_of_rows({pointer<float>(x), x_stride, rows, columns, pointer<int64_t>(best)});
}

}  // namespace

void register_elementwise(py::module_& m) {
  m.def("rms_norm", &rms_norm, py::arg("x"), py::arg("x_stride"), py::arg("weight"), py::arg("out"), py::arg("rows"),
        py::arg("columns"), py::arg("eps"), py::arg("dtype"), py::arg("heads") = 1, py::arg("head_stride") = 0,
        py::arg("wide_weight") = false, ReleaseGil());
  m.def("add_rms_norm", &add_rms_norm, py::arg("x"), py::arg("x_stride"), py::arg("residual"),
        py::arg("residual_stride"), py::arg("weight"), py::arg("out"), py::arg("sum"), py::arg("rows"),
        py::arg("columns"), py::arg("eps"), py::arg("dtype"), py::arg("wide_weight") = false, ReleaseGil());
  m.def("layer_norm", &layer_norm, py::arg("x"), py::arg("x_stride"), py::arg("weight"), py::arg("bias"),
        py::arg("out"), py::arg("rows"), py::arg("columns"), py::arg("eps"), py::arg("dtype"), ReleaseGil());
  m.def("act_and_mul", &act_and_mul, py::arg("gate_up"), py::arg("stride"), py::arg("out"), py::arg("rows"),
        py::arg("columns"), py::arg("act"), py::arg("dtype"), ReleaseGil());
  m.def("rotate", &rotate, py::arg("x"), py::arg("x_stride"), py::arg("heads"), py::arg("head_stride"), py::arg("cos"),
        py::arg("cos_stride"), py::arg("sin"), py::arg("sin_stride"), py::arg("out"), py::arg("tokens"),
        py::arg("columns"), py::arg("dtype"), ReleaseGil());
  m.def("gated_rms_norm", &gated_rms_norm, py::arg("x"), py::arg("x_strides"), py::arg("weight"), py::arg("gate"),
        py::arg("gate_strides"), py::arg("out"), py::arg("tokens"), py::arg("heads"), py::arg("columns"),
        py::arg("eps"), py::arg("dtype"), ReleaseGil());
  m.def("best_of_rows", &find_best,
        py::arg("x"), py::arg("x_stride"), py::arg("rows"), py::arg("columns"), py::arg("best"), ReleaseGil());
  m.def("sigmoid_mul", &sigmoid_mul, py::arg("x"), py::arg("x_strides"), py::arg("gate"), py::arg("gate_strides"),
        py::arg("out"), py::arg("tokens"), py::arg("heads"), py::arg("columns"), py::arg("dtype"), ReleaseGil());
}

}  // namespace hydra

// Entry points of recurrent states. Shapes are checked by the caller, rows and places here.
#include "cpu/delta/delta.h"

#include <tuple>

#include "api/api.h"
#include "api/recording.h"

namespace hydra {
namespace {

namespace py = pybind11;

// (cu_q, starts, reads, writes, number of rows, tokens, places, layers, layer)
using Rows = std::tuple<Address, Address, Address, Address, int64_t, int64_t, int64_t, int64_t, int64_t>;
using Shape = std::tuple<int64_t, int64_t, int64_t, int64_t>;  // key heads, heads, key dim, value dim
using Strided = std::tuple<Address, int64_t>;                  // address, elements between tokens

StateRows rows_of(const Rows& given) {
  StateRows rows;
  Address cu_q, starts, reads, writes;
  std::tie(cu_q, starts, reads, writes, rows.rows, rows.tokens, rows.places, rows.layers, rows.layer) = given;
  rows.cu_q = pointer<int64_t>(cu_q);
  rows.starts = pointer<int64_t>(starts);
  rows.reads = pointer<int64_t>(reads);
  rows.writes = pointer<int64_t>(writes);
  return rows;
}

void take(const Strided& given, const void*& address, int64_t& stride) {
  address = pointer<void>(std::get<0>(given));
  stride = std::get<1>(given);
}

void causal_conv(const Strided& x, Address weight, Address state, const Rows& rows, int64_t channels, int64_t taps,
                 Address out, int dtype) {
  ConvCall call;
  call.rows = rows_of(rows);
  take(x, call.x, call.x_stride);
  call.weight = pointer<void>(weight);
  call.state = pointer<void>(state);
  call.out = pointer<void>(out);
  call.channels = channels;
  call.taps = taps;
  call.dtype = dtype_from_int(dtype);
  perform([call] { run_conv(call); });
}

void delta_rule(const Strided& q, const Strided& k, const Strided& v, const Strided& a, const Strided& b, Address rates,
                Address shift, Address state, const Rows& rows, const Shape& shape, Address out, int dtype) {
  RuleCall call;
  call.rows = rows_of(rows);
  take(q, call.q, call.q_stride);
  take(k, call.k, call.k_stride);
  take(v, call.v, call.v_stride);
  take(a, call.a, call.a_stride);
  take(b, call.b, call.b_stride);
  call.rates = pointer<float>(rates);
  call.shift = pointer<float>(shift);
  call.state = pointer<float>(state);
  std::tie(call.key_heads, call.heads, call.key_dim, call.value_dim) = shape;
  call.out = pointer<void>(out);
  call.dtype = dtype_from_int(dtype);
  perform([call] { run_rule(call); });
}

}  // namespace

void register_delta(py::module_& m) {
  m.def("causal_conv", &causal_conv, py::arg("x"), py::arg("weight"), py::arg("state"), py::arg("rows"),
        py::arg("channels"), py::arg("taps"), py::arg("out"), py::arg("dtype"), ReleaseGil());
  m.def("delta_rule", &delta_rule, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("a"), py::arg("b"),
        py::arg("rates"), py::arg("shift"), py::arg("state"), py::arg("rows"), py::arg("shape"), py::arg("out"),
        py::arg("dtype"), ReleaseGil());
}

}  // namespace hydra

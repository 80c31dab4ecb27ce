// Entry points of mixtures of experts. As in api/linear.cpp, Python owns the memory.
#include "cpu/experts/experts.h"

#include <pybind11/stl.h>

#include "api/api.h"
#include "api/recording.h"

namespace hydra {
namespace {

namespace py = pybind11;

PackedExperts make_experts(const ExpertMatrix& gate_up, const ExpertMatrix& down, int64_t num_experts) {
  const PackedExperts experts{gate_up, down, num_experts};
  HYDRA_CHECK(num_experts >= 1, "num_experts: expected at least 1, got ", num_experts);
  std::visit(
      [&](const auto& weight) {
        HYDRA_CHECK(weight.num_out == 2 * experts.inner() && weight.num_in == experts.width(), "gate_up: expected [",
                    2 * experts.inner(), ", ", experts.width(), "], got [", weight.num_out, ", ", weight.num_in, "]");
      },
      gate_up);
  return experts;
}

// Raises ValueError for rows of another dtype than those that a weight of floats was packed for.
void check_rows(const ExpertMatrix& matrix, DType dtype) {
  const auto* weight = std::get_if<PackedWeight>(&matrix);
  HYDRA_CHECK(!weight || weight->x_dtype == dtype, "dtype: expected that of the packed weights' rows, got ",
              static_cast<int>(dtype));
}

void run(const PackedExperts& weights, Address x, int64_t x_stride, int64_t rows, Address experts, Address factors,
         int64_t chosen, Address out, int act, int dtype) {
  ExpertsCall call;
  call.weights = weights;
  call.x = pointer<void>(x);
  call.x_stride = x_stride;
  call.rows = rows;
  call.chosen = chosen;
  call.experts = pointer<int32_t>(experts);
  call.factors = pointer<float>(factors);
  call.out = pointer<void>(out);
  call.act = activation_from_int(act);
  call.dtype = dtype_from_int(dtype);
  HYDRA_CHECK(rows >= 0 && chosen >= 0, "rows, chosen: expected at least 0, got ", rows, ", ", chosen);
  check_rows(weights.gate_up, call.dtype);
  check_rows(weights.down, call.dtype);
  perform([call] { run_experts(call); });
}

void run_route(Address logits, int64_t stride, Address shared, int64_t shared_stride, int64_t rows, int64_t num_experts,
               int64_t chosen, bool renormalise, int dtype, Address experts, Address weights) {
  HYDRA_CHECK(rows >= 0 && chosen >= 1 && chosen <= num_experts, "chosen: expected 1 to ", num_experts, ", got ",
              chosen);
  const RouteCall call{pointer<void>(logits), stride,
                       pointer<void>(shared), shared_stride,
                       rows,                  num_experts,
                       chosen,                renormalise,
                       dtype_from_int(dtype), pointer<int32_t>(experts),
                       pointer<float>(weights)};
  perform([call] { route(call); });
}

}  // namespace

void register_experts(py::module_& m) {
  py::class_<PackedExperts>(m, "PackedExperts")
      .def(py::init(&make_experts), py::arg("gate_up"), py::arg("down"), py::arg("num_experts"));
  m.def("experts", &run, py::arg("weights"), py::arg("x"), py::arg("x_stride"), py::arg("rows"), py::arg("experts"),
        py::arg("factors"), py::arg("chosen"), py::arg("out"), py::arg("act"), py::arg("dtype"), ReleaseGil());
  m.def("route", &run_route, py::arg("logits"), py::arg("stride"), py::arg("shared"), py::arg("shared_stride"),
        py::arg("rows"), py::arg("num_experts"), py::arg("chosen"), py::arg("renormalise"), py::arg("dtype"),
        py::arg("experts"), py::arg("weights"), ReleaseGil());
}

}  // namespace hydra

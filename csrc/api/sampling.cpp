// Entry points of sampling.
#include "api/api.h"
#include "check.h"
#include "cpu/sampling/sampling.h"

namespace py = pybind11;

namespace hydra {
namespace {

using Column = Address;

LogitRows logit_rows(Address data, int64_t stride, int64_t rows, int64_t columns, bool wide) {
  HYDRA_CHECK(rows >= 0, "rows: expected at least 0, got ", rows);
  HYDRA_CHECK(columns >= 1, "columns: expected at least 1, got ", columns);
  return {pointer<void>(data), stride, rows, columns, wide};
}

void sample(Address logits, int64_t stride, int64_t rows, int64_t columns, bool wide, Column temperatures,
            Column top_k, Column top_p, Column min_p, Column numbers, Column tokens, Column finite) {
  sample_rows({logit_rows(logits, stride, rows, columns, wide), pointer<double>(temperatures), pointer<int32_t>(top_k),
               pointer<double>(top_p), pointer<double>(min_p), pointer<double>(numbers), pointer<int64_t>(tokens),
               pointer<bool>(finite)});
}

void adjust_logits(Address logits, int64_t stride, int64_t rows, int64_t columns, bool wide, Column bias_begins,
                   Column bias_ends, Address bias_ids, Address bias_values, int64_t num_biases, Address penalties,
                   Column counted, Address counts, int64_t num_counted, Column masked, Address masks,
                   int64_t num_masked, Address out) {
  AdjustCall call;
  call.logits = logit_rows(logits, stride, rows, columns, wide);
  call.bias_begins = pointer<int32_t>(bias_begins);
  call.bias_ends = pointer<int32_t>(bias_ends);
  call.bias_ids = pointer<int32_t>(bias_ids);
  call.bias_values = pointer<double>(bias_values);
  call.num_biases = num_biases;
  call.penalties = pointer<double>(penalties);
  call.counted = pointer<int32_t>(counted);
  call.counts = pointer<int32_t>(counts);
  call.num_counted = num_counted;
  call.masked = pointer<int32_t>(masked);
  call.masks = pointer<uint32_t>(masks);
  call.num_masked = num_masked;
  call.out = pointer<void>(out);
  adjust_rows(call);
}

void score_tokens(Address logits, int64_t stride, int64_t rows, int64_t columns, bool wide, Column tokens,
                  Column num_top, int64_t max_top, Address numbers, Address places) {
  HYDRA_CHECK(max_top >= 0, "max_top: expected at least 0, got ", max_top);
  score_rows({logit_rows(logits, stride, rows, columns, wide), pointer<int64_t>(tokens), pointer<int32_t>(num_top),
              max_top, pointer<void>(numbers), pointer<int32_t>(places)});
}

}  // namespace

void register_sampling(py::module_& m) {
  m.def("sample", &sample, py::arg("logits"), py::arg("stride"), py::arg("rows"), py::arg("columns"), py::arg("wide"),
        py::arg("temperatures"), py::arg("top_k"), py::arg("top_p"), py::arg("min_p"), py::arg("numbers"),
        py::arg("tokens"), py::arg("finite"), ReleaseGil());
  m.def("adjust_logits", &adjust_logits, py::arg("logits"), py::arg("stride"), py::arg("rows"), py::arg("columns"),
        py::arg("wide"), py::arg("bias_begins"), py::arg("bias_ends"), py::arg("bias_ids"), py::arg("bias_values"),
        py::arg("num_biases"), py::arg("penalties"), py::arg("counted"), py::arg("counts"), py::arg("num_counted"),
        py::arg("masked"), py::arg("masks"), py::arg("num_masked"), py::arg("out"), ReleaseGil());
  m.def("score_tokens", &score_tokens, py::arg("logits"), py::arg("stride"), py::arg("rows"), py::arg("columns"),
        py::arg("wide"), py::arg("tokens"), py::arg("num_top"), py::arg("max_top"), py::arg("numbers"),
        py::arg("places"), ReleaseGil());
}

}  // namespace hydra

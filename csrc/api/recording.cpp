// Entry points of recordings: begun and ended by one thread, replayed by any.
#include "api/recording.h"

#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <vector>

#include "api/api.h"
#include "check.h"
#include "dtype.h"

namespace hydra {
namespace {

namespace py = pybind11;

struct Input {
  void* own;
  size_t num_bytes;
};

struct Recording {
  std::unique_ptr<Calls> calls = std::make_unique<Calls>();
  std::vector<Input> inputs;
};

void begin(Recording& recording) {
  HYDRA_CHECK(!recorded_calls(), "begin: expected a thread that does not record yet");
  recorded_calls() = recording.calls.get();
}

void end(Recording& recording) {
  HYDRA_CHECK(recorded_calls() == recording.calls.get(), "end: expected the thread that began");
  recorded_calls() = nullptr;
}

void replay_one(const Recording& recording, size_t index) {
  HYDRA_CHECK(index < recording.calls->size(), "index: expected one of ", recording.calls->size(), " calls, got ",
              index);
  (*recording.calls)[index]();
}

void add_input(Recording& recording, Address own, int64_t num_bytes) {
  HYDRA_CHECK(num_bytes >= 0, "num_bytes: expected at least 0, got ", num_bytes);
  recording.inputs.push_back({pointer<void>(own), static_cast<size_t>(num_bytes)});
}

void set_inputs(const Recording& recording, const std::vector<Address>& sources) {
  const auto& inputs = recording.inputs;
  HYDRA_CHECK(sources.size() == inputs.size(), "sources: expected ", inputs.size(), ", got ", sources.size());
  for (size_t i = 0; i < inputs.size(); ++i) std::memcpy(inputs[i].own, pointer<void>(sources[i]), inputs[i].num_bytes);
}

void replay(const Recording& recording) {
  for (const auto& call : *recording.calls) call();
}

// Strides and widths in bytes.
void copy_columns(Address source, int64_t source_stride, Address target, int64_t target_stride, int64_t width,
                  int64_t rows) {
  const char* from = pointer<char>(source);
  char* to = pointer<char>(target);
  perform([=] {
    for (int64_t row = 0; row < rows; ++row) std::memcpy(to + row * target_stride, from + row * source_stride, width);
  });
}

// [count, width] of a table [table_rows, width], width in bytes.
void copy_rows(Address table, int64_t table_rows, int64_t width, Address ids, int64_t count, Address target) {
  const char* from = pointer<char>(table);
  const int64_t* rows = pointer<int64_t>(ids);
  char* to = pointer<char>(target);
  perform([=] {
    for (int64_t i = 0; i < count; ++i) {
      HYDRA_CHECK(rows[i] >= 0 && rows[i] < table_rows, "ids: expected 0 to ", table_rows - 1, ", got ", rows[i]);
      std::memcpy(to + i * width, from + rows[i] * width, static_cast<size_t>(width));
    }
  });
}

template <class T>
void widen_all(const T* source, int64_t count, float* target) {
  perform([=] {
    for (int64_t i = 0; i < count; ++i) target[i] = to_float(source[i]);
  });
}

void widen(Address source, int dtype, int64_t count, Address target) {
  const DType kind = dtype_from_int(dtype);
  HYDRA_CHECK(kind != DType::f32, "dtype: expected 16 bits, got float32");
  if (kind == DType::bf16) return widen_all(pointer<bf16_t>(source), count, pointer<float>(target));
  widen_all(pointer<f16_t>(source), count, pointer<float>(target));
}

}  // namespace

Calls*& recorded_calls() {
  static thread_local Calls* calls = nullptr;
  return calls;
}

void register_recording(py::module_& m) {
  py::class_<Recording>(m, "Recording")
      .def(py::init<>())
      .def("begin", &begin)
      .def("end", &end)
      .def("add_input", &add_input, py::arg("own"), py::arg("num_bytes"))
      .def("set_inputs", &set_inputs, py::arg("sources"))
      .def("replay", &replay, ReleaseGil())
      .def("replay_one", &replay_one, py::arg("index"), ReleaseGil())
      .def("size", [](const Recording& recording) { return recording.calls->size(); });
  m.def("copy_columns", &copy_columns, py::arg("source"), py::arg("source_stride"), py::arg("target"),
        py::arg("target_stride"), py::arg("width"), py::arg("rows"), ReleaseGil());
  m.def("copy_rows", &copy_rows, py::arg("table"), py::arg("table_rows"), py::arg("width"), py::arg("ids"),
        py::arg("count"), py::arg("target"), ReleaseGil());
  m.def("widen", &widen, py::arg("source"), py::arg("dtype"), py::arg("count"), py::arg("target"), ReleaseGil());
}

}  // namespace hydra

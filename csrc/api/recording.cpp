// Entry points of recordings: begun and ended by one thread, replayed by any.
#include "api/recording.h"

#include <cstring>
#include <memory>

#include "api/api.h"
#include "check.h"

namespace hydra {
namespace {

namespace py = pybind11;

struct Recording {
  std::unique_ptr<Calls> calls = std::make_unique<Calls>();
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
      .def("replay", &replay, ReleaseGil())
      .def("replay_one", &replay_one, py::arg("index"), ReleaseGil())
      .def("size", [](const Recording& recording) { return recording.calls->size(); });
  m.def("copy_columns", &copy_columns, py::arg("source"), py::arg("source_stride"), py::arg("target"),
        py::arg("target_stride"), py::arg("width"), py::arg("rows"), ReleaseGil());
}

}  // namespace hydra

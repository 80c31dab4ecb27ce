// Entry points of recordings: begun and ended by one thread, replayed by any.
#include "api/recording.h"

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
}

}  // namespace hydra

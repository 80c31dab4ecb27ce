// Words in memory that two processes map: one writes a word, the other reads it, both in one order with what they do to
// the memory around it. Addresses are the caller's duty (hydra_engine/backend/cpu/shared_memory.py).
//
// The owner of blocks stores "gone" and then overwrites them; a reader copies them, then loads the word. With a full
// fence on both sides a copy that saw one byte of the new content also loads the new word. A sequentially consistent
// store or load alone would not do: it does not hold back plain accesses that follow or precede it on every processor.
#include "api/api.h"
#include "check.h"

namespace hydra {
namespace {

uint64_t* word_at(Address address) {
  HYDRA_CHECK(address != 0 && address % sizeof(uint64_t) == 0, "address: expected a multiple of 8, got ", address);
  return pointer<uint64_t>(address);
}

void store_word(Address address, uint64_t word) {
  __atomic_store_n(word_at(address), word, __ATOMIC_SEQ_CST);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

uint64_t load_word(Address address) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  return __atomic_load_n(word_at(address), __ATOMIC_SEQ_CST);
}

}  // namespace

void register_shared_words(pybind11::module_& m) {
  m.def("store_word", &store_word, pybind11::arg("address"), pybind11::arg("word"));
  m.def("load_word", &load_word, pybind11::arg("address"));
}

}  // namespace hydra

// Recordings of native calls, replayed without Python: while a thread records, each of its calls runs and is kept.
#pragma once

#include <functional>
#include <utility>
#include <vector>

namespace hydra {

// Addresses in the calls must stay valid; each replay reads the contents again.
using Calls = std::vector<std::function<void()>>;

// The calling thread's recording; null: it does not record.
Calls*& recorded_calls();

// Runs `call` and, while the thread records, keeps it. `call` captures by value, never takes the GIL, and checks the
// contents that it reads.
template <class Call>
void perform(Call&& call) {
  call();
  if (Calls* calls = recorded_calls()) calls->emplace_back(std::forward<Call>(call));
}

}  // namespace hydra

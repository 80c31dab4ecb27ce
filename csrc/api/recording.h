// Calls that are made again without Python: while a thread records, every call of its is made and kept.
#pragma once

#include <functional>
#include <utility>
#include <vector>

namespace hydra {

// Addresses in the calls must stay valid; each replay reads the contents again.
using Calls = std::vector<std::function<void()>>;

// The calling thread's recording; null: it does not record.
Calls*& recorded_calls();

// `call` holds all that it needs by value, takes no lock of Python and checks the contents of what it reads itself.
template <class Call>
void perform(Call&& call) {
  call();
  if (Calls* calls = recorded_calls()) calls->emplace_back(std::forward<Call>(call));
}

}  // namespace hydra

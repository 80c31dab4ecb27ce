// The activations that linear layers and gated products offer; the numbers are part of the Python interface.
#pragma once

#include "check.h"

namespace hydra {

enum class Activation : int { none = 0, silu = 1, gelu = 2, gelu_tanh = 3, quick_gelu = 4 };

inline Activation activation_from_int(int value) {
  HYDRA_CHECK(value >= 0 && value <= 4, "act: expected 0 to 4, got ", value);
  return static_cast<Activation>(value);
}

}  // namespace hydra

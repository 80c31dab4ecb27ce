// Mixtures of experts: the choice of experts by their logits, and the weighted sum of the chosen ones' outputs. A
// token's result depends on that token alone; its products have the bits of cpu/linear and cpu/quantized.
#pragma once

#include <cstdint>
#include <variant>

#include "cpu/activation_kind.h"
#include "cpu/linear/linear.h"
#include "cpu/quantized/quantized.h"
#include "dtype.h"

namespace hydra {

struct RouteCall {
  const void* logits = nullptr;  // [rows, num_experts] of dtype
  int64_t stride = 0;            // elements between rows
  const void* shared = nullptr;  // [rows, 1] of dtype, or null
  int64_t shared_stride = 0;
  int64_t rows = 0;
  int64_t num_experts = 0;
  int64_t chosen = 0;  // of each row, without the shared one
  bool renormalise = false;
  DType dtype = DType::f32;
  int32_t* experts = nullptr;  // [rows, chosen, with a shared one + 1]
  float* weights = nullptr;
};

void route(const RouteCall& call);

// A weight of the first expert; those of the others follow at a distance of num_bytes().
using ExpertMatrix = std::variant<PackedWeight, PackedQuantized>;

struct PackedExperts {
  ExpertMatrix gate_up;  // [2 * inner, width]
  ExpertMatrix down;     // [width, inner]
  int64_t num_experts = 0;

  int64_t width() const { return std::visit([](const auto& weight) { return weight.num_out; }, down); }
  int64_t inner() const { return std::visit([](const auto& weight) { return weight.num_in; }, down); }
};

struct ExpertsCall {
  PackedExperts weights;
  const void* x = nullptr;  // [rows, width] of dtype
  int64_t x_stride = 0;     // elements between rows
  int64_t rows = 0;
  int64_t chosen = 0;
  const int32_t* experts = nullptr;  // [rows, chosen], -1 for none; checked before anything is written
  const float* factors = nullptr;    // [rows, chosen]
  void* out = nullptr;               // [rows, width] of dtype
  Activation act = Activation::none;
  DType dtype = DType::f32;
};

void run_experts(const ExpertsCall& call);

}  // namespace hydra

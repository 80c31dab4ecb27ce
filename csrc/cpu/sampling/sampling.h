// Sampling in float64, row by row: biases, penalties and masks, draws from filtered distributions, and what log
// probabilities are computed from. The rules are those of hydra_engine/worker/language/sampler.py. Row i of a result
// depends on row i of the input alone.
#pragma once

#include <cstdint>

namespace hydra {

// Rows of logits, `wide`: float64, else float32. `stride` counts elements between rows.
struct LogitRows {
  const void* data = nullptr;
  int64_t stride = 0;
  int64_t rows = 0;
  int64_t columns = 0;  // at least 1
  bool wide = false;
};

struct SampleCall {
  LogitRows logits;
  const double* temperatures = nullptr;  // [rows], 0: the first of the largest logits
  const int32_t* top_k = nullptr;        // [rows], 0: all
  const double* top_p = nullptr;
  const double* min_p = nullptr;
  const double* numbers = nullptr;       // [rows] in [0, 1): the point of the cumulative distribution
  int64_t* tokens = nullptr;             // [rows], 0 for a row that is not finite
  bool* finite = nullptr;                // [rows]
};

void sample_rows(const SampleCall& call);

// Biases of row i are entries [bias_begins[i], bias_ends[i]). A count is 2 * (times in the output) + (1 if in the
// prompt). Indices of -1: no penalties, no mask.
struct AdjustCall {
  LogitRows logits;
  const int32_t* bias_begins = nullptr;
  const int32_t* bias_ends = nullptr;
  const int32_t* bias_ids = nullptr;
  const double* bias_values = nullptr;
  const double* penalties = nullptr;  // [rows, 3]: repetition, frequency, presence
  const int32_t* counted = nullptr;   // [rows]: row of `counts`
  const int32_t* counts = nullptr;    // [num_counted, columns]
  const int32_t* masked = nullptr;    // [rows]: row of `masks`
  const uint32_t* masks = nullptr;    // [num_masked, ceil(columns / 32)], a bit per token that is allowed
  int64_t num_biases = 0, num_counted = 0, num_masked = 0;
  void* out = nullptr;  // [rows, columns], of the logits' type
};

void adjust_rows(const AdjustCall& call);

struct ScoreCall {
  LogitRows logits;
  const int64_t* tokens = nullptr;   // [rows]
  const int32_t* num_top = nullptr;  // [rows], -1: nothing is written
  int64_t max_top = 0;
  void* numbers = nullptr;    // [rows, 3 + max_top], of the logits' type: chosen, largest, sum of exp, largest ones
  int32_t* places = nullptr;  // [rows, 1 + max_top]: rank of the token, ids of the largest ones
};

void score_rows(const ScoreCall& call);

}  // namespace hydra

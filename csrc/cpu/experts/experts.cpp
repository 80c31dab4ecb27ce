// The outputs of experts. Pairs (token, expert) are sorted by expert, so that the rows of an expert lie behind one
// another; one parallel region multiplies the rows of all experts with gate and up, a second one with down.
#include "cpu/experts/experts.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "check.h"
#include "cpu/elementwise/elementwise.h"
#include "cpu/linear/parts.h"
#include "cpu/scratch.h"
#include "cpu/thread_pool.h"

namespace hydra {
namespace {

// The pairs [begin, end) of an expert that some token chose.
struct Group {
  int64_t expert, begin, end;

  int64_t rows() const { return end - begin; }
};

struct Pairs {
  std::vector<Group> groups;    // by expert
  std::vector<int64_t> tokens;  // of each pair
  std::vector<int64_t> places;  // the pair of entry j of token t at t * chosen + j; -1: none

  int64_t count() const { return static_cast<int64_t>(tokens.size()); }
};

Pairs sort_pairs(const ExpertsCall& call) {
  const int64_t entries = call.rows * call.chosen;
  std::vector<int64_t> next(static_cast<size_t>(call.weights.num_experts) + 1);
  for (int64_t entry = 0; entry < entries; ++entry) {
    if (call.experts[entry] >= 0) ++next[call.experts[entry] + 1];
  }
  Pairs pairs;
  for (int64_t expert = 0; expert < call.weights.num_experts; ++expert) {
    const int64_t begin = next[expert];
    next[expert + 1] += begin;
    if (next[expert + 1] > begin) pairs.groups.push_back({expert, begin, next[expert + 1]});
  }
  pairs.tokens.resize(static_cast<size_t>(next.back()));
  pairs.places.resize(static_cast<size_t>(entries));
  for (int64_t entry = 0; entry < entries; ++entry) {
    const int32_t expert = call.experts[entry];
    pairs.places[entry] = expert < 0 ? -1 : next[expert]++;
    if (expert >= 0) pairs.tokens[pairs.places[entry]] = entry / call.chosen;
  }
  return pairs;
}

// Working memory of a thread that calls, and of one that computes parts.
struct Memory {
  Scratch x, gate_up, inner, numbers, groups, outputs;
};

Memory& memory() {
  static thread_local Memory own;
  return own;
}

// Rows that are multiplied: that of a pair at its place, or one row for all.
struct Rows {
  const char* x = nullptr;  // of dtype, `stride` elements apart
  int64_t stride = 0;
  bool is_one = false;
  DType dtype = DType::f32;
  QuantizedRows quantized;  // the same as bytes, for quantised weights

  int64_t first(const Group& group) const { return is_one ? 0 : group.begin; }
};

// A rectangle of an expert's product: rows [begin, end) of the group, and panels.
struct Target {
  char* out = nullptr;  // of the group's first row and the first panel
  int64_t stride = 0;
  DType dtype = DType::f32;
};

void multiply(const PackedWeight& first, const Rows& rows, const Group& group, const LinearPart& part,
              const Target& target) {
  LinearCall call;
  call.weight = first;
  call.weight.data = static_cast<const char*>(first.data) + group.expert * first.num_bytes() +
                     part.panel_begin * first.panel_elements() * element_size(first.dtype);
  call.weight.num_out -= part.panel_begin * kPanel;
  call.x = rows.x + rows.first(group) * rows.stride * element_size(rows.dtype);
  call.x_stride = rows.stride;
  call.rows = group.rows();
  call.out = target.out;
  call.out_stride = target.stride;
  call.out_dtype = target.dtype;
  linear_part(call, {part.row_begin, part.row_end, 0, part.panel_end - part.panel_begin});
}

void multiply(const PackedQuantized& first, const Rows& rows, const Group& group, const LinearPart& part,
              const Target& target) {
  QuantizedCall call;
  call.weight = first;
  call.weight.data = static_cast<const char*>(first.data) + group.expert * first.num_bytes() +
                     part.panel_begin * first.panel_bytes();
  call.weight.num_out -= part.panel_begin * kPanel;
  call.rows = rows_from(rows.quantized, first, rows.first(group));
  LinearCall& result = call.result;
  result.weight = {nullptr, nullptr, call.weight.num_out, first.num_in, rows.dtype};
  result.rows = group.rows();
  result.out = target.out;
  result.out_stride = target.stride;
  result.out_dtype = target.dtype;
  quantized_part(call, {part.row_begin, part.row_end, 0, part.panel_end - part.panel_begin});
}

// Calls row_of(pair) for the address of each of `count` rows, and lets `rows` have their bytes.
template <class RowOf>
void quantize(const PackedQuantized& weight, int64_t count, Rows& rows, RowOf&& row_of) {
  QuantizedCall call;
  call.weight = weight;
  call.result.weight = {nullptr, nullptr, weight.num_out, weight.num_in, rows.dtype};
  call.result.rows = count;
  reserve_rows(call, memory().numbers, memory().groups);
  for_quantized_rows(call, [&](int64_t begin, int64_t end) {
    QuantizedCall one = call;  // a row at its own address
    for (int64_t row = begin; row < end; ++row) {
      one.result.x = row_of(row);
      quantize_rows(one, row, row + 1);
    }
  });
  rows.quantized = call.rows;
}

// The rows of x that gate and up multiply.
Rows rows_of_x(const ExpertsCall& call, const Pairs& pairs) {
  const int64_t size = element_size(call.dtype), bytes = call.weights.width() * size;
  const auto token_row = [&](int64_t token) { return static_cast<const char*>(call.x) + token * call.x_stride * size; };
  Rows rows;
  rows.dtype = call.dtype;
  rows.is_one = call.rows == 1 && pairs.count() == static_cast<int64_t>(pairs.groups.size());
  if (const auto* weight = std::get_if<PackedQuantized>(&call.weights.gate_up)) {
    quantize(*weight, rows.is_one ? 1 : pairs.count(), rows,
             [&](int64_t pair) { return token_row(pairs.tokens[pair]); });
    return rows;
  }
  rows.x = static_cast<const char*>(call.x);
  rows.stride = call.x_stride;
  if (rows.is_one) return rows;
  char* copy = static_cast<char*>(memory().x.reserve(pairs.count() * bytes));
  constexpr int64_t kBytesPerThread = 1 << 17;
  parallel_for(pairs.count(), ceil_div(kBytesPerThread, std::max<int64_t>(1, bytes)), [&](int64_t begin, int64_t end) {
    for (int64_t pair = begin; pair < end; ++pair) {
      std::memcpy(copy + pair * bytes, token_row(pairs.tokens[pair]), static_cast<size_t>(bytes));
    }
  });
  rows.x = copy;
  rows.stride = call.weights.width();
  return rows;
}

int threads_for(const ExpertMatrix& matrix, const Pairs& pairs) {
  return std::visit(
      [&](const auto& weight) {
        const int64_t bytes = weight.num_bytes() * static_cast<int64_t>(pairs.groups.size());
        return useful_threads(bytes, pairs.count() * weight.num_out * weight.num_in);
      },
      matrix);
}

// Calls multiply(group, begin, end) for panels of all groups, each on one thread: several parts per thread, so that one
// that loses its core holds up little, but long ones, since memory is read fastest in the order of its addresses.
template <class Multiply>
void for_panels(const Pairs& pairs, int threads, int64_t panels, Multiply&& multiply) {
  constexpr int64_t kPanelsPerPart = 8, kPartsPerThread = 8;
  const int64_t groups = static_cast<int64_t>(pairs.groups.size());
  const int64_t most = std::max<int64_t>(1, panels / kPanelsPerPart);
  const int64_t across = threads == 1 ? 1 : std::min(most, ceil_div(kPartsPerThread * threads, groups));
  run_parts(static_cast<int>(groups * across), [&](int part) {
    const int64_t piece = part % across;
    multiply(pairs.groups[part / across], panels * piece / across, panels * (piece + 1) / across);
  });
}

void multiply(const ExpertMatrix& matrix, const Rows& rows, const Group& group, int64_t begin, int64_t end,
              const Target& target) {
  std::visit([&](const auto& weight) { multiply(weight, rows, group, {0, group.rows(), begin, end}, target); }, matrix);
}

// Fills gate_up [pairs, 2 * inner] of the call's dtype.
void multiply_gate_up(const ExpertsCall& call, const Pairs& pairs, const Rows& rows, char* gate_up) {
  const int64_t width = 2 * call.weights.inner(), size = element_size(call.dtype);
  const int threads = threads_for(call.weights.gate_up, pairs);
  for_panels(pairs, threads, ceil_div(width, kPanel), [&](const Group& group, int64_t begin, int64_t end) {
    const Target target{gate_up + (group.begin * width + begin * kPanel) * size, width, call.dtype};
    multiply(call.weights.gate_up, rows, group, begin, end, target);
  });
}

// The rows that down multiplies: act(gate) * up.
Rows rows_of_inner(const ExpertsCall& call, const Pairs& pairs, const char* gate_up) {
  const int64_t inner = call.weights.inner(), size = element_size(call.dtype);
  char* out = static_cast<char*>(memory().inner.reserve(pairs.count() * inner * size));
  RowsCall gated;
  gated.x = gate_up;
  gated.x_stride = 2 * inner;
  gated.out = out;
  gated.rows = pairs.count();
  gated.columns = inner;
  gated.act = call.act;
  gated.dtype = call.dtype;
  run_rows(RowsOp::act_and_mul, gated);
  Rows rows;
  rows.dtype = call.dtype;
  rows.x = out;
  rows.stride = inner;
  if (const auto* weight = std::get_if<PackedQuantized>(&call.weights.down)) {
    quantize(*weight, pairs.count(), rows, [&](int64_t pair) { return out + pair * inner * size; });
  }
  return rows;
}

// Columns [begin, begin + columns) of rows [first_row, last_row) of the result: outputs [pairs, stride] times their
// factors, in the order of entries.
template <class T>
void add_outputs(const ExpertsCall& call, const Pairs& pairs, int64_t first_row, int64_t last_row,
                 const float* outputs, int64_t stride, int64_t begin, int64_t columns) {
  for (int64_t token = first_row; token < last_row; ++token) {
    T* out = static_cast<T*>(call.out) + token * call.weights.width() + begin;
    for (int64_t first = 0; first < columns; first += kPanel) {
      float sums[kPanel] = {};
      for (int64_t entry = token * call.chosen; entry < (token + 1) * call.chosen; ++entry) {
        if (pairs.places[entry] < 0) continue;
        const float factor = call.factors[entry];
        const float* output = outputs + pairs.places[entry] * stride + first;
        for (int column = 0; column < kPanel; ++column) sums[column] += factor * output[column];
      }
      const int64_t count = std::min<int64_t>(kPanel, columns - first);
      for (int64_t column = 0; column < count; ++column) out[first + column] = from_float<T>(sums[column]);
    }
  }
}

// For few pairs, in two steps: all outputs, and then their sums.
void multiply_down_of_few(const ExpertsCall& call, const Pairs& pairs, const Rows& rows, int threads) {
  const int64_t width = call.weights.width(), panels = ceil_div(width, kPanel), stride = panels * kPanel;
  float* outputs = static_cast<float*>(memory().outputs.reserve(pairs.count() * stride * 4));
  for_panels(pairs, threads, panels, [&](const Group& group, int64_t begin, int64_t end) {
    float* out = outputs + group.begin * stride + begin * kPanel;
    multiply(call.weights.down, rows, group, begin, end, {reinterpret_cast<char*>(out), stride, DType::f32});
  });
  constexpr int64_t kNumbersPerThread = 1 << 15;
  parallel_for(call.rows, ceil_div(kNumbersPerThread, width * call.chosen), [&](int64_t begin, int64_t end) {
    dispatch(call.dtype, [&](auto type) {
      add_outputs<decltype(type)>(call, pairs, begin, end, outputs, stride, 0, width);
    });
  });
}

// For many pairs, whose outputs would need much memory: parts are panels of the result, for which a thread multiplies
// the rows of all experts.
void multiply_down_of_many(const ExpertsCall& call, const Pairs& pairs, const Rows& rows, int threads) {
  const int64_t width = call.weights.width(), panels = ceil_div(width, kPanel);
  constexpr int64_t kPanelsPerPart = 4, kPartsPerThread = 8, kOutputBytes = 4 << 20;
  const int64_t wanted = std::min(panels / kPanelsPerPart, kPartsPerThread * threads);
  const int64_t bytes = pairs.count() * panels * kPanel * 4;
  const int64_t parts = std::clamp<int64_t>(std::max(wanted, bytes / kOutputBytes), 1, panels);
  run_parts(static_cast<int>(parts), [&](int part) {
    const int64_t begin = panels * part / parts, end = panels * (part + 1) / parts, stride = (end - begin) * kPanel;
    float* outputs = static_cast<float*>(memory().outputs.reserve(pairs.count() * stride * 4));
    for (const Group& group : pairs.groups) {
      char* out = reinterpret_cast<char*>(outputs + group.begin * stride);
      multiply(call.weights.down, rows, group, begin, end, {out, stride, DType::f32});
    }
    dispatch(call.dtype, [&](auto type) {
      const int64_t columns = std::min(end * kPanel, width) - begin * kPanel;
      add_outputs<decltype(type)>(call, pairs, 0, call.rows, outputs, stride, begin * kPanel, columns);
    });
  });
}

void multiply_down(const ExpertsCall& call, const Pairs& pairs, const Rows& rows) {
  constexpr int64_t kFewBytes = 2 << 20;  // of outputs, which stay in the caches
  const int threads = threads_for(call.weights.down, pairs);
  const bool few = pairs.count() * call.weights.width() * 4 <= kFewBytes;
  return few ? multiply_down_of_few(call, pairs, rows, threads) : multiply_down_of_many(call, pairs, rows, threads);
}

void run_chunk(const ExpertsCall& call) {
  const Pairs pairs = sort_pairs(call);
  const int64_t size = element_size(call.dtype);
  if (pairs.groups.empty()) {
    std::memset(call.out, 0, static_cast<size_t>(call.rows * call.weights.width() * size));
    return;
  }
  const int64_t bytes = pairs.count() * 2 * call.weights.inner() * size;
  char* gate_up = static_cast<char*>(memory().gate_up.reserve(bytes));
  multiply_gate_up(call, pairs, rows_of_x(call, pairs), gate_up);
  multiply_down(call, pairs, rows_of_inner(call, pairs, gate_up));
}

}  // namespace

void run_experts(const ExpertsCall& call) {
  for (int64_t entry = 0; entry < call.rows * call.chosen; ++entry) {
    const int32_t expert = call.experts[entry];
    HYDRA_CHECK(expert >= -1 && expert < call.weights.num_experts, "experts: expected -1 to ",
                call.weights.num_experts - 1, ", got ", expert);
  }
  constexpr int64_t kMostPairs = 8192;  // bounds the memory of their rows
  const int64_t most = std::max<int64_t>(1, kMostPairs / std::max<int64_t>(1, call.chosen));
  const int64_t size = element_size(call.dtype);
  for (int64_t begin = 0; begin < call.rows; begin += most) {
    ExpertsCall chunk = call;
    chunk.rows = std::min(most, call.rows - begin);
    chunk.x = static_cast<const char*>(call.x) + begin * call.x_stride * size;
    chunk.out = static_cast<char*>(call.out) + begin * call.weights.width() * size;
    chunk.experts = call.experts + begin * call.chosen;
    chunk.factors = call.factors + begin * call.chosen;
    run_chunk(chunk);
  }
}

}  // namespace hydra

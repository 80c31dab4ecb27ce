// Entry points of attention. A plan is made, and its contents are checked, once per step, and used by every layer; what
// depends on the cache (that the block ids exist) is checked at the plan's first use with it.
#include "cpu/attention/attention.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <vector>

#include "api/api.h"
#include "api/recording.h"
#include "check.h"
#include "cpu/cache/cache.h"

namespace hydra {
namespace {

namespace py = pybind11;

// Memory stays with the Python tensors: cu_q [B + 1], num_context [B], block_tables [B, max_blocks], all int32.
struct Plan {
  const int32_t* cu_q;
  const int32_t* num_context;
  const int32_t* block_tables;
  int64_t batch;
  int64_t max_blocks;
  int64_t checked_blocks = -1;  // the numbers of blocks and slots that block_tables was checked against
  int64_t checked_block_size = -1;
  int32_t max_q = 0;  // longest query
  int32_t max_context = 0;

  void read() {
    HYDRA_CHECK(cu_q[0] == 0, "cu_q: expected to start with 0, got ", cu_q[0]);
    for (int64_t row = 0; row < batch; ++row) {
      const int32_t num_q = cu_q[row + 1] - cu_q[row];
      HYDRA_CHECK(num_q >= 0 && num_q <= num_context[row], "num_context: row ", row, " has ", num_q,
                  " queries, expected 0 to num_context of them, got ", num_context[row]);
      max_q = std::max(max_q, num_q);
      max_context = std::max(max_context, num_context[row]);
    }
  }

  void check(const CacheView& cache) {
    if (checked_blocks == cache.num_blocks && checked_block_size == cache.block_size) return;
    for (int64_t row = 0; row < batch; ++row) {
      const int64_t used = (num_context[row] + cache.block_size - 1) / cache.block_size;
      HYDRA_CHECK(used <= max_blocks, "block_tables: row ", row, " needs ", used, " blocks of ", cache.block_size,
                  " slots, got ", max_blocks);
      for (int64_t i = 0; i < used; ++i) {
        const int32_t id = block_tables[row * max_blocks + i];
        HYDRA_CHECK(id >= 0 && id < cache.num_blocks, "block_tables: expected 0 to ", cache.num_blocks - 1, ", got ",
                    id, " at [", row, ", ", i, "]");
      }
    }
    checked_blocks = cache.num_blocks;
    checked_block_size = cache.block_size;
  }
};

// Makes a plan. Null addresses make an empty one, which `become` fills from another plan.
Plan make_plan(Address cu_q, Address num_context, Address block_tables, int64_t batch, int64_t max_blocks) {
  Plan plan{pointer<int32_t>(cu_q), pointer<int32_t>(num_context), pointer<int32_t>(block_tables), batch, max_blocks};
  if (cu_q) plan.read();
  return plan;
}

void check_heads(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, float scale) {
  HYDRA_CHECK(head_dim >= 1 && head_dim <= kMaxHeadDim, "q: expected a head dim of 1 to ", kMaxHeadDim, ", got ",
              head_dim);
  HYDRA_CHECK(num_heads >= 1 && num_heads % num_kv_heads == 0, "q: expected a multiple of ", num_kv_heads,
              " heads, got ", num_heads);
  HYDRA_CHECK(scale > 0, "scale: expected a positive number, got ", scale);
}

void attend_paged(Plan& plan, const CacheView& cache, int64_t layer, Address q, int64_t q_stride, int64_t num_heads,
                  int64_t tokens, Address out, float scale) {
  HYDRA_CHECK(layer >= 0 && layer < cache.num_layers, "layer: expected 0 to ", cache.num_layers - 1, ", got ", layer);
  HYDRA_CHECK(cache.num_tensors == 2, "cache: expected 2 tensors per layer, got ", cache.num_tensors);
  HYDRA_CHECK(tokens == plan.cu_q[plan.batch], "q: expected ", plan.cu_q[plan.batch], " tokens as cu_q says, got ",
              tokens);
  check_heads(num_heads, cache.num_heads, cache.head_dim, scale);
  plan.check(cache);
  std::vector<Sequence> sequences(static_cast<size_t>(plan.batch));
  for (int64_t row = 0; row < plan.batch; ++row) {
    Sequence& sequence = sequences[static_cast<size_t>(row)];
    sequence.query_begin = plan.cu_q[row];
    sequence.num_queries = plan.cu_q[row + 1] - plan.cu_q[row];
    sequence.num_keys = plan.num_context[row];
    sequence.first_position = sequence.num_keys - sequence.num_queries;
    sequence.k = cache.plane(layer, 0);
    sequence.v = cache.plane(layer, 1);
    sequence.blocks = plan.block_tables + row * plan.max_blocks;
    sequence.block_size = cache.block_size;
    sequence.block_bytes = cache.block_bytes();
    sequence.k_row_bytes = sequence.v_row_bytes = cache.row_bytes();
    sequence.scales_offset = cache.scales_offset();
  }
  AttentionCall call;
  call.q = pointer<void>(q);
  call.q_stride = q_stride;
  call.out = pointer<void>(out);
  call.num_heads = num_heads;
  call.num_kv_heads = cache.num_heads;
  call.head_dim = cache.head_dim;
  call.scale = scale;
  call.dtype = cache.dtype;
  call.quantized = cache.quantized;
  call.sequences = sequences.data();
  call.num_sequences = plan.batch;
  attention(call);
}

// A replayed call reads the contents that the plan has then.
void paged(Plan& plan, const CacheView& cache, int64_t layer, Address q, int64_t q_stride, int64_t num_heads,
           int64_t tokens, Address out, float scale) {
  perform([=, &plan] { attend_paged(plan, cache, layer, q, q_stride, num_heads, tokens, out, scale); });
}

void packed(Address q, int64_t q_stride, Address k, int64_t k_stride, Address v, int64_t v_stride, Address out,
            const std::vector<int64_t>& cu_seqlens, int64_t num_heads, int64_t head_dim, float scale, int dtype) {
  HYDRA_CHECK(!recorded_calls(), "attention_packed: expected to be outside of a recording");
  check_heads(num_heads, num_heads, head_dim, scale);
  HYDRA_CHECK(!cu_seqlens.empty(), "cu_seqlens: expected at least one entry, got none");
  AttentionCall call;
  call.dtype = dtype_from_int(dtype);
  const int64_t size = element_size(call.dtype);
  std::vector<Sequence> sequences(cu_seqlens.size() - 1);
  for (size_t i = 0; i < sequences.size(); ++i) {
    Sequence& sequence = sequences[i];
    HYDRA_CHECK(cu_seqlens[i + 1] >= cu_seqlens[i], "cu_seqlens: expected rising bounds, got ", cu_seqlens[i],
                " before ", cu_seqlens[i + 1]);
    sequence.query_begin = cu_seqlens[i];
    sequence.num_queries = sequence.num_keys = cu_seqlens[i + 1] - cu_seqlens[i];
    sequence.k_row_bytes = k_stride * size;
    sequence.v_row_bytes = v_stride * size;
    sequence.k = pointer<char>(k) + cu_seqlens[i] * sequence.k_row_bytes;
    sequence.v = pointer<char>(v) + cu_seqlens[i] * sequence.v_row_bytes;
  }
  call.q = pointer<void>(q);
  call.q_stride = q_stride;
  call.out = pointer<void>(out);
  call.num_heads = call.num_kv_heads = num_heads;
  call.head_dim = head_dim;
  call.scale = scale;
  call.causal = false;
  call.sequences = sequences.data();
  call.num_sequences = static_cast<int64_t>(sequences.size());
  attention(call);
}

}  // namespace

void register_attention(py::module_& m) {
  py::class_<Plan>(m, "AttentionPlan")
      .def(py::init(&make_plan), py::arg("cu_q"), py::arg("num_context"), py::arg("block_tables"), py::arg("batch"),
           py::arg("max_blocks"))
      .def_readonly("max_q", &Plan::max_q)
      .def_readonly("max_context", &Plan::max_context)
      .def("become", [](Plan& plan, const Plan& other) { plan = other; }, py::arg("other"));
  m.def("attention_paged", &paged, py::arg("plan"), py::arg("cache"), py::arg("layer"), py::arg("q"),
        py::arg("q_stride"), py::arg("num_heads"), py::arg("tokens"), py::arg("out"), py::arg("scale"), ReleaseGil());
  m.def("attention_packed", &packed, py::arg("q"), py::arg("q_stride"), py::arg("k"), py::arg("k_stride"), py::arg("v"),
        py::arg("v_stride"), py::arg("out"), py::arg("cu_seqlens"), py::arg("num_heads"), py::arg("head_dim"),
        py::arg("scale"), py::arg("dtype"), ReleaseGil());
}

}  // namespace hydra

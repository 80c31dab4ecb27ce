// Entry points of the paged caches: methods of one object per cache, so that a call passes few integers.
// Slots and rows are checked here, before anything is written. Addresses, shapes and dtypes of the other arguments are
// the Python wrapper's duty (hydra_engine/backend/cpu/ops.py).
#include "cpu/cache/cache.h"

#include "api/api.h"
#include "api/cache_checks.h"
#include "api/recording.h"

namespace hydra {
namespace {

namespace py = pybind11;

// Calls that move fewer bytes keep the GIL: getting it back from another thread would take longer than the call.
constexpr int64_t kReleaseBytes = 1 << 18;

template <class Fn>
void run(int64_t bytes, Fn&& fn) {
  if (bytes < kReleaseBytes) return perform(fn);
  py::gil_scoped_release release;
  perform(fn);
}

// Strides count elements; the second source is ignored if the cache has one tensor.
void write(const CacheView& cache, int64_t layer, Address first, int64_t first_stride, Address second,
           int64_t second_stride, Address slots, int64_t rows) {
  check_layer(cache, layer);
  WriteCall call;
  call.cache = cache;
  call.layer = layer;
  const int64_t size = element_size(cache.dtype);
  call.sources[0] = {pointer<char>(first), first_stride * size};
  call.sources[1] = {pointer<char>(second), second_stride * size};
  call.slots = pointer<int64_t>(slots);
  call.rows = rows;
  run(rows * cache.row_bytes() * cache.num_tensors, [call] {
    check_range("slots", call.slots, call.rows, -1, call.cache.num_slots());
    write_rows(call);
  });
}

void rope(const CacheView& cache, int64_t layer, Address q, int64_t q_stride, int64_t num_q_heads, Address k,
          int64_t k_stride, Address v, int64_t v_stride, Address cos, int64_t cos_stride, Address sin,
          int64_t sin_stride, Address slots, int64_t tokens, Address out, Address q_norm, Address k_norm, float eps) {
  check_layer(cache, layer);
  check_rope_cache(cache);
  RopeCall call;
  call.q = pointer<void>(q);
  call.k = pointer<void>(k);
  call.v = pointer<void>(v);
  call.q_stride = q_stride;
  call.k_stride = k_stride;
  call.v_stride = v_stride;
  call.cos = pointer<float>(cos);
  call.sin = pointer<float>(sin);
  call.cos_stride = cos_stride;
  call.sin_stride = sin_stride;
  call.q_norm = pointer<void>(q_norm);
  call.k_norm = pointer<void>(k_norm);
  call.eps = eps;
  call.out = pointer<void>(out);
  call.num_q_heads = num_q_heads;
  call.cache = cache;
  call.layer = layer;
  call.slots = pointer<int64_t>(slots);
  call.tokens = tokens;
  run(tokens * (num_q_heads + 2 * cache.num_heads) * cache.head_dim * element_size(cache.dtype), [call] {
    check_range("slots", call.slots, call.tokens, -1, call.cache.num_slots());
    rope_and_write(call);
  });
}

void gather(const CacheView& cache, int64_t layer, int64_t tensor, Address slots, int64_t rows, Address out) {
  check_layer(cache, layer);
  check_tensor(cache, tensor);
  run(rows * cache.row_bytes(), [=] {
    check_range("slots", pointer<int64_t>(slots), rows, -1, cache.num_slots());
    gather_rows(cache, layer, tensor, pointer<int64_t>(slots), rows, pointer<char>(out));
  });
}

void merge(const CacheView& cache, int64_t layer, Address slots, Address targets, int64_t rows, Address hidden,
           int64_t hidden_rows, bool accumulate) {
  check_layer(cache, layer);
  MergeCall call;
  call.cache = cache;
  call.layer = layer;
  call.slots = pointer<int64_t>(slots);
  call.targets = pointer<int64_t>(targets);
  call.rows = rows;
  call.hidden = pointer<void>(hidden);
  call.accumulate = accumulate;
  run(rows * cache.row_bytes(), [call, hidden_rows] {
    check_range("slots", call.slots, call.rows, -1, call.cache.num_slots());
    check_range("rows", call.targets, call.rows, 0, hidden_rows);
    merge_rows(call);
  });
}

void copy_to(const CacheView& source, const CacheView& target, Address pairs, int64_t count) {
  const int64_t* ids = pointer<int64_t>(pairs);
  run(count * source.block_bytes(), [=] {
    check_pairs(source, target, ids, count);
    copy_blocks(source, target, ids, count);
  });
}

}  // namespace

void register_cache(py::module_& m) {
  py::class_<CacheView>(m, "CacheDesc")
      .def(py::init(&make_cache), py::arg("data"), py::arg("num_blocks"), py::arg("num_layers"), py::arg("num_tensors"),
           py::arg("block_size"), py::arg("num_heads"), py::arg("head_dim"), py::arg("dtype"), py::arg("quantized") = false)
      .def("write", &write, py::arg("layer"), py::arg("first"), py::arg("first_stride"), py::arg("second"),
           py::arg("second_stride"), py::arg("slots"), py::arg("rows"))
      .def("rope_and_write", &rope, py::arg("layer"), py::arg("q"), py::arg("q_stride"), py::arg("num_q_heads"),
           py::arg("k"), py::arg("k_stride"), py::arg("v"), py::arg("v_stride"), py::arg("cos"), py::arg("cos_stride"),
           py::arg("sin"), py::arg("sin_stride"), py::arg("slots"), py::arg("tokens"), py::arg("out"),
           py::arg("q_norm") = 0, py::arg("k_norm") = 0, py::arg("eps") = 0.0f)
      .def("gather", &gather, py::arg("layer"), py::arg("index"), py::arg("slots"), py::arg("rows"), py::arg("out"))
      .def("merge", &merge, py::arg("layer"), py::arg("slots"), py::arg("targets"), py::arg("rows"), py::arg("hidden"),
           py::arg("hidden_rows"), py::arg("accumulate") = false)
      .def("copy_to", &copy_to, py::arg("target"), py::arg("pairs"), py::arg("count"));
}

}  // namespace hydra

// Entry points of paged caches on a device: the methods of CacheDesc on a stream. Sizes, layers and everything in host
// memory are checked here; slots and rows lie on the device, so the kernels check them (see cuda/device.h). Devices,
// shapes and dtypes of tensors are the Python wrapper's duty (hydra_engine/backend/cuda/cache.py).
#include "cuda/cache.h"

#include "api/api.h"
#include "api/cache_checks.h"
#include "cuda/device.h"
#include "cuda/host.h"

namespace hydra {
namespace {

namespace py = pybind11;

struct CudaCache {
  CacheView view;
  int device = 0;
};

CudaCache make_cuda_cache(Address data, int64_t num_blocks, int64_t num_layers, int64_t num_tensors,
                          int64_t block_size, int64_t num_heads, int64_t head_dim, int dtype, int device) {
  const CacheView view =
      make_cache(data, num_blocks, num_layers, num_tensors, block_size, num_heads, head_dim, dtype);
  // Kernels divide slots as 32-bit numbers.
  HYDRA_CHECK(num_blocks < (int64_t{1} << 31) / block_size, "cache: expected fewer than 2^31 slots, got ", num_blocks,
              " blocks of ", block_size);
  if (device == cuda::kHost) return {view, device};  // allows copies of blocks only: all else needs a device
  cuda::require_device(device);
  if (num_blocks > 0) cuda::check_device_address("cache", data);
  return {view, device};
}

struct NamedAddress {
  const char* name;
  Address address;
};

// Throws if earlier kernels met an index out of range; if synchronous, also checks with the driver that each address is
// on the device.
template <size_t count>
cuda::Target prepare(const CudaCache& cache, Address stream, int64_t rows, const NamedAddress (&addresses)[count]) {
  HYDRA_CHECK(rows >= 0, "rows: expected a count, got ", rows);
  cuda::check_faults(cache.device);
  if (cuda::synchronous() && rows > 0) {
    for (const NamedAddress& named : addresses) {
      if (named.address != 0) cuda::check_device_address(named.name, named.address);
    }
  }
  return {cache.device, stream};
}

void write(const CudaCache& cache, Address stream, int64_t layer, Address first, int64_t first_stride, Address second,
           int64_t second_stride, Address slots, int64_t rows) {
  check_layer(cache.view, layer);
  const auto target = prepare(cache, stream, rows, {{"first", first}, {"second", second}, {"slots", slots}});
  const int64_t size = element_size(cache.view.dtype);
  const RowSource sources[2] = {{pointer<char>(first), first_stride * size},
                                {pointer<char>(second), second_stride * size}};
  cuda::write_rows(target, cache.view, layer, sources, pointer<int64_t>(slots), rows);
}

void rope(const CudaCache& cache, Address stream, int64_t layer, Address q, int64_t q_stride, int64_t num_q_heads,
          Address k, int64_t k_stride, Address v, int64_t v_stride, Address cos, int64_t cos_stride, Address sin,
          int64_t sin_stride, Address slots, int64_t tokens, Address out, Address q_norm, Address k_norm, float eps) {
  check_layer(cache.view, layer);
  check_rope_cache(cache.view);
  const auto target = prepare(cache, stream, tokens,
                              {{"q", q},
                               {"k", k},
                               {"v", v},
                               {"cos", cos},
                               {"sin", sin},
                               {"slots", slots},
                               {"out", out},
                               {"q_norm", q_norm},
                               {"k_norm", k_norm}});
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
  call.cache = cache.view;
  call.layer = layer;
  call.slots = pointer<int64_t>(slots);
  call.tokens = tokens;
  cuda::rope_and_write(target, call);
}

void gather(const CudaCache& cache, Address stream, int64_t layer, int64_t tensor, Address slots, int64_t rows,
            Address out) {
  check_layer(cache.view, layer);
  check_tensor(cache.view, tensor);
  const auto target = prepare(cache, stream, rows, {{"slots", slots}, {"out", out}});
  cuda::gather_rows(target, cache.view, layer, tensor, pointer<int64_t>(slots), rows, pointer<char>(out));
}

void merge(const CudaCache& cache, Address stream, int64_t layer, Address slots, Address targets, int64_t rows,
           Address hidden, int64_t hidden_rows, bool accumulate) {
  check_layer(cache.view, layer);
  const auto target = prepare(cache, stream, rows, {{"slots", slots}, {"rows", targets}, {"hidden", hidden}});
  MergeCall call;
  call.cache = cache.view;
  call.layer = layer;
  call.slots = pointer<int64_t>(slots);
  call.targets = pointer<int64_t>(targets);
  call.rows = rows;
  call.hidden = pointer<void>(hidden);
  call.accumulate = accumulate;
  cuda::merge_rows(target, call, hidden_rows);
}

void copy_to(const CudaCache& source, Address stream, const CudaCache& target, Address pairs, int64_t count) {
  check_pairs(source.view, target.view, pointer<int64_t>(pairs), count);
  const bool over_the_bus = source.device == cuda::kHost || target.device == cuda::kHost;
  const int device = target.device == cuda::kHost ? source.device : target.device;
  HYDRA_CHECK(device != cuda::kHost, "target: expected one of the caches on a device");
  const auto copy = over_the_bus ? cuda::copy_host_blocks : cuda::copy_blocks;
  copy({device, stream}, source.view, target.view, pointer<int64_t>(pairs), count);
}

py::dict probe_as_dict() {
  cuda::Probe found;
  {
    py::gil_scoped_release release;
    found = cuda::probe();
  }
  py::list codes, devices;
  for (const std::string& code : found.codes) codes.append(code);
  for (const cuda::DeviceInfo& info : found.devices) {
    py::dict device;
    device["index"] = info.index;
    device["name"] = info.name;
    device["capability"] = py::make_tuple(info.major, info.minor);
    device["num_sms"] = info.num_sms;
    device["memory_bytes"] = info.memory_bytes;
    device["usable"] = info.usable;
    device["has_mps"] = info.has_mps;
    devices.append(device);
  }
  py::dict result;
  result["status"] = found.status;
  result["problem"] = found.problem;
  result["codes"] = codes;
  result["runtime_version"] = found.runtime_version;
  result["driver_version"] = found.driver_version;
  result["devices"] = devices;
  return result;
}

}  // namespace

void register_cuda_cache(py::module_& m) {
  m.def("cuda_probe", &probe_as_dict);
  m.def("cuda_synchronous", &cuda::synchronous);
  m.def("set_cuda_synchronous", &cuda::set_synchronous, py::arg("on"));
  m.def("cuda_check_faults", &cuda::check_faults, py::arg("device"), ReleaseGil());
  m.def(
      "check_range",
      [](const std::string& name, Address values, int64_t count, int64_t least, int64_t size) {
        check_range(name.c_str(), pointer<int64_t>(values), count, least, size);
      },
      py::arg("name"), py::arg("values"), py::arg("count"), py::arg("least"), py::arg("size"));
  py::class_<CudaCache>(m, "CudaCacheDesc")
      .def(py::init(&make_cuda_cache), py::arg("data"), py::arg("num_blocks"), py::arg("num_layers"),
           py::arg("num_tensors"), py::arg("block_size"), py::arg("num_heads"), py::arg("head_dim"), py::arg("dtype"),
           py::arg("device"), ReleaseGil())
      .def("write", &write, py::arg("stream"), py::arg("layer"), py::arg("first"), py::arg("first_stride"),
           py::arg("second"), py::arg("second_stride"), py::arg("slots"), py::arg("rows"), ReleaseGil())
      .def("rope_and_write", &rope, py::arg("stream"), py::arg("layer"), py::arg("q"), py::arg("q_stride"),
           py::arg("num_q_heads"), py::arg("k"), py::arg("k_stride"), py::arg("v"), py::arg("v_stride"),
           py::arg("cos"), py::arg("cos_stride"), py::arg("sin"), py::arg("sin_stride"), py::arg("slots"),
           py::arg("tokens"), py::arg("out"), py::arg("q_norm") = 0, py::arg("k_norm") = 0, py::arg("eps") = 0.0f,
           ReleaseGil())
      .def("gather", &gather, py::arg("stream"), py::arg("layer"), py::arg("index"), py::arg("slots"), py::arg("rows"),
           py::arg("out"), ReleaseGil())
      .def("merge", &merge, py::arg("stream"), py::arg("layer"), py::arg("slots"), py::arg("targets"), py::arg("rows"),
           py::arg("hidden"), py::arg("hidden_rows"), py::arg("accumulate") = false, ReleaseGil())
      .def("copy_to", &copy_to, py::arg("stream"), py::arg("target"), py::arg("pairs"), py::arg("count"),
           ReleaseGil());
}

}  // namespace hydra

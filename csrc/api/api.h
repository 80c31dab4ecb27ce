// Each file in csrc/api exports one function to bindings.cpp, which adds its entry points to the module.
// Entry points take raw addresses, sizes and strides as integers; they check them, release the GIL and call csrc/cpu.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace hydra {

using Address = std::uintptr_t;
using ReleaseGil = pybind11::call_guard<pybind11::gil_scoped_release>;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

void register_cpu_info(pybind11::module_& m);
void register_linear(pybind11::module_& m);
void register_quantized(pybind11::module_& m);
void register_experts(pybind11::module_& m);
void register_recording(pybind11::module_& m);
void register_elementwise(pybind11::module_& m);
void register_cache(pybind11::module_& m);
void register_attention(pybind11::module_& m);
void register_image(pybind11::module_& m);
void register_cuda_cache(pybind11::module_& m);
void register_cuda_ipc(pybind11::module_& m);
void register_cuda_split(pybind11::module_& m);
void register_delta(pybind11::module_& m);
void register_sampling(pybind11::module_& m);
void register_shared_words(pybind11::module_& m);

}  // namespace hydra

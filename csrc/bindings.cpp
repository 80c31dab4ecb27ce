// The Python module hydra_engine._C. Every subject registers its own entry points, see csrc/api.
#include "api/api.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "Native kernels of hydra_engine. Call them through hydra_engine.backend.";
  hydra::register_cpu_info(m);
  hydra::register_linear(m);
  hydra::register_quantized(m);
  hydra::register_experts(m);
  hydra::register_recording(m);
  hydra::register_elementwise(m);
  hydra::register_cache(m);
  hydra::register_attention(m);
  hydra::register_image(m);
  hydra::register_cuda_cache(m);
  hydra::register_cuda_ipc(m);
  hydra::register_cuda_split(m);
  hydra::register_delta(m);
  hydra::register_sampling(m);
  hydra::register_shared_words(m);
}

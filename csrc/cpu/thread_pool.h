// Threads for the host kernels. Every calling thread owns its own small pool, so two lanes never share one and a lane's
// thread count is set from its own thread. Helper threads start on first use and end with the calling thread.
//
// Work is cut into parts statically, and a part is taken by whichever thread is free first: a helper that the system
// has not scheduled yet never holds up a caller who can do the part itself. Which thread computes a part must therefore
// not matter for the result.
//
// Does not know Python (callers release the GIL) and does not survive fork.
#pragma once

#include <cstdint>
#include <type_traits>

namespace hydra {

// The thread count of the calling thread; 1 until set. n is clamped to at least 1.
int num_threads();
void set_num_threads(int n);

namespace detail {
using PartFn = void (*)(void* context, int part);
void run_parts(int parts, PartFn fn, void* context);
}  // namespace detail

// Calls fn(part) for part in [0, parts), with the threads of the calling thread. An exception of fn reaches the caller.
// Nested calls from inside fn are not allowed.
template <class Fn>
void run_parts(int parts, Fn&& fn) {
  using Plain = std::remove_reference_t<Fn>;
  detail::run_parts(
      parts, [](void* context, int part) { (*static_cast<Plain*>(context))(part); },
      const_cast<void*>(static_cast<const void*>(&fn)));
}

// Calls fn(begin, end) over a static, balanced cut of [0, n) into at most num_threads() ranges of at least `grain`
// items each (so small work stays on the calling thread).
template <class Fn>
void parallel_for(int64_t n, int64_t grain, Fn&& fn) {
  if (n <= 0) return;
  const int64_t most = grain > 1 ? n / grain : n;
  const int threads = num_threads();
  const int parts = most < 2 ? 1 : static_cast<int>(most < threads ? most : threads);
  if (parts == 1) {
    fn(int64_t{0}, n);
    return;
  }
  run_parts(parts, [&](int part) { fn(n * part / parts, n * (part + 1) / parts); });
}

template <class Fn>
void parallel_for(int64_t n, Fn&& fn) {
  parallel_for(n, 1, static_cast<Fn&&>(fn));
}

}  // namespace hydra

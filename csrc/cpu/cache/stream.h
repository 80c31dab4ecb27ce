// Copies that go past the processor's caches: a plain store first reads the line that it overwrites, which a copy of
// whole blocks need not. `python -m bench.migrate` holds them against memcpy.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/isa.h"

#if HYDRA_X86
#include <emmintrin.h>
#endif

namespace hydra {

#if HYDRA_X86

// `finish_streams` must follow on the same thread before another thread or process is notified of the bytes.
inline void stream_copy(char* out, const char* in, int64_t bytes) {
  constexpr int64_t kLine = 64, kTurn = 4 * kLine, kAhead = 1024;
  const auto copy = [&](int64_t count) {
    std::memcpy(out, in, static_cast<size_t>(count));
    out += count, in += count, bytes -= count;
  };
  if (bytes >= 2 * kTurn) {
    copy(-reinterpret_cast<std::intptr_t>(out) & (kLine - 1));
    for (; bytes >= kTurn; out += kTurn, in += kTurn, bytes -= kTurn) {
      // Past the end this is only a hint: it never faults.
      for (int64_t i = 0; i < kTurn; i += kLine) _mm_prefetch(in + kAhead + i, _MM_HINT_NTA);
      __m128i values[kTurn / 16];
      for (int i = 0; i < kTurn / 16; ++i) values[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in) + i);
      for (int i = 0; i < kTurn / 16; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(out) + i, values[i]);
    }
  }
  copy(bytes);
}

// Makes streamed bytes visible to every thread that is notified after this.
inline void finish_streams() { _mm_sfence(); }

#else

inline void stream_copy(char* out, const char* in, int64_t bytes) {
  std::memcpy(out, in, static_cast<size_t>(bytes));
}

inline void finish_streams() {}

#endif

}  // namespace hydra

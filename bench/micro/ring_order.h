// The order in which a warp goes through its pieces: which buffer a piece comes to, and when that is asked for again.
// Plain C++, so that tests run it on the host.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define RING_CALL __device__ __forceinline__
#else
#define RING_CALL inline
#endif

// Pieces `first`, `first` + `step`, .. below `pieces`, through a ring of `stages` buffers. `ask(piece, stage)` has a
// piece brought into a buffer, `take(piece, stage, parity)` waits until it is there and uses it. The parity is that of
// the phase which the buffer's barrier completes then: 0, 1, 0, ..
template <class Ask, class Take>
RING_CALL void walk(uint64_t pieces, uint64_t first, uint64_t step, int stages, Ask ask, Take take) {
  const uint64_t mine = first < pieces ? (pieces - first - 1) / step + 1 : 0;
  for (uint64_t i = 0; i < static_cast<uint64_t>(stages) && i < mine; ++i) ask(first + i * step, static_cast<int>(i));
  int stage = 0;
  uint32_t parity = 0;
  for (uint64_t i = 0; i < mine; ++i) {
    take(first + i * step, stage, parity);
    if (i + stages < mine) ask(first + (i + stages) * step, stage);
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// Bytes of a piece: the last one has what is left.
RING_CALL uint32_t bytes_of(uint64_t piece, uint64_t bytes, uint32_t piece_bytes) {
  const uint64_t left = bytes - piece * piece_bytes;
  return left < piece_bytes ? static_cast<uint32_t>(left) : piece_bytes;
}

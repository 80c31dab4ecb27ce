// The two passes of a resize for one instruction-set level, and the form in which they want their weights.
#pragma once

#include <cstdint>

#include "cpu/image/weights.h"

namespace hydra {

constexpr int kRowsAtOnce = 4;
constexpr int64_t kReadBeyond = 64;  // bytes that a pass may read or write past the end of a padded row
constexpr int32_t kHalf = 1 << (kWeightBits - 1);

// Source rows to rows of the result's width, kRowsAtOnce of them. Pixels are bytes r, g, b.
struct AcrossCall {
  const uint8_t* const* sources = nullptr;
  uint8_t* const* targets = nullptr;
  const int32_t* first = nullptr;   // [groups * group], offsets in bytes
  const uint32_t* words = nullptr;  // [groups, quads, level.words, level.group, 4]: each word fills 16 bytes
  int64_t groups = 0;
  int64_t quads = 0;
};

// 4 * quads rows to one row of the result: `bytes` sums of bytes above one another.
struct DownCall {
  const uint8_t* const* rows = nullptr;
  const uint32_t* words = nullptr;  // [quads, level.words]
  int64_t quads = 0;
  uint8_t* out = nullptr;
  int64_t bytes = 0;
};

struct Level {
  int group;  // pixels that `across` makes at once
  int words;  // that hold four weights
  void (*encode)(const int32_t* weights, uint32_t* words);
  void (*across)(const AcrossCall& call);
  void (*down)(const DownCall& call);
};

const Level& scalar_passes();
const Level& avx2_passes();
const Level& avx512_passes();  // needs VNNI too

}  // namespace hydra

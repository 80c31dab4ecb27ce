// Taking blocks of ggml's types apart, on all threads. Plain loops over bytes, as fast as memory where the compiler
// vectorises for any x86-64.
#include "cpu/quantized/ggml.h"

#include <algorithm>
#include <cstring>

#include "cpu/thread_pool.h"
#include "dtype.h"

namespace hydra {
namespace {

// 2 kPairs bytes: the lower halves of neighbours as pairs, and the upper ones.
template <int kPairs>
void split_pairs(const uint8_t* source, uint8_t* low, uint8_t* high) {
  uint16_t words[kPairs];
  std::memcpy(words, source, sizeof(words));
  for (int i = 0; i < kPairs; ++i) {
    low[i] = static_cast<uint8_t>((words[i] & 0x0f) | (words[i] >> 4 & 0xf0));
    high[i] = static_cast<uint8_t>((words[i] >> 4 & 0x0f) | (words[i] >> 8 & 0xf0));
  }
}

struct Q4_0 {
  static constexpr int kBytes = 18, kValues = 16, kGroups = 1, kBlockScales = 0;
  static void decode(const uint8_t* block, uint8_t* values, f16_t* scales, int8_t*, f16_t*) {
    std::memcpy(scales, block, 2);
    split_pairs<8>(block + 2, values, values + 8);
  }
};

struct Q8_0 {
  static constexpr int kBytes = 34, kValues = 32, kGroups = 1, kBlockScales = 0;
  static void decode(const uint8_t* block, uint8_t* values, f16_t* scales, int8_t*, f16_t*) {
    std::memcpy(scales, block, 2);
    std::memcpy(values, block + 2, 32);
  }
};

// Unpacks Q4_K and Q5_K: d and dmin, then sc and m of eight groups, 6 bits each, in 12 bytes.
void eight_groups(const uint8_t* block, int8_t* scales, int8_t* offsets, f16_t* block_scales) {
  std::memcpy(block_scales, block, 4);
  const uint8_t* bits = block + 4;
  for (int i = 0; i < 4; ++i) {
    const int first = bits[i], second = bits[4 + i], rest = bits[8 + i];
    scales[i] = static_cast<int8_t>(first & 63);
    scales[4 + i] = static_cast<int8_t>((rest & 15) | first >> 6 << 4);
    offsets[i] = static_cast<int8_t>(second & 63);
    offsets[4 + i] = static_cast<int8_t>(rest >> 4 | second >> 6 << 4);
  }
}

struct Q4_K {
  static constexpr int kBytes = 144, kValues = 128, kGroups = 8, kBlockScales = 2;
  static void decode(const uint8_t* block, uint8_t* values, int8_t* scales, int8_t* offsets, f16_t* block_scales) {
    eight_groups(block, scales, offsets, block_scales);
    for (int at = 0; at < 128; at += 32) split_pairs<16>(block + 16 + at, values + at, values + at + 16);
  }
};

struct Q5_K {
  static constexpr int kBytes = 176, kValues = 256, kGroups = 8, kBlockScales = 2;
  static void decode(const uint8_t* block, uint8_t* values, int8_t* scales, int8_t* offsets, f16_t* block_scales) {
    eight_groups(block, scales, offsets, block_scales);
    const uint8_t *high = block + 16, *low = block + 48;
    for (int group = 0; group < 8; group += 2, low += 32, values += 64) {
      for (int i = 0; i < 32; ++i) {
        values[i] = static_cast<uint8_t>((low[i] & 15) | (high[i] >> group & 1) << 4);
        values[32 + i] = static_cast<uint8_t>(low[i] >> 4 | (high[i] >> (group + 1) & 1) << 4);
      }
    }
  }
};

struct Q6_K {
  static constexpr int kBytes = 210, kValues = 256, kGroups = 16, kBlockScales = 1;
  static void decode(const uint8_t* block, uint8_t* values, int8_t* scales, int8_t*, f16_t* block_scales) {
    const uint8_t *low = block, *high = block + 128;
    for (int half = 0; half < 2; ++half, low += 64, high += 32, values += 128) {
      for (int i = 0; i < 32; ++i) {
        values[i] = static_cast<uint8_t>(((low[i] & 15) | (high[i] & 3) << 4) - 32);
        values[32 + i] = static_cast<uint8_t>(((low[32 + i] & 15) | (high[i] >> 2 & 3) << 4) - 32);
        values[64 + i] = static_cast<uint8_t>((low[i] >> 4 | (high[i] >> 4 & 3) << 4) - 32);
        values[96 + i] = static_cast<uint8_t>((low[32 + i] >> 4 | high[i] >> 6 << 4) - 32);
      }
    }
    std::memcpy(scales, block + 192, 16);
    std::memcpy(block_scales, block + 208, 2);
  }
};

template <class Type, class Scale>
void decode_all(const GgmlBlocks& call) {
  constexpr int64_t kBlocksPerPart = (1 << 16) / Type::kValues;
  const int64_t parts = std::clamp<int64_t>(call.count / kBlocksPerPart, 1, 8 * num_threads());
  run_parts(static_cast<int>(parts), [&](int part) {
    for (int64_t block = call.count * part / parts; block < call.count * (part + 1) / parts; ++block) {
      const int64_t groups = block * Type::kGroups;
      Type::decode(call.blocks + block * Type::kBytes, call.values + block * Type::kValues,
                   static_cast<Scale*>(call.scales) + groups, call.offsets ? call.offsets + groups : nullptr,
                   call.block_scales ? call.block_scales + block * Type::kBlockScales : nullptr);
    }
  });
}

}  // namespace

void decode_ggml(const GgmlBlocks& call) {
  switch (call.type) {
    case GgmlType::q4_0:
      return decode_all<Q4_0, f16_t>(call);
    case GgmlType::q8_0:
      return decode_all<Q8_0, f16_t>(call);
    case GgmlType::q4_k:
      return decode_all<Q4_K, int8_t>(call);
    case GgmlType::q5_k:
      return decode_all<Q5_K, int8_t>(call);
    case GgmlType::q6_k:
      return decode_all<Q6_K, int8_t>(call);
  }
}

}  // namespace hydra

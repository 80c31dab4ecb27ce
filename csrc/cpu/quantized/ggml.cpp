// Taking blocks of ggml's types apart, on all threads. Plain loops over bytes, as fast as memory where the compiler
// vectorises for any x86-64.
#include "cpu/quantized/ggml.h"

#include <algorithm>
#include <cstring>

#include "cpu/thread_pool.h"
#include "dtype.h"

namespace hydra {
namespace {

float half_at(const uint8_t* source) {
  f16_t half;
  std::memcpy(&half, source, 2);
  return to_float(half);
}

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
  static constexpr int kBytes = 18, kValues = 16, kGroups = 1;
  static void decode(const uint8_t* block, uint8_t* values, f16_t* scales, float*) {
    std::memcpy(scales, block, 2);
    split_pairs<8>(block + 2, values, values + 8);
  }
};

struct Q8_0 {
  static constexpr int kBytes = 34, kValues = 32, kGroups = 1;
  static void decode(const uint8_t* block, uint8_t* values, f16_t* scales, float*) {
    std::memcpy(scales, block, 2);
    std::memcpy(values, block + 2, 32);
  }
};

// Of Q4_K and Q5_K: scales d sc and offsets -dmin m of eight groups. sc and m have 6 bits each, in 12 bytes.
void eight_groups(const uint8_t* block, float* scales, float* offsets) {
  const float d = half_at(block), least = half_at(block + 2);
  const uint8_t* bits = block + 4;
  for (int i = 0; i < 4; ++i) {
    const int first = bits[i], second = bits[4 + i], rest = bits[8 + i];
    scales[i] = d * static_cast<float>(first & 63);
    scales[4 + i] = d * static_cast<float>((rest & 15) | first >> 6 << 4);
    offsets[i] = -(least * static_cast<float>(second & 63));
    offsets[4 + i] = -(least * static_cast<float>(rest >> 4 | second >> 6 << 4));
  }
}

struct Q4_K {
  static constexpr int kBytes = 144, kValues = 128, kGroups = 8;
  static void decode(const uint8_t* block, uint8_t* values, float* scales, float* offsets) {
    eight_groups(block, scales, offsets);
    for (int group = 0; group < 8; ++group) {
      __asm__("" : "+m"(offsets[group]));  // a product rounded before it is added; 8 times a scale is exact
      offsets[group] += 8 * scales[group];
    }
    for (int at = 0; at < 128; at += 32) split_pairs<16>(block + 16 + at, values + at, values + at + 16);
  }
};

struct Q5_K {
  static constexpr int kBytes = 176, kValues = 256, kGroups = 8;
  static void decode(const uint8_t* block, uint8_t* values, float* scales, float* offsets) {
    eight_groups(block, scales, offsets);
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
  static constexpr int kBytes = 210, kValues = 256, kGroups = 16;
  static void decode(const uint8_t* block, uint8_t* values, float* scales, float*) {
    const uint8_t *low = block, *high = block + 128;
    for (int half = 0; half < 2; ++half, low += 64, high += 32, values += 128) {
      for (int i = 0; i < 32; ++i) {
        values[i] = static_cast<uint8_t>(((low[i] & 15) | (high[i] & 3) << 4) - 32);
        values[32 + i] = static_cast<uint8_t>(((low[32 + i] & 15) | (high[i] >> 2 & 3) << 4) - 32);
        values[64 + i] = static_cast<uint8_t>((low[i] >> 4 | (high[i] >> 4 & 3) << 4) - 32);
        values[96 + i] = static_cast<uint8_t>((low[32 + i] >> 4 | high[i] >> 6 << 4) - 32);
      }
    }
    const float d = half_at(block + 208);
    for (int group = 0; group < 16; ++group) {
      scales[group] = d * static_cast<float>(static_cast<int8_t>(block[192 + group]));
    }
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
                   static_cast<Scale*>(call.scales) + groups, call.offsets ? call.offsets + groups : nullptr);
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
      return decode_all<Q4_K, float>(call);
    case GgmlType::q5_k:
      return decode_all<Q5_K, float>(call);
    case GgmlType::q6_k:
      return decode_all<Q6_K, float>(call);
  }
}

}  // namespace hydra

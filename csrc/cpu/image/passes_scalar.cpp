// The passes without vectors.
#include <algorithm>
#include <cstring>

#include "cpu/image/passes.h"

namespace hydra {
namespace {

uint8_t to_byte(int32_t sum) { return static_cast<uint8_t>(std::clamp(sum >> kWeightBits, 0, 255)); }

void encode(const int32_t* weights, uint32_t* words) { std::memcpy(words, weights, 16); }

void across(const AcrossCall& call) {
  for (int row = 0; row < kRowsAtOnce; ++row) {
    const uint32_t* words = call.words;
    uint8_t* target = call.targets[row];
    for (int64_t i = 0; i < call.groups; ++i, target += 3) {
      const uint8_t* pixel = call.sources[row] + call.first[i];
      int32_t sums[3] = {kHalf, kHalf, kHalf};
      for (int64_t t = 0; t < 4 * call.quads; ++t, pixel += 3, words += 4) {
        const int32_t weight = static_cast<int32_t>(*words);
        for (int c = 0; c < 3; ++c) sums[c] += weight * pixel[c];
      }
      for (int c = 0; c < 3; ++c) target[c] = to_byte(sums[c]);
    }
  }
}

void down(const DownCall& call) {
  for (int64_t i = 0; i < call.bytes; ++i) {
    int32_t sum = kHalf;
    for (int64_t t = 0; t < 4 * call.quads; ++t) sum += static_cast<int32_t>(call.words[t]) * call.rows[t][i];
    call.out[i] = to_byte(sum);
  }
}

constexpr Level kLevel = {1, 4, encode, across, down};

}  // namespace

const Level& scalar_passes() { return kLevel; }

}  // namespace hydra

// Square by square, of one cache line each way, in strips of columns: a row of a square is read whole, so it does not
// matter that rows a power of two apart share their places in the cache, and the pages of a strip are few.
#include "cpu/quantized/transpose.h"

#include <algorithm>
#include <cstring>

#include "cpu/thread_pool.h"

namespace hydra {
namespace {

constexpr int64_t kSide = 16, kStrip = 256;

inline void turn_square(const uint32_t* source, int64_t stride, int64_t height, int64_t width, uint32_t* target,
                 int64_t target_stride) {
  uint32_t square[kSide][kSide];
  for (int64_t row = 0; row < height; ++row) {
    std::memcpy(square[row], source + row * stride, static_cast<size_t>(width) * sizeof(uint32_t));
  }
  for (int64_t column = 0; column < width; ++column) {
    for (int64_t row = 0; row < height; ++row) target[column * target_stride + row] = square[row][column];
  }
}

void turn_strip(const uint32_t* source, int64_t rows, int64_t stride, int64_t width, uint32_t* target) {
  for (int64_t row = 0; row < rows; row += kSide) {
    for (int64_t column = 0; column < width; column += kSide) {
      const int64_t height = std::min(kSide, rows - row), some = std::min(kSide, width - column);
      const uint32_t* from = source + row * stride + column;
      uint32_t* to = target + column * rows + row;
      if (height == kSide && some == kSide) {
        turn_square(from, stride, kSide, kSide, to, rows);  // sizes that the compiler knows
      } else {
        turn_square(from, stride, height, some, to, rows);
      }
    }
  }
}

}  // namespace

void transpose_words(const uint32_t* source, int64_t rows, int64_t columns, uint32_t* target) {
  parallel_for((columns + kStrip - 1) / kStrip, [&](int64_t begin, int64_t end) {
    for (int64_t column = begin * kStrip; column < std::min(end * kStrip, columns); column += kStrip) {
      turn_strip(source + column, rows, columns, std::min(kStrip, columns - column), target + column * rows);
    }
  });
}

}  // namespace hydra

// Antialiased resizing of interleaved 8-bit RGB: two passes of weighted sums, across and down, with 8 bits in between.
//
// The arithmetic is Pillow's, so results are equal bit for bit: the filter, stretched by the scale where a picture
// shrinks, is evaluated in double at the centre of every source pixel within its support, divided by its sum and
// rounded to 22 fractional bits; sums are integers, which no order of additions changes. Runs on the calling thread.
#pragma once

#include <cstdint>

namespace hydra {

enum class Filter : int { nearest = 0, box = 1, bilinear = 2, bicubic = 3, lanczos = 4 };

Filter filter_from_int(int value);

struct ResizeCall {
  const uint8_t* source = nullptr;  // [source_height, source_width, 3], rows `source_stride` bytes apart
  int64_t source_stride = 0;
  int64_t source_width = 0, source_height = 0;
  int64_t width = 0, height = 0;  // of the whole result
  int64_t left = 0, top = 0;      // the window of it that is computed
  int64_t columns = 0, rows = 0;
  uint8_t* out = nullptr;  // [rows, columns, 3], rows `out_stride` bytes apart
  int64_t out_stride = 0;
  Filter filter = Filter::bicubic;
  bool down_first = false;  // the order of the passes, which shows in the last bit
};

void resize_rgb(const ResizeCall& call);

}  // namespace hydra

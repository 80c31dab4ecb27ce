// The order of the work. Across first: rows are resized across just before a row of the result needs them, into a ring
// that holds as many as one row of the result is made of, so that the second pass finds them in the nearest cache.
#include "cpu/image/resize.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "check.h"
#include "cpu/image/passes.h"
#include "cpu/isa.h"

namespace hydra {
namespace {

const Level& best_passes() {
#if HYDRA_X86
  if (has_avx512_vnni()) return avx512_passes();
  if (current_isa() >= Isa::avx2) return avx2_passes();
#endif
  return scalar_passes();
}

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Rows of `bytes` bytes, each with padding that passes may read and write.
class Buffer {
 public:
  Buffer(int64_t rows, int64_t bytes, int64_t beyond) : stride_(round_up(bytes + beyond, 64)), data_(rows * stride_) {}

  uint8_t* row(int64_t index) { return &data_[index * stride_]; }

 private:
  int64_t stride_;
  std::vector<uint8_t> data_;
};

// The source's rows, which may be read `beyond` bytes past their end: the last ones are copies.
class Source {
 public:
  Source(const ResizeCall& call, int64_t beyond)
      : call_(call),
        num_direct_(std::max<int64_t>(0, call.source_height - 1 - beyond / call.source_stride - 1)),
        copies_(call.source_height - num_direct_, 3 * call.source_width, beyond) {
    for (int64_t row = num_direct_; row < call.source_height; ++row) {
      std::memcpy(copies_.row(row - num_direct_), call.source + row * call.source_stride, 3 * call.source_width);
    }
  }

  const uint8_t* row(int64_t index) {
    return index < num_direct_ ? call_.source + index * call_.source_stride : copies_.row(index - num_direct_);
  }

 private:
  const ResizeCall& call_;
  int64_t num_direct_;
  Buffer copies_;
};

// The pass along rows, kRowsAtOnce of them.
class Across {
 public:
  Across(const ResizeCall& call, const Level& level)
      : level_(level), groups_((call.columns + level.group - 1) / level.group) {
    const Weights weights = make_weights(call.filter, call.source_width, call.width, call.left, call.columns);
    const int64_t group = level.group;
    taps_ = weights.taps;
    first_.assign(groups_ * group, 0);
    words_.assign(groups_ * taps_ * level.words * group, 0);
    uint32_t encoded[4];
    for (int64_t i = 0; i < call.columns; ++i) {
      first_[i] = 3 * weights.first[i];
      for (int64_t quad = 0; quad < taps_ / 4; ++quad) {
        level.encode(&weights.weight[i * taps_ + 4 * quad], encoded);
        uint32_t* words = &words_[((i / group * taps_ / 4 + quad) * level.words * group + i % group) * 4];
        for (int64_t word = 0; word < level.words; ++word) std::fill_n(words + 4 * word * group, 4, encoded[word]);
      }
    }
  }

  // Weights of zero reach beyond the end of a row.
  int64_t read_beyond() const { return 3 * taps_ + kReadBeyond; }

  void run(const uint8_t* const* sources, uint8_t* const* targets) const {
    AcrossCall pass;
    pass.sources = sources;
    pass.targets = targets;
    pass.first = first_.data();
    pass.words = words_.data();
    pass.groups = groups_;
    pass.quads = taps_ / 4;
    level_.across(pass);
  }

 private:
  const Level& level_;
  int64_t groups_, taps_ = 0;
  std::vector<int32_t> first_;
  std::vector<uint32_t> words_;
};

// The pass down columns, one row of the result at a time.
class Down {
 public:
  Down(const ResizeCall& call, const Level& level)
      : level_(level),
        weights_(make_weights(call.filter, call.source_height, call.height, call.top, call.rows)),
        words_(taps() / 4 * level.words),
        rows_(taps()) {}

  int64_t taps() const { return weights_.taps; }
  int64_t first(int64_t y) const { return weights_.first[y]; }

  // `row(n)` returns row first(y) + n, or any row if there is none: its weight is 0.
  template <class Row>
  void run(int64_t y, uint8_t* out, int64_t bytes, Row&& row) {
    for (int64_t t = 0; t < taps(); ++t) rows_[t] = row(t);
    for (int64_t quad = 0; quad < taps() / 4; ++quad) {
      level_.encode(&weights_.weight[y * taps() + 4 * quad], &words_[quad * level_.words]);
    }
    DownCall pass;
    pass.rows = rows_.data();
    pass.words = words_.data();
    pass.quads = taps() / 4;
    pass.out = out;
    pass.bytes = bytes;
    level_.down(pass);
  }

 private:
  const Level& level_;
  Weights weights_;
  std::vector<uint32_t> words_;
  std::vector<const uint8_t*> rows_;
};

// kRowsAtOnce rows from `begin` on, the last one again where there are no more.
template <class Row, class T>
int64_t gather(int64_t begin, int64_t end, Row&& row, T** rows) {
  for (int64_t i = 0; i < kRowsAtOnce; ++i) rows[i] = row(std::min(begin + i, end - 1));
  return std::min<int64_t>(kRowsAtOnce, end - begin);
}

void resize_across(const ResizeCall& call, const Level& level) {
  const Across across(call, level);
  Source source(call, across.read_beyond());
  Buffer made(kRowsAtOnce, 3 * call.columns, kReadBeyond);
  const uint8_t* sources[kRowsAtOnce];
  uint8_t* targets[kRowsAtOnce];
  for (int64_t y = 0; y < call.rows; y += kRowsAtOnce) {
    const auto source_row = [&](int64_t row) { return source.row(call.top + row); };
    const int64_t count = gather(y, call.rows, source_row, sources);
    gather(0, kRowsAtOnce, [&](int64_t row) { return made.row(row); }, targets);
    across.run(sources, targets);
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(call.out + (y + i) * call.out_stride, targets[i], 3 * call.columns);
    }
  }
}

void resize_down(const ResizeCall& call, const Level& level) {
  Down down(call, level);
  Source source(call, kReadBeyond);
  for (int64_t y = 0; y < call.rows; ++y) {
    down.run(y, call.out + y * call.out_stride, 3 * call.columns, [&](int64_t t) {
      return source.row(std::min(down.first(y) + t, call.source_height - 1)) + 3 * call.left;
    });
  }
}

void resize_across_then_down(const ResizeCall& call, const Level& level) {
  const Across across(call, level);
  Down down(call, level);
  Source source(call, across.read_beyond());
  const int64_t size = down.taps() + kRowsAtOnce;
  Buffer ring(size, 3 * call.columns, kReadBeyond);
  const uint8_t* sources[kRowsAtOnce];
  uint8_t* targets[kRowsAtOnce];
  int64_t made = 0;
  for (int64_t y = 0; y < call.rows; ++y) {
    const int64_t first = down.first(y);
    const int64_t end = std::min(first + down.taps(), call.source_height);
    for (made = std::max(made, first); made < end;) {
      gather(made, call.source_height, [&](int64_t row) { return ring.row(row % size); }, targets);
      const int64_t count = gather(made, call.source_height, [&](int64_t row) { return source.row(row); }, sources);
      across.run(sources, targets);
      made += count;
    }
    down.run(y, call.out + y * call.out_stride, 3 * call.columns,
             [&](int64_t t) { return ring.row(std::min(first + t, made - 1) % size); });
  }
}

void resize_down_then_across(const ResizeCall& call, const Level& level) {
  ResizeCall first = call;  // all columns of the source, because a later pass needs them
  first.width = call.source_width;
  first.left = 0;
  first.columns = call.source_width;
  std::vector<uint8_t> between(3 * first.columns * first.rows);
  first.out = between.data();
  first.out_stride = 3 * first.columns;
  resize_down(first, level);
  ResizeCall second = call;
  second.source = between.data();
  second.source_stride = first.out_stride;
  second.source_height = second.height = second.rows = call.rows;
  second.top = 0;
  resize_across(second, level);
}

void resize_nearest(const ResizeCall& call) {
  const std::vector<int32_t> columns = nearest_pixels(call.source_width, call.width, call.left, call.columns);
  const std::vector<int32_t> rows = nearest_pixels(call.source_height, call.height, call.top, call.rows);
  for (int64_t y = 0; y < call.rows; ++y) {
    const uint8_t* source = call.source + rows[y] * call.source_stride;
    uint8_t* out = call.out + y * call.out_stride;
    for (int64_t x = 0; x < call.columns; ++x, out += 3) std::memcpy(out, source + 3 * columns[x], 3);
  }
}

void copy_window(const ResizeCall& call) {
  const uint8_t* source = call.source + call.top * call.source_stride + 3 * call.left;
  for (int64_t y = 0; y < call.rows; ++y) {
    std::memcpy(call.out + y * call.out_stride, source + y * call.source_stride, 3 * call.columns);
  }
}

void check(const ResizeCall& call) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 16;  // offsets in bytes fit 32 bits
  const auto in_range = [](int64_t value) { return value >= 1 && value <= kMost; };
  HYDRA_CHECK(in_range(call.source_width) && in_range(call.source_height) && in_range(call.width) &&
                  in_range(call.height),
              "sizes: expected 1 to ", kMost, ", got ", call.source_width, " x ", call.source_height, " and ",
              call.width, " x ", call.height);
  HYDRA_CHECK(call.left >= 0 && call.columns >= 1 && call.left + call.columns <= call.width && call.top >= 0 &&
                  call.rows >= 1 && call.top + call.rows <= call.height,
              "window: expected a part of ", call.width, " x ", call.height, ", got ", call.columns, " x ", call.rows,
              " at ", call.left, ", ", call.top);
  HYDRA_CHECK(call.source_stride >= 3 * call.source_width && call.out_stride >= 3 * call.columns,
              "strides: expected at least ", 3 * call.source_width, " and ", 3 * call.columns, ", got ",
              call.source_stride, " and ", call.out_stride);
}

}  // namespace

void resize_rgb(const ResizeCall& call) {
  check(call);
  if (call.filter == Filter::nearest) return resize_nearest(call);
  const Level& level = best_passes();
  const bool across = call.width != call.source_width, down = call.height != call.source_height;
  if (!across && !down) return copy_window(call);
  if (!down) return resize_across(call, level);
  if (!across) return resize_down(call, level);
  call.down_first ? resize_down_then_across(call, level) : resize_across_then_down(call, level);
}

}  // namespace hydra

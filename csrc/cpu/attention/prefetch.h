// Asking for keys and values ahead of their use. Include after defining a level, see cpu/simd.h.
#pragma once

#include "cpu/simd.h"

namespace hydra::HYDRA_LEVEL {

// Prefetches memory ahead of its use, a few cache lines at a time between the steps of a computation: in a burst they
// would wait for each other, and the computation for them.
class Prefetcher {
 public:
  // Bytes [first, end) of `count` rows of keys and of values, in turn.
  HYDRA_INLINE Prefetcher(const char* const* keys, const char* const* values, int64_t count, int64_t first, int64_t end)
      : keys_(keys), values_(values), pieces_(2 * count), first_(first), end_(end) {}

  // The number of cache lines in total.
  HYDRA_INLINE int64_t lines() const { return pieces_ * ((end_ - first_ + kLine - 1) / kLine); }

  HYDRA_INLINE void lines(int64_t count) {
    for (; count > 0; --count) {
      if (at_ >= stop_) {
        if (piece_ == pieces_) return;
        const char* row = (piece_ & 1 ? values_ : keys_)[piece_ / 2];
        ++piece_;
        at_ = row + first_;
        stop_ = row + end_;
      }
      __builtin_prefetch(at_, 0, 2);
      at_ += kLine;
    }
  }

  HYDRA_INLINE void rest() { lines(lines()); }

 private:
  static constexpr int64_t kLine = 64;
  const char* const* keys_;
  const char* const* values_;
  int64_t pieces_, first_, end_, piece_ = 0;
  const char* at_ = nullptr;
  const char* stop_ = nullptr;
};

}  // namespace hydra::HYDRA_LEVEL

// Working memory of a thread, 64-byte aligned, kept between calls so that small products do not allocate.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace hydra {

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  // At least `bytes` bytes with arbitrary content, valid until the next call.
  void* reserve(int64_t bytes) {
    if (bytes > capacity_) {
      std::free(data_);
      capacity_ = (bytes + 63) / 64 * 64;
      data_ = std::aligned_alloc(64, static_cast<size_t>(capacity_));
      if (!data_) {
        capacity_ = 0;
        throw std::bad_alloc();
      }
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  int64_t capacity_ = 0;
};

}  // namespace hydra

// Argument checks of the native entry points. Knows how to word an error; knows nothing about tensors.
// A failed check becomes a Python ValueError (pybind11 maps std::invalid_argument to it).
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace hydra {

template <class... Parts>
[[noreturn]] void fail_check(const char* file, int line, const char* condition, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  text << " [" << condition << ", " << file << ":" << line << "]";
  throw std::invalid_argument(text.str());
}

}  // namespace hydra

// HYDRA_CHECK(n > 0, "n: expected a positive count, got ", n);
#define HYDRA_CHECK(condition, ...)                                                     \
  do {                                                                                  \
    if (!(condition)) ::hydra::fail_check(__FILE__, __LINE__, #condition, __VA_ARGS__); \
  } while (0)

// Filters and their weights. Compiled for the baseline alone: fused multiply-adds would change last bits of doubles.
#include "cpu/image/weights.h"

#include <algorithm>
#include <cmath>

#include "check.h"

namespace hydra {
namespace {

constexpr double kPi = 3.14159265358979323846;

double box(double x) { return x > -0.5 && x <= 0.5 ? 1.0 : 0.0; }

double triangle(double x) { return std::max(0.0, 1.0 - std::fabs(x)); }

// Keys' cubic convolution with a = -1/2.
double cubic(double x) {
  constexpr double a = -0.5;
  x = std::fabs(x);
  if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0;
  if (x < 2.0) return (((x - 5.0) * x + 8.0) * x - 4.0) * a;
  return 0.0;
}

double sinc(double x) {
  if (x == 0.0) return 1.0;
  x *= kPi;
  return std::sin(x) / x;
}

double lanczos3(double x) { return x >= -3.0 && x < 3.0 ? sinc(x) * sinc(x / 3.0) : 0.0; }

struct Kernel {
  double (*value)(double);
  double support;  // zero beyond this distance
};

Kernel kernel_of(Filter filter) {
  switch (filter) {
    case Filter::box:
      return {box, 0.5};
    case Filter::bilinear:
      return {triangle, 1.0};
    case Filter::bicubic:
      return {cubic, 2.0};
    default:
      return {lanczos3, 3.0};
  }
}

int32_t to_fixed(double weight) {
  const double scaled = weight * (1 << kWeightBits);
  return static_cast<int32_t>(scaled < 0 ? scaled - 0.5 : scaled + 0.5);
}

}  // namespace

Filter filter_from_int(int value) {
  HYDRA_CHECK(value >= 0 && value <= 4, "filter: expected 0 to 4, got ", value);
  return static_cast<Filter>(value);
}

Weights make_weights(Filter filter, int64_t source_size, int64_t size, int64_t begin, int64_t count) {
  const Kernel kernel = kernel_of(filter);
  const double scale = static_cast<double>(source_size) / static_cast<double>(size);
  const double stretch = std::max(scale, 1.0);
  const double support = kernel.support * stretch;
  const double step = 1.0 / stretch;
  const auto center = [&](int64_t i) { return (static_cast<double>(begin + i) + 0.5) * scale; };
  Weights made;
  std::vector<int64_t> counts(count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t first = std::max<int64_t>(0, static_cast<int64_t>(center(i) - support + 0.5));
    made.first.push_back(static_cast<int32_t>(first));
    counts[i] = std::min<int64_t>(source_size, static_cast<int64_t>(center(i) + support + 0.5)) - first;
    made.taps = std::max(made.taps, (counts[i] + 3) / 4 * 4);
  }
  made.weight.assign(count * made.taps, 0);
  std::vector<double> exact(made.taps);
  for (int64_t i = 0; i < count; ++i) {
    double sum = 0.0;
    for (int64_t t = 0; t < counts[i]; ++t) {
      exact[t] = kernel.value((static_cast<double>(t + made.first[i]) - center(i) + 0.5) * step);
      sum += exact[t];
    }
    for (int64_t t = 0; t < counts[i]; ++t) {
      made.weight[i * made.taps + t] = to_fixed(sum != 0.0 ? exact[t] / sum : exact[t]);
    }
  }
  return made;
}

std::vector<int32_t> nearest_pixels(int64_t source_size, int64_t size, int64_t begin, int64_t count) {
  std::vector<int32_t> pixels(count);
  const double scale = static_cast<double>(source_size) / static_cast<double>(size);
  // Positions are summed up, not multiplied: the rounding errors are part of what Pillow's result is.
  double position = scale * 0.5;
  for (int64_t i = 0; i < begin + count; ++i, position += scale) {
    if (i >= begin) pixels[i - begin] = static_cast<int32_t>(std::min<int64_t>(position, source_size - 1));
  }
  return pixels;
}

}  // namespace hydra

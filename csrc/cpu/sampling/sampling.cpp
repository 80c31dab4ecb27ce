// Plain C++ in float64: exponentials are what takes time, and their loop is compiled for AVX2 too.
#include "cpu/sampling/sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "check.h"
#include "cpu/elementwise/elementwise.h"
#include "cpu/isa.h"
#include "cpu/thread_pool.h"

#if HYDRA_X86
#include <immintrin.h>
#endif

namespace hydra {
namespace {

constexpr double kLowest = -static_cast<double>(std::numeric_limits<float>::max());  // LOWEST_LOGIT

// exp(x) of numbers that are at most 0, within 1 ulp; 0 below -708. x = n * ln(2) + r, and a polynomial of r.
__attribute__((always_inline)) inline double exp_of(double x) {
  constexpr double kLog2e = 1.4426950408889634, kShift = 6755399441055744.0;  // 1.5 * 2^52: rounds to whole numbers
  constexpr double kHigh = 0.693147180369123816490, kLow = 1.90821492927058770002e-10;
  const double inside = x < -708.0 ? -708.0 : x;
  const double shifted = inside * kLog2e + kShift;
  const double n = shifted - kShift;
  const double r = (inside - n * kHigh) - n * kLow;
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  int64_t bits, scaled;
  std::memcpy(&bits, &shifted, sizeof(bits));
  std::memcpy(&scaled, &p, sizeof(scaled));
  scaled += static_cast<int64_t>(static_cast<uint64_t>(bits) << 52);
  std::memcpy(&p, &scaled, sizeof(p));
  return x < -708.0 ? 0.0 : p;
}

void exp_all_plain(double* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] = exp_of(x[i]);
}

#if HYDRA_X86
HYDRA_TARGET_AVX2 void exp_all_avx2(double* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] = exp_of(x[i]);
}
#endif

void exp_all(double* x, int64_t count) {
#if HYDRA_X86
  if (current_isa() >= Isa::avx2) return exp_all_avx2(x, count);
#endif
  exp_all_plain(x, count);
}

// Rows of a thread: a row of the smallest vocabularies takes some microseconds.
int64_t min_rows(int64_t columns) { return std::max<int64_t>(1, (1 << 12) / columns); }

template <class T>
const T* row_of(const LogitRows& logits, int64_t row) {
  return static_cast<const T*>(logits.data) + row * logits.stride;
}

#if HYDRA_X86
// The largest of the numbers, whose count is a multiple of 8; NaN if any is not finite.
HYDRA_TARGET_AVX2 double largest_avx2(const double* x, int64_t count) {
  __m256d low = _mm256_loadu_pd(x), high = low, odd = _mm256_setzero_pd();
  for (int64_t i = 0; i < count; i += 8) {
    const __m256d first = _mm256_loadu_pd(x + i), second = _mm256_loadu_pd(x + i + 4);
    low = _mm256_max_pd(first, low);
    high = _mm256_max_pd(second, high);
    odd = _mm256_add_pd(odd, _mm256_add_pd(_mm256_sub_pd(first, first), _mm256_sub_pd(second, second)));
  }
  double largest[4], sums[4];
  _mm256_storeu_pd(largest, _mm256_max_pd(low, high));
  _mm256_storeu_pd(sums, odd);
  return *std::max_element(largest, largest + 4) + (sums[0] + sums[1] + sums[2] + sums[3]);
}
#endif

// Where the first of the largest numbers is; -1 if any is not finite.
int64_t best_of(const double* x, int64_t columns) {
  int64_t best = 0, begin = 0;
#if HYDRA_X86
  if (columns >= 8 && current_isa() >= Isa::avx2) {
    begin = columns - columns % 8;
    const double largest = largest_avx2(x, begin);
    if (std::isnan(largest)) return -1;
    best = std::find(x, x + begin, largest) - x;
  }
#endif
  for (int64_t i = begin; i < columns; ++i) {
    if (!std::isfinite(x[i])) return -1;
    if (x[i] > x[best]) best = i;
  }
  return best;
}

// The score within the range of float32, as an adjusted logit; a logit that is not finite stays.
template <class T>
__attribute__((always_inline)) inline T clamped(T logit, double score) {
  const T limited = static_cast<T>(std::min(std::max(score, kLowest), -kLowest));
  return std::fabs(logit) <= std::numeric_limits<T>::max() ? limited : logit;
}

template <class T>
__attribute__((always_inline)) inline void clamp_in(const T* x, T* out, int64_t columns) {
  for (int64_t i = 0; i < columns; ++i) out[i] = clamped(x[i], static_cast<double>(x[i]));
}

#if HYDRA_X86
HYDRA_TARGET_AVX2 void clamp_avx2(const float* x, float* out, int64_t columns) { clamp_in(x, out, columns); }
HYDRA_TARGET_AVX2 void clamp_avx2(const double* x, double* out, int64_t columns) { clamp_in(x, out, columns); }
#endif

template <class T>
void clamp_all(const T* x, T* out, int64_t columns) {
#if HYDRA_X86
  if (current_isa() >= Isa::avx2) return clamp_avx2(x, out, columns);
#endif
  clamp_in(x, out, columns);
}

// The k-th largest of x, 0 < k <= x.size(): the root of a heap of the k largest so far, or for many a selection.
double kth_largest(const std::vector<double>& x, int64_t k, std::vector<double>& scratch) {
  if (k > 512) {
    scratch = x;
    std::nth_element(scratch.begin(), scratch.begin() + (k - 1), scratch.end(), std::greater<double>());
    return scratch[k - 1];
  }
  scratch.assign(x.begin(), x.begin() + k);
  std::make_heap(scratch.begin(), scratch.end(), std::greater<double>());
  for (size_t i = k; i < x.size(); ++i) {
    if (x[i] <= scratch.front()) continue;
    std::pop_heap(scratch.begin(), scratch.end(), std::greater<double>());
    scratch.back() = x[i];
    std::push_heap(scratch.begin(), scratch.end(), std::greater<double>());
  }
  return scratch.front();
}

// A draw of one row; its vectors keep their memory from row to row.
class Draw {
 public:
  template <class T>
  int64_t token(const T* x, int64_t columns, int64_t best, double temperature, int64_t top_k, double top_p,
                double min_p, double number) {
    const double largest = static_cast<double>(x[best]);
    weights_.resize(columns);
    for (int64_t i = 0; i < columns; ++i) weights_[i] = (static_cast<double>(x[i]) - largest) / temperature;
    all_ = true;
    if (0 < top_k && top_k < columns) {
      const double threshold = kth_largest(weights_, top_k, scratch_);
      keep([&](int64_t i) { return weights_[i] >= threshold; });  // ties with the k-th largest stay
    }
    exp_all(weights_.data(), static_cast<int64_t>(weights_.size()));
    if (top_p < 1.0) keep_nucleus(top_p);
    if (min_p > 0.0) keep([&](int64_t i) { return weights_[i] >= min_p; });
    double total = 0.0;
    for (double weight : weights_) total += weight;
    // Rounding must not lift the mark to the total, which no sum exceeds.
    const double mark = std::min(number * total, std::nextafter(total, 0.0));
    double sum = 0.0;
    int64_t place = 0;
    for (const int64_t count = static_cast<int64_t>(weights_.size()); place < count - 1; ++place) {
      sum += weights_[place];
      if (sum > mark) break;
    }
    return all_ ? place : ids_[place];
  }

 private:
  template <class Keep>
  void keep(Keep&& wanted) {
    const int64_t count = static_cast<int64_t>(weights_.size());
    if (all_) ids_.resize(count);
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (!wanted(i)) continue;
      ids_[kept] = all_ ? i : ids_[i];
      weights_[kept++] = weights_[i];
    }
    all_ = false;
    ids_.resize(kept);
    weights_.resize(kept);
  }

  // The fewest largest weights whose sum reaches top_p of all, at least one; the lowest ids of equal ones.
  void keep_nucleus(double top_p) {
    double total = 0.0;
    for (double weight : weights_) total += weight;
    // What is below this weighs together less than half of what may be left out: it need not be sorted.
    const double bound = 0.5 * (1.0 - top_p) * total / static_cast<double>(weights_.size());
    scratch_.clear();
    for (double weight : weights_) {
      if (weight >= bound) scratch_.push_back(weight);
    }
    // A selection by weight: [begin, end) are the candidates for the smallest one that is kept, and `before` is the sum
    // of all that are larger than them.
    const double target = std::max(top_p * total, std::numeric_limits<double>::min());
    auto begin = scratch_.begin(), end = scratch_.end();
    double before = 0.0, smallest = bound;
    int64_t ties = static_cast<int64_t>(weights_.size());  // of `smallest` that are kept
    while (end - begin > kSorted) {
      const double first = *begin, middle = begin[(end - begin) / 2], last = *(end - 1);
      const double pivot = std::max(std::min(first, middle), std::min(std::max(first, middle), last));
      const auto equal = std::partition(begin, end, [=](double weight) { return weight > pivot; });
      const auto less = std::partition(equal, end, [=](double weight) { return weight == pivot; });
      double larger = before;
      for (auto weight = begin; weight < equal; ++weight) larger += *weight;
      if (larger >= target) {
        end = equal;
        continue;
      }
      before = larger;
      begin = equal;
      for (; begin < less && before < target; ++begin) before += pivot;
      if (before >= target) {
        smallest = pivot;
        ties = begin - equal;
        end = begin;
      }
    }
    if (begin < end) {
      std::sort(begin, end, std::greater<double>());
      auto kept = begin;
      while (kept < end && before < target) before += *kept++;
      smallest = *(kept - 1);
      ties = kept - std::lower_bound(begin, kept, smallest, std::greater<double>());
    }
    keep([&](int64_t i) {
      const double weight = weights_[i];
      return weight > smallest || (weight == smallest && ties-- > 0);
    });
  }

  static constexpr int64_t kSorted = 64;  // candidates that are rather sorted than divided further

  bool all_ = true;  // weights_[i] belongs to token i, not to ids_[i]
  std::vector<int64_t> ids_;
  std::vector<double> weights_, scratch_;
};

template <class T>
void sample_part(const SampleCall& call, int64_t begin, int64_t end) {
  Draw draw;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = row_of<T>(call.logits, row);
    int64_t best;
    if constexpr (sizeof(T) == 4) {
      best = call.tokens[row];  // found before
    } else {
      best = best_of(x, call.logits.columns);
    }
    call.finite[row] = best >= 0;
    call.tokens[row] = std::max<int64_t>(best, 0);
    if (best < 0 || !(call.temperatures[row] > 0.0)) continue;
    call.tokens[row] = draw.token(x, call.logits.columns, best, call.temperatures[row], call.top_k[row],
                                  call.top_p[row], call.min_p[row], call.numbers[row]);
  }
}

// Calls `visit(i)` for all i whose count is not 0. Most are 0: eight are skipped at once.
template <class Visit>
void visit_counted(const int32_t* counts, int64_t columns, Visit&& visit) {
  constexpr int64_t kSkipped = 8;
  for (int64_t begin = 0; begin < columns; begin += kSkipped) {
    const int64_t end = std::min(begin + kSkipped, columns);
    if (end - begin == kSkipped) {
      uint64_t words[kSkipped / 2];
      std::memcpy(words, counts + begin, sizeof(words));
      if (!(words[0] | words[1] | words[2] | words[3])) continue;
    }
    for (int64_t i = begin; i < end; ++i) {
      if (counts[i] != 0) visit(i);
    }
  }
}

template <class T>
void adjust_part(const AdjustCall& call, int64_t begin, int64_t end) {
  const int64_t columns = call.logits.columns, words = (columns + 31) / 32;
  std::vector<double> scores;  // with biases, of a row that has them
  for (int64_t row = begin; row < end; ++row) {
    const T* x = row_of<T>(call.logits, row);
    T* out = static_cast<T*>(call.out) + row * columns;
    const int64_t first = call.bias_begins[row], last = call.bias_ends[row];
    const int64_t counted = call.counted[row], masked = call.masked[row];
    if (first >= last && counted < 0 && masked < 0) {
      std::copy(x, x + columns, out);
      continue;
    }
    clamp_all(x, out, columns);
    const bool biased = first < last;
    if (biased) {
      scores.assign(x, x + columns);
      const auto each = [&](auto&& visit) {
        for (int64_t i = first; i < last; ++i) {
          const int64_t id = call.bias_ids[i];
          if (0 <= id && id < columns) visit(id, call.bias_values[i]);
        }
      };
      each([&](int64_t id, double value) { scores[id] += value; });
      each([&](int64_t id, double) { out[id] = clamped(x[id], scores[id]); });
    }
    if (counted >= 0) {
      const int32_t* counts = call.counts + counted * columns;
      const double repetition = call.penalties[3 * row];
      const double frequency = call.penalties[3 * row + 1], presence = call.penalties[3 * row + 2];
      visit_counted(counts, columns, [&](int64_t i) {
        double score = biased ? scores[i] : static_cast<double>(x[i]);
        score = score > 0 ? score / repetition : score * repetition;
        const int32_t times = counts[i] >> 1;
        if (times > 0) score -= frequency * times + presence;
        out[i] = clamped(x[i], score);
      });
    }
    if (masked < 0) continue;
    const uint32_t* mask = call.masks + masked * words;
    for (int64_t i = 0; i < columns; ++i) {
      if (!(mask[i / 32] >> (i % 32) & 1) && std::isfinite(x[i])) out[i] = static_cast<T>(kLowest);
    }
  }
}

template <class T>
void score_part(const ScoreCall& call, int64_t begin, int64_t end) {
  const int64_t columns = call.logits.columns;
  std::vector<double> weights;
  std::vector<int64_t> best;
  for (int64_t row = begin; row < end; ++row) {
    if (call.num_top[row] < 0) continue;
    const T* x = row_of<T>(call.logits, row);
    T* numbers = static_cast<T*>(call.numbers) + row * (3 + call.max_top);
    int32_t* places = call.places + row * (1 + call.max_top);
    const int64_t token = call.tokens[row];
    const T chosen = x[token], largest = *std::max_element(x, x + columns);
    weights.resize(columns);
    int64_t rank = 1;
    for (int64_t i = 0; i < columns; ++i) {
      weights[i] = static_cast<double>(x[i]) - static_cast<double>(largest);
      rank += x[i] > chosen || (x[i] == chosen && i < token);
    }
    exp_all(weights.data(), columns);
    double total = 0.0;
    for (double weight : weights) total += weight;
    numbers[0] = chosen;
    numbers[1] = largest;
    numbers[2] = static_cast<T>(total);
    places[0] = static_cast<int32_t>(rank);
    const int64_t listed = std::min<int64_t>(call.num_top[row], columns);
    if (listed == 0) continue;
    // A heap of the best so far, the worst of them first; later ones of equal logits rank behind.
    const auto better = [&](int64_t a, int64_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
    best.clear();
    for (int64_t i = 0; i < columns; ++i) {
      if (static_cast<int64_t>(best.size()) == listed) {
        if (!(x[i] > x[best.front()])) continue;
        std::pop_heap(best.begin(), best.end(), better);
        best.pop_back();
      }
      best.push_back(i);
      std::push_heap(best.begin(), best.end(), better);
    }
    std::sort_heap(best.begin(), best.end(), better);
    for (size_t i = 0; i < best.size(); ++i) {
      numbers[3 + i] = x[best[i]];
      places[1 + i] = static_cast<int32_t>(best[i]);
    }
  }
}

}  // namespace

void sample_rows(const SampleCall& call) {
  const LogitRows& logits = call.logits;
  if (!logits.wide) {
    best_of_rows({static_cast<const float*>(logits.data), logits.stride, logits.rows, logits.columns, call.tokens});
  }
  parallel_for(logits.rows, min_rows(logits.columns), [&](int64_t begin, int64_t end) {
    logits.wide ? sample_part<double>(call, begin, end) : sample_part<float>(call, begin, end);
  });
}

void adjust_rows(const AdjustCall& call) {
  for (int64_t row = 0; row < call.logits.rows; ++row) {
    const int64_t first = call.bias_begins[row], last = call.bias_ends[row];
    HYDRA_CHECK(first >= last || (first >= 0 && last <= call.num_biases), "biases of row ", row, ": expected entries of ",
                call.num_biases, ", got ", first, " to ", last);
    HYDRA_CHECK(call.counted[row] < call.num_counted, "counted: expected less than ", call.num_counted, ", got ",
                call.counted[row]);
    HYDRA_CHECK(call.masked[row] < call.num_masked, "masked: expected less than ", call.num_masked, ", got ",
                call.masked[row]);
  }
  parallel_for(call.logits.rows, min_rows(call.logits.columns), [&](int64_t begin, int64_t end) {
    call.logits.wide ? adjust_part<double>(call, begin, end) : adjust_part<float>(call, begin, end);
  });
}

void score_rows(const ScoreCall& call) {
  for (int64_t row = 0; row < call.logits.rows; ++row) {
    if (call.num_top[row] < 0) continue;
    HYDRA_CHECK(call.num_top[row] <= call.max_top, "num_top: expected at most ", call.max_top, ", got ",
                call.num_top[row]);
    HYDRA_CHECK(call.tokens[row] >= 0 && call.tokens[row] < call.logits.columns, "tokens: expected less than ",
                call.logits.columns, ", got ", call.tokens[row]);
  }
  parallel_for(call.logits.rows, min_rows(call.logits.columns), [&](int64_t begin, int64_t end) {
    call.logits.wide ? score_part<double>(call, begin, end) : score_part<float>(call, begin, end);
  });
}

}  // namespace hydra

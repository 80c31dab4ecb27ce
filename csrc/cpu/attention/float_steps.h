// Rows of a storage type as vectors of floats, in an order that is cheap to widen. Include after defining a level, see
// cpu/simd.h.
//
// A row is a number of chunks, a chunk is kVectors steps of kLanes floats. A bf16 chunk is two steps, its even and its
// odd dimensions, because one instruction widens either half of a word. Rows are zero-padded to whole chunks.
#pragma once

#include <type_traits>

#include "cpu/attention/softmax.h"

namespace hydra::HYDRA_LEVEL {

HYDRA_INLINE vf load(const int8_t* source) {
#if HYDRA_LANES == 16
  const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
  return (vf)_mm512_maskz_cvtepi32_ps(0xffff, wide);
#elif HYDRA_LANES == 8
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source))));
#else
  vf result{};
  for (int i = 0; i < kLanes; ++i) result[i] = source[i];
  return result;
#endif
}

HYDRA_INLINE vf load_part(const int8_t* source, int count) {
  int8_t buffer[kLanes] = {};
  std::memcpy(buffer, source, static_cast<size_t>(count));
  return load(buffer);
}

// The value, in a register from here on: the compiler would rather load it again with every use, and loads are scarce.
HYDRA_INLINE vf in_register(vf value) {
#if HYDRA_X86 && !defined(HYDRA_EMULATED)
  __asm__ volatile("" : "+v"(value));
#endif
  return value;
}

template <class T>
HYDRA_INLINE const T* in_register(const T* address) {
#if HYDRA_X86 && !defined(HYDRA_EMULATED)
  __asm__ volatile("" : "+r"(address));
#endif
  return address;
}

// Loads that the compiler cannot move or repeat, which would make it run out of registers.
#if HYDRA_LANES == 8 && HYDRA_X86 && !defined(HYDRA_EMULATED)
HYDRA_INLINE vf load_once(const float* source) {
  vf value;
  __asm__ volatile("vmovups %1, %0" : "=x"(value) : "m"(*reinterpret_cast<const vf_memory*>(source)));
  return value;
}

HYDRA_INLINE vf load_once(const f16_t* source) {
  vf value;
  __asm__ volatile("vcvtph2ps %1, %0" : "=x"(value) : "m"(*reinterpret_cast<const vh_memory*>(source)));
  return value;
}

HYDRA_INLINE vf load_once(const int8_t* source) {
  typedef int8_t lanes __attribute__((vector_size(kLanes), aligned(1), may_alias));
  vf value;
  __asm__ volatile("vpmovsxbd %1, %0\n\tvcvtdq2ps %0, %0"
                   : "=x"(value)
                   : "m"(*reinterpret_cast<const lanes*>(source)));
  return value;
}
#else
template <class T>
HYDRA_INLINE vf load_once(const T* source) {
  return in_register(load(source));
}
#endif

// total += a * b. The compiler would rather use the form of the instruction that overwrites a factor: sums then change
// registers and, where they fill all of them, leave for memory.
HYDRA_INLINE void accumulate(vf& total, vf a, vf b) {
#if HYDRA_LANES == 8 && HYDRA_X86 && !defined(HYDRA_EMULATED)
  __asm__ volatile("vfmadd231ps %2, %1, %0" : "+x"(total) : "x"(a), "x"(b));
#else
  total = fused_multiply_add(a, b, total);
#endif
}

// Steps of rows of T; queries and results, of any type, have the same order.
template <class T>
struct FloatSteps {
  static constexpr int kVectors = 1;

  static constexpr int64_t width(int64_t dim) { return (dim + kLanes - 1) / kLanes * kLanes; }

  template <class X>
  HYDRA_INLINE static vf load_step(const X* row, int64_t step, int64_t dim) {
    const int64_t d = step * kLanes;
    return d + kLanes <= dim ? load(row + d) : load_part(row + d, static_cast<int>(dim - d));
  }

  // Vector kPart of the chunk that begins with dimension d, for kUses products; the row has all of the chunk if kWhole.
  template <bool kWhole, int kPart, int kUses>
  HYDRA_INLINE static vf load_vector(const T* row, int64_t d, int64_t dim) {
    if constexpr (kWhole && kUses > 1) return load_once(row + d);
    const vf value = kWhole ? load(row + d) : load_part(row + d, static_cast<int>(dim - d));
    return kUses > 1 ? in_register(value) : value;
  }

  // row[d] = sums[d] * factor
  template <class X>
  HYDRA_INLINE static void store_row(const float* sums, float factor, int64_t dim, X* row) {
    for (int64_t d = 0; d < dim; d += kLanes) {
      const vf result = load(sums + d) * factor;
      if (d + kLanes <= dim) {
        store(row + d, result);
      } else {
        store_part(row + d, result, static_cast<int>(dim - d));
      }
    }
  }
};

template <>
struct FloatSteps<bf16_t> {
  static constexpr int kVectors = 2;
  static constexpr int64_t kChunk = 2 * kLanes;

  static constexpr int64_t width(int64_t dim) { return (dim + kChunk - 1) / kChunk * kChunk; }

  HYDRA_INLINE static vu load_words(const bf16_t* row, int64_t d, int64_t dim) {
    if (d + kChunk <= dim) return *reinterpret_cast<const vu_memory*>(row + d);
    bf16_t buffer[kChunk] = {};
    if (dim - d == kLanes) {  // as of 72 dimensions; a copy of fixed size is a load and a store
      std::memcpy(buffer, row + d, kLanes * sizeof(bf16_t));
    } else {
      std::memcpy(buffer, row + d, static_cast<size_t>(dim - d) * sizeof(bf16_t));
    }
    return *reinterpret_cast<const vu_memory*>(buffer);
  }

  HYDRA_INLINE static vf even(vu words) { return (vf)(words << 16); }
  HYDRA_INLINE static vf odd(vu words) { return (vf)(words & 0xffff0000u); }

  HYDRA_INLINE static vf load_step(const bf16_t* row, int64_t step, int64_t dim) {
    const vu words = load_words(row, step / 2 * kChunk, dim);
    return step % 2 ? odd(words) : even(words);
  }

  template <bool kWhole, int kPart, int kUses>
  HYDRA_INLINE static vf load_vector(const bf16_t* row, int64_t d, int64_t dim) {
#if HYDRA_LANES == 8 && HYDRA_X86 && !defined(HYDRA_EMULATED)
    // 12 sums and what they are multiplied by leave one of 16 registers: neither words nor mask may stay in another.
    if constexpr (kWhole && kUses > 2) {
      const auto& words = *reinterpret_cast<const vu_memory*>(row + d);
      vf result;
      if constexpr (kPart) {
        alignas(32) static constexpr uint32_t kOdd[] = {~0xffffu, ~0xffffu, ~0xffffu, ~0xffffu,
                                                        ~0xffffu, ~0xffffu, ~0xffffu, ~0xffffu};
        __asm__ volatile("vmovdqu %1, %0\n\tvpand %2, %0, %0" : "=&x"(result) : "m"(words), "m"(kOdd));
      } else {
        __asm__ volatile("vmovdqu %1, %0\n\tvpslld $16, %0, %0" : "=x"(result) : "m"(words));
      }
      return result;
    }
#endif
    const vu words = kWhole ? *reinterpret_cast<const vu_memory*>(row + d) : load_words(row, d, dim);
    return kPart ? odd(words) : even(words);
  }

  HYDRA_INLINE static void store_row(const float* sums, float factor, int64_t dim, bf16_t* row) {
    for (int64_t d = 0; d < dim; d += kChunk) {
      bf16_t even[kLanes], odd[kLanes];
      store(even, load(sums + d) * factor);
      store(odd, load(sums + d + kLanes) * factor);
      const vu words = __builtin_convertvector(*reinterpret_cast<const vh_memory*>(even), vu) |
                       __builtin_convertvector(*reinterpret_cast<const vh_memory*>(odd), vu) << 16;
      if (d + kChunk <= dim) {
        *reinterpret_cast<vu_memory*>(row + d) = words;
      } else {
        std::memcpy(row + d, &words, static_cast<size_t>(dim - d) * sizeof(bf16_t));
      }
    }
  }
};

#if HYDRA_LANES == 16
// 4 lanes at a time: quarter j of rows[i + 4 k] <-> quarter k of rows[i + 4 j].
HYDRA_INLINE void exchange_quarters(vf* rows) {
  const vi even = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    const vf a = rows[i], b = rows[i + 4], c = rows[i + 8], d = rows[i + 12];
    const vf even_ab = __builtin_shuffle(a, b, even), even_cd = __builtin_shuffle(c, d, even);
    const vf odd_ab = __builtin_shuffle(a, b, even + 4), odd_cd = __builtin_shuffle(c, d, even + 4);
    rows[i] = __builtin_shuffle(even_ab, even_cd, even);
    rows[i + 4] = __builtin_shuffle(odd_ab, odd_cd, even);
    rows[i + 8] = __builtin_shuffle(even_ab, even_cd, even + 4);
    rows[i + 12] = __builtin_shuffle(odd_ab, odd_cd, even + 4);
  }
}
#endif

// Interleaves units in every 4 lanes: the first halves of both rows become the first row, the second halves the second.
template <int kUnit, int... kLane>
HYDRA_INLINE void interleave(vf& first, vf& second, std::integer_sequence<int, kLane...>) {
  const vi lower = {(kLane / 4 * 4 + (kUnit == 1 ? kLane % 4 / 2 : kLane % 2) + (kLane / kUnit % 2 ? kLanes : 0))...};
  const vf a = first, b = second;
  first = __builtin_shuffle(a, b, lower);
  second = __builtin_shuffle(a, b, lower + 2);
}

// rows[i][j] <-> rows[j][i], by instructions that move whole units: first inside of 4 lanes, then 4 lanes at once.
HYDRA_INLINE void transpose(vf* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i += 4) {
    interleave<1>(rows[i], rows[i + 1], Lanes());
    interleave<1>(rows[i + 2], rows[i + 3], Lanes());
    interleave<2>(rows[i], rows[i + 2], Lanes());
    interleave<2>(rows[i + 1], rows[i + 3], Lanes());
    std::swap(rows[i + 1], rows[i + 2]);
  }
#if HYDRA_LANES == 16
  exchange_quarters(rows);
#elif HYDRA_LANES == 8
  exchange<4>(rows, Lanes());
#endif
}

}  // namespace hydra::HYDRA_LEVEL

// Rows of a storage type as vectors of floats, in an order that is cheap to widen. Include after defining a level, see
// cpu/simd.h.
//
// A row is a number of chunks, a chunk is kVectors steps of kLanes floats. Of bf16 a chunk is two steps, its even and
// its odd dimensions, because a word of two becomes either by one instruction. What a row lacks of whole chunks is 0.
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
  __asm__("" : "+v"(value));
#endif
  return value;
}

// For rows of T; queries and results, of any type, follow their order.
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
#if HYDRA_LANES == 8
    // 12 sums and what they are multiplied by leave one of 16 registers: neither words nor mask may stay in another.
    if constexpr (kWhole && kPart && kUses > 2) {
      alignas(32) static constexpr uint32_t kOdd[] = {~0xffffu, ~0xffffu, ~0xffffu, ~0xffffu,
                                                      ~0xffffu, ~0xffffu, ~0xffffu, ~0xffffu};
      vf result;
      __asm__("vmovdqu %1, %0\n\tvpand %2, %0, %0"
              : "=&x"(result)
              : "m"(*reinterpret_cast<const vu_memory*>(row + d)), "m"(kOdd));
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

// rows[i][j] <-> rows[j][i].
HYDRA_INLINE void transpose(vf* rows) {
  exchange<1>(rows, Lanes());
  exchange<2>(rows, Lanes());
  if constexpr (kLanes > 4) exchange<4>(rows, Lanes());
  if constexpr (kLanes > 8) exchange<8>(rows, Lanes());
}

}  // namespace hydra::HYDRA_LEVEL

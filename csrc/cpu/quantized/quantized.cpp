// Packing of weights of 8, 6 and 4 bits, the cut of a product into one rectangle per thread, and the choice of the level.
#include "cpu/quantized/quantized.h"

#include <algorithm>
#include <cstring>

#include "cpu/isa.h"
#include "cpu/linear/parts.h"
#include "cpu/scratch.h"
#include "cpu/thread_pool.h"

namespace hydra {
namespace {

// ---- packing

// Eight values of 4 bits, in order from the lowest, as a step has them: of k..k+3 the lower halves of the bytes.
uint32_t spread(uint32_t word) {
  const auto to_bytes = [](uint32_t halves) {
    halves = (halves | halves << 8) & 0x00ff00ffu;
    return (halves | halves << 4) & 0x0f0f0f0fu;
  };
  return to_bytes(word & 0xffffu) | to_bytes(word >> 16) << 4;
}

// Words of four bytes of each of 16 columns.
using Words = uint32_t[kTile];

// Gathers a word of each of `columns` rows at `values`, `row_bytes` apart; the first `bytes` of each exist.
void gather(const uint8_t* values, int64_t row_bytes, int64_t bytes, int64_t columns, Words& words) {
  if (bytes >= 4) {
    for (int64_t column = 0; column < columns; ++column) std::memcpy(&words[column], values + column * row_bytes, 4);
  } else if (bytes > 0) {
    for (int64_t column = 0; column < columns; ++column) {
      std::memcpy(&words[column], values + column * row_bytes, static_cast<size_t>(bytes));
    }
  }
}

// A step of 6 bits of four words of values with a sign.
void pack_six(const Words (&values)[4], uint8_t* target) {
  Words packed[3];
  for (int column = 0; column < kTile; ++column) {
    uint32_t numbers[4];  // value + 32
    for (int i = 0; i < 4; ++i) numbers[i] = (values[i][column] ^ 0x20202020u) & 0x3f3f3f3fu;
    packed[2][column] = 0;
    for (int i = 0; i < 4; ++i) packed[2][column] |= (numbers[i] >> 4 & 0x03030303u) << 2 * i;
    for (int i = 0; i < 2; ++i) {
      packed[i][column] = (numbers[2 * i] & 0x0f0f0f0fu) | (numbers[2 * i + 1] & 0x0f0f0f0fu) << 4;
    }
  }
  std::memcpy(target, packed, sizeof(packed));
}

// `steps` steps of a tile: of `columns` rows at `values`, `row_bytes` apart, the first `bytes` of each exist.
void pack_tile(int num_bits, const uint8_t* values, int64_t row_bytes, int64_t bytes, int64_t columns, int64_t steps,
               uint8_t* target) {
  const int num_words = num_bits == 6 ? 4 : 1;
  for (int64_t step = 0; step < steps; ++step, target += step_bytes(num_bits)) {
    Words words[4] = {};
    for (int i = 0; i < num_words; ++i, values += 4, bytes -= 4) gather(values, row_bytes, bytes, columns, words[i]);
    if (num_bits == 6) {
      pack_six(words, target);
      continue;
    }
    for (uint32_t& word : words[0]) word = num_bits == 8 ? word ^ 0x80808080u : spread(word);  // signed to value + 128
    std::memcpy(target, words[0], kStepBytes);
  }
}

template <class T>
uint8_t* pack_numbers(const T* source, int64_t stride, int64_t columns, uint8_t* target) {
  T numbers[kPanel] = {};
  for (int64_t column = 0; column < columns; ++column) numbers[column] = source[column * stride];
  std::memcpy(target, numbers, sizeof(numbers));
  return target + sizeof(numbers);
}

// The scales of a block of 256 inputs of columns [first, first + columns), in two levels.
void pack_scales(const PackedQuantized& packed, const QuantizedTensors& weight, int64_t first, int64_t columns,
                 int64_t block, uint8_t* target) {
  const int64_t planes = packed.has_offsets ? 2 : 1, blocks = packed.num_in / kBlockInputs;
  const f16_t* tops = weight.block_scales + (first * blocks + block) * planes;
  for (int64_t plane = 0; plane < planes; ++plane) {
    target = pack_numbers(tops + plane, blocks * planes, columns, target);
  }
  for (int64_t group = 0; group < packed.block_groups(); ++group) {
    for (const void* numbers : {weight.scales, weight.offsets}) {
      if (!numbers) continue;
      const int64_t at = first * packed.groups + block * packed.block_groups() + group;
      target = pack_numbers(static_cast<const int8_t*>(numbers) + at, packed.groups, columns, target);
    }
  }
}

void pack_panel(const PackedQuantized& packed, const QuantizedTensors& weight, int64_t panel) {
  const int64_t first = panel * kPanel, row_bytes = packed.num_bits == 4 ? packed.num_in / 2 : packed.num_in;
  const int64_t columns = std::min<int64_t>(kPanel, packed.num_out - first), bytes = row_bytes / packed.groups;
  const int64_t steps = packed.steps(), most = piece_steps(packed.num_bits);
  const int64_t bytes_of_step = packed.num_bits == 6 ? 16 : 4;
  uint8_t* target = static_cast<uint8_t*>(const_cast<void*>(packed.data)) + panel * packed.panel_bytes();
  for (int64_t group = 0; group < packed.groups; ++group) {
    if (packed.two_levels && group % packed.block_groups() == 0) {
      pack_scales(packed, weight, first, columns, group / packed.block_groups(), target);
      target += packed.block_scales_bytes();
    }
    for (int64_t step = 0; step < steps; step += most) {
      const int64_t count = std::min(most, steps - step), at = step * bytes_of_step;
      for (int64_t column = 0; column < kPanel; column += kTile, target += count * step_bytes(packed.num_bits)) {
        const uint8_t* values = weight.values + (first + column) * row_bytes + group * bytes + at;
        const int64_t some = std::clamp<int64_t>(columns - column, 0, kTile);
        pack_tile(packed.num_bits, values, row_bytes, bytes - at, some, count, target);
      }
    }
    if (packed.two_levels) continue;
    const int64_t at = first * packed.groups + group;
    dispatch(packed.scale_dtype, [&](auto scale) {
      target = pack_numbers(static_cast<const decltype(scale)*>(weight.scales) + at, packed.groups, columns, target);
    });
    if (packed.has_offsets) {
      target = pack_numbers(static_cast<const float*>(weight.offsets) + at, packed.groups, columns, target);
    }
  }
}

// ---- products

// At the levels above AVX2 most processors have products of bytes (VNNI); those without use AVX2.
enum class Way { scalar, avx2, avx512vnni, amx };

Way way_of(const QuantizedCall& call) {
#if HYDRA_X86
  constexpr int64_t kMostVectorRows = 16;  // up to here, products are as fast as weights are read
  if (has_amx_int8() && call.result.rows > kMostVectorRows) return Way::amx;
  if (has_avx512_vnni()) return Way::avx512vnni;
  if (current_isa() >= Isa::avx2) return Way::avx2;
#endif
  return Way::scalar;
}

}  // namespace

void quantize_rows(const QuantizedCall& call, int64_t begin, int64_t end) {
#if HYDRA_X86
  if (way_of(call) >= Way::avx512vnni) return avx512vnni::quantize_rows(call, begin, end);
  if (way_of(call) == Way::avx2) return avx2::quantize_rows(call, begin, end);
#endif
  scalar::quantize_rows(call, begin, end);
}

void quantized_part(const QuantizedCall& call, const LinearPart& part) {
#if HYDRA_X86
  if (way_of(call) == Way::amx) return amx::quantized_part(call, part);
  if (way_of(call) == Way::avx512vnni) return avx512vnni::quantized_part(call, part);
  if (way_of(call) == Way::avx2) return avx2::quantized_part(call, part);
#endif
  scalar::quantized_part(call, part);
}

void reserve_rows(QuantizedCall& call, Scratch& numbers, Scratch& groups) {
  const int64_t rows = call.result.rows, sums = rows * call.weight.groups, places = sums * call.weight.parts();
  QuantizedRows& target = call.rows;
  target.number_bytes = way_of(call) == Way::avx2 && call.weight.num_bits == 8 ? 2 : 1;
  target.rows = rows;
  const int64_t stride = block_stride(call.weight.num_bits, target.number_bytes);
  const int64_t blocks = num_blocks(call.weight), bytes = blocks * rows * stride, planes = target.number_bytes == 1 ? 2 : 1;
  target.numbers = static_cast<int8_t*>(numbers.reserve(planes * bytes));
  target.low = target.numbers + (planes - 1) * bytes;
  target.steps = static_cast<float*>(groups.reserve(places * 13 + sums * 4 + blocks * rows));
  target.zeros = reinterpret_cast<int32_t*>(target.steps + places);
  target.low_zeros = target.zeros + places;
  target.row_sums = target.steps + 3 * places;
  target.has_low = reinterpret_cast<uint8_t*>(target.row_sums + sums);
  target.any_low = target.has_low + places;
}

QuantizedRows rows_from(const QuantizedRows& rows, const PackedQuantized& weight, int64_t row) {
  QuantizedRows result = rows;
  const int64_t bytes = row * block_stride(weight.num_bits, rows.number_bytes);
  result.numbers += bytes;
  result.low += bytes;
  result.steps += row;
  result.zeros += row;
  result.low_zeros += row;
  result.has_low += row;
  result.any_low += row;
  result.row_sums += row;
  return result;
}

void pack_quantized(const PackedQuantized& packed, const QuantizedTensors& weight) {
  parallel_for(packed.num_panels(), [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) pack_panel(packed, weight, panel);
  });
}

void linear_quantized(const QuantizedCall& call) {
  if (call.result.rows == 0 || call.weight.num_out == 0) return;
  static thread_local Scratch numbers, groups;
  constexpr int64_t kMostRows = 512;  // bounds the memory of their bytes
  const int64_t x_size = element_size(call.result.weight.dtype), out_size = element_size(call.result.out_dtype);
  for (int64_t begin = 0; begin < call.result.rows; begin += kMostRows) {
    QuantizedCall chunk = call;
    chunk.result.rows = std::min(kMostRows, call.result.rows - begin);
    chunk.result.x = static_cast<const char*>(call.result.x) + begin * call.result.x_stride * x_size;
    chunk.result.out = static_cast<char*>(call.result.out) + begin * call.result.out_stride * out_size;
    if (call.result.residual) {
      chunk.result.residual =
          static_cast<const char*>(call.result.residual) + begin * call.result.residual_stride * out_size;
    }
    reserve_rows(chunk, numbers, groups);
    for_quantized_rows(chunk, [&](int64_t first, int64_t last) { quantize_rows(chunk, first, last); });
    multiply_parts(chunk.weight, chunk.result.rows, [&](const LinearPart& part) { quantized_part(chunk, part); });
  }
}

}  // namespace hydra

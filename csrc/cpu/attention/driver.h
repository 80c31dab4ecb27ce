// The walk over key tiles with a running softmax, shared by all levels. A `Math` supplies how a key tile is packed and
// multiplied; the driver owns order, masks and state. Include after defining a level, see cpu/simd.h.
//
// A column is one query of one head: column c of a KV head is token c / group, head c % group of the group. Columns are
// worked on in tiles of kColumnTile, of which the last may be partly filled.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "cpu/attention/attention.h"
#include "cpu/scratch.h"
#include "cpu/simd.h"

namespace hydra::HYDRA_LEVEL {

HYDRA_INLINE vf fused_multiply_add(vf a, vf b, vf c) {
#if HYDRA_LANES == 16
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif HYDRA_LANES == 8
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// 2^x for x <= 0, relative error below 2e-7; exactly 1 at 0, exactly 0 below -125, NaN for NaN.
HYDRA_INLINE vf exp2_of(vf x) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low mantissa bits
  const vf shifted = x + magic;
  const vf fraction = x - (shifted - magic);
  vf value = splat(1.535336188319500e-4f);
  value = fused_multiply_add(value, fraction, splat(1.339887440266574e-3f));
  value = fused_multiply_add(value, fraction, splat(9.618437357674640e-3f));
  value = fused_multiply_add(value, fraction, splat(5.550332471162809e-2f));
  value = fused_multiply_add(value, fraction, splat(2.402264791363012e-1f));
  value = fused_multiply_add(value, fraction, splat(6.931472028550421e-1f));
  value = fused_multiply_add(value, fraction, splat(1.0f));
  value = (vf)((vi)value + ((vi)shifted << 23));  // the constant's own bits leave at the top
  value = x < splat(-125.0f) ? splat(0.0f) : value;
  return x != x ? x : value;
}

using Lanes = std::make_integer_sequence<int, kLanes>;

// Lanes [count, kLanes) become minus infinity.
template <int... kLane>
HYDRA_INLINE vf hide_behind(vf value, int count, std::integer_sequence<int, kLane...>) {
  const vi number = {kLane...};
  return number < (vi{} + count) ? value : splat(-INFINITY);
}

// In every lane the larger of itself and its partner, `kDistance` away.
template <int kDistance, int... kLane>
HYDRA_INLINE vf larger_of_pairs(vf value, std::integer_sequence<int, kLane...>) {
  constexpr vi kPartner = {(kLane ^ kDistance)...};
  const vf partner = __builtin_shuffle(value, kPartner);
  return partner > value ? partner : value;
}

HYDRA_INLINE float largest(vf value) {
  if constexpr (kLanes > 8) value = larger_of_pairs<8>(value, Lanes());
  if constexpr (kLanes > 4) value = larger_of_pairs<4>(value, Lanes());
  value = larger_of_pairs<2>(value, Lanes());
  return larger_of_pairs<1>(value, Lanes())[0];
}

// State of the columns of one KV head.
template <class Math>
struct Columns {
  typename Math::Element* q;  // [tile][kColumnTile][Math::query_width(D)], see Math::pack_query
  float* sums;                // [columns][sums_width]: running sum of weight * value
  float* top;                 // [columns]: largest score so far, not scaled
  float* total;               // [columns][kLanes]: running sum of weights
};

// Scores of one column with the first kGroups vectors of a key tile -> weights relative to the new largest score;
// rescales the column's state. The first `visible` keys count, the rest gets weight 0.
template <class Math, int kGroups>
HYDRA_INLINE void weigh_groups(const float* scores, typename Math::Element* weights, int visible, float factor,
                               float* sums, int64_t sums_width, float* top, float* total) {
  vf score[kGroups];
  vf best = splat(*top);
#pragma GCC unroll 16
  for (int i = 0; i < kGroups; ++i) score[i] = load(scores + i * kLanes);
  if (visible < kGroups * kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kGroups; ++i) score[i] = hide_behind(score[i], visible - i * kLanes, Lanes());
  }
#pragma GCC unroll 16
  for (int i = 0; i < kGroups; ++i) best = score[i] > best ? score[i] : best;
  const float new_top = largest(best);
  vf sum = load(total);
  if (new_top != *top) {
    const vf shrink = exp2_of(splat((*top - new_top) * factor));
    sum *= shrink;
    for (int64_t d = 0; d < sums_width; d += kLanes) store(sums + d, load(sums + d) * shrink);
    *top = new_top;
  }
  const vf scale = splat(factor), offset = splat(-new_top * factor);
#pragma GCC unroll 16
  for (int i = 0; i < kGroups; ++i) {
    const vf weight = exp2_of(fused_multiply_add(score[i], scale, offset));
    sum += weight;
    Math::store_weights(weights + i * kLanes, weight);
  }
  store(total, sum);
}

// Of the tile's `used` keys. Half tiles save work at the end of a context.
template <class Math>
HYDRA_INLINE void weigh_column(const float* scores, typename Math::Element* weights, int visible, int used,
                               float factor, float* sums, int64_t sums_width, float* top, float* total) {
  if (used == kKeyTile) {
    weigh_groups<Math, kKeyTile / kLanes>(scores, weights, visible, factor, sums, sums_width, top, total);
  } else {
    weigh_groups<Math, kKeyTile / 2 / kLanes>(scores, weights, visible, factor, sums, sums_width, top, total);
  }
}

template <class Math>
struct Driver {
  using Element = typename Math::Element;  // of packed queries, keys, values and weights
  using Stored = typename Math::Stored;    // of the tensors

  const AttentionCall& call;
  const AttentionTask& task;
  const Sequence& sequence;
  int64_t dim, group, columns, column_tiles, query_width, sums_width;
  float factor;  // scale / ln(2): weights are powers of two
  Columns<Math>* heads;
  Element* keys;
  Element* values;
  float* scores;
  Element* weights;
  const Stored* zeros;
  const char* k_rows[2][kKeyTile];  // this tile's and the next one's
  const char* v_rows[2][kKeyTile];

  HYDRA_TARGET Driver(const AttentionCall& c, const AttentionTask& t) : call(c), task(t), sequence(*t.sequence) {
    dim = call.head_dim;
    group = call.group();
    columns = (task.token_end - task.token_begin) * group;
    column_tiles = (columns + kColumnTile - 1) / kColumnTile;
    query_width = Math::query_width(dim);
    sums_width = Math::sums_width(dim);
    factor = call.scale * 1.44269504088896341f;
    reserve();
  }

  // Number of keys that column c sees.
  HYDRA_INLINE int64_t limit(int64_t column) const {
    if (!call.causal) return sequence.num_keys;
    return sequence.first_position + task.token_begin + column / group + 1;
  }

  HYDRA_TARGET void run() {
    Math::begin(static_cast<int>(std::min<int64_t>(columns, kColumnTile)));
    for (int64_t head = task.head_begin; head < task.head_end; ++head) load_queries(head);
    const int64_t num_keys = limit(columns - 1);
    find_rows(0, num_keys, 0);
    for (int64_t tile = 0, begin = 0; begin < num_keys; ++tile, begin += kKeyTile) {
      const int current = static_cast<int>(tile & 1);
      if (begin + kKeyTile < num_keys) find_rows(begin + kKeyTile, num_keys, current ^ 1);
      const int count = static_cast<int>(std::min<int64_t>(kKeyTile, num_keys - begin));
      for (int64_t head = task.head_begin; head < task.head_end; ++head) {
        if (begin + kKeyTile < num_keys) prefetch(head, num_keys - begin - kKeyTile, current ^ 1);
        visit(head, begin, count, current);
      }
    }
    for (int64_t head = task.head_begin; head < task.head_end; ++head) write_result(head);
    Math::end();
  }

 private:
  HYDRA_TARGET void reserve() {
    static thread_local Scratch scratch;
    const int64_t num_heads = task.head_end - task.head_begin, padded = column_tiles * kColumnTile;
    const auto aligned = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    const int64_t q_bytes = aligned(padded * query_width * static_cast<int64_t>(sizeof(Element)));
    const int64_t sums_bytes = padded * sums_width * 4, top_bytes = aligned(padded * 4);
    const int64_t total_bytes = padded * kLanes * 4;
    const int64_t keys_bytes = aligned(kKeyTile * query_width * static_cast<int64_t>(sizeof(Element)));
    const int64_t values_bytes = kKeyTile * sums_width * 4;
    const int64_t zero_bytes = aligned(kMaxHeadDim * static_cast<int64_t>(sizeof(Stored)));
    const int64_t heads_bytes = aligned(num_heads * static_cast<int64_t>(sizeof(Columns<Math>)));
    const int64_t tile_bytes = kColumnTile * kKeyTile * 4;
    char* memory = static_cast<char*>(
        scratch.reserve(heads_bytes + num_heads * (q_bytes + sums_bytes + top_bytes + total_bytes) + keys_bytes +
                        values_bytes + zero_bytes + 2 * tile_bytes));
    const auto take = [&memory](int64_t bytes) {
      char* piece = memory;
      memory += bytes;
      return piece;
    };
    heads = reinterpret_cast<Columns<Math>*>(take(heads_bytes));
    for (int64_t head = 0; head < num_heads; ++head) {
      heads[head].q = reinterpret_cast<Element*>(take(q_bytes));
      heads[head].sums = reinterpret_cast<float*>(take(sums_bytes));
      heads[head].top = reinterpret_cast<float*>(take(top_bytes));
      heads[head].total = reinterpret_cast<float*>(take(total_bytes));
    }
    keys = reinterpret_cast<Element*>(take(keys_bytes));
    values = reinterpret_cast<Element*>(take(values_bytes));
    scores = reinterpret_cast<float*>(take(tile_bytes));
    weights = reinterpret_cast<Element*>(take(tile_bytes));
    std::memset(static_cast<void*>(weights), 0, static_cast<size_t>(tile_bytes));  // rows behind the last column
    char* zero = take(zero_bytes);
    std::memset(zero, 0, static_cast<size_t>(zero_bytes));
    zeros = reinterpret_cast<const Stored*>(zero);
  }

  HYDRA_TARGET void load_queries(int64_t head) {
    Columns<Math>& state = heads[head - task.head_begin];
    const int64_t padded = column_tiles * kColumnTile;
    std::memset(static_cast<void*>(state.q), 0, static_cast<size_t>(padded * query_width) * sizeof(Element));
    std::memset(state.sums, 0, static_cast<size_t>(padded * sums_width) * 4);
    std::memset(state.total, 0, static_cast<size_t>(padded * kLanes) * 4);
    for (int64_t c = 0; c < columns; ++c) {
      state.top[c] = -INFINITY;
      const int64_t token = sequence.query_begin + task.token_begin + c / group;
      const Stored* row = static_cast<const Stored*>(call.q) + token * call.q_stride + (head * group + c % group) * dim;
      Math::pack_query(row, dim, state.q + c * query_width);
    }
  }

  // Addresses of head 0 of the tile's rows; none behind the sequence's last visible key.
  HYDRA_TARGET void find_rows(int64_t begin, int64_t num_keys, int slot) {
    const int64_t count = std::min<int64_t>(kKeyTile, num_keys - begin);
    if (!sequence.blocks) {
      for (int64_t j = 0; j < count; ++j) {
        k_rows[slot][j] = sequence.k + (begin + j) * sequence.k_row_bytes;
        v_rows[slot][j] = sequence.v + (begin + j) * sequence.v_row_bytes;
      }
      return;
    }
    int64_t block = begin / sequence.block_size, offset = begin % sequence.block_size;
    int64_t start = sequence.blocks[block] * sequence.block_bytes;
    for (int64_t j = 0; j < count; ++j, ++offset) {
      if (offset == sequence.block_size) {
        offset = 0;
        start = sequence.blocks[++block] * sequence.block_bytes;
      }
      k_rows[slot][j] = sequence.k + start + offset * sequence.k_row_bytes;
      v_rows[slot][j] = sequence.v + start + offset * sequence.v_row_bytes;
    }
  }

  // Asks for this head's share of the next tile: whole rows of all the task's heads, so memory is read in long pieces.
  HYDRA_INLINE void prefetch(int64_t head, int64_t num_left, int slot) const {
    const int64_t num_heads = task.head_end - task.head_begin, index = head - task.head_begin;
    const int64_t count = std::min<int64_t>(kKeyTile, num_left);
    const int64_t first = task.head_begin * dim * static_cast<int64_t>(sizeof(Stored));
    const int64_t bytes = num_heads * dim * static_cast<int64_t>(sizeof(Stored));
    for (int64_t j = count * index / num_heads; j < count * (index + 1) / num_heads; ++j) {
      for (int64_t at = first; at < first + bytes; at += 64) {
        __builtin_prefetch(k_rows[slot][j] + at, 0, 2);
        __builtin_prefetch(v_rows[slot][j] + at, 0, 2);
      }
    }
  }

  // One key tile of one head for all its columns.
  HYDRA_TARGET void visit(int64_t head, int64_t begin, int count, int slot) {
    const Stored* k[kKeyTile];
    const Stored* v[kKeyTile];
    const int used = (count + kKeyTile / 2 - 1) / (kKeyTile / 2) * (kKeyTile / 2);
    for (int j = 0; j < used; ++j) {
      // A slot behind the last key may hold anything, NaN included, which a weight of 0 would not silence.
      k[j] = j < count ? reinterpret_cast<const Stored*>(k_rows[slot][j]) + head * dim : zeros;
      v[j] = j < count ? reinterpret_cast<const Stored*>(v_rows[slot][j]) + head * dim : zeros;
    }
    Math::pack_keys(k, used, dim, keys);
    Math::pack_values(v, used, dim, values);
    Columns<Math>& state = heads[head - task.head_begin];
    for (int64_t first = 0; first < columns; first += kColumnTile) {
      const int rows = static_cast<int>(std::min<int64_t>(kColumnTile, columns - first));
      if (limit(first + rows - 1) <= begin) continue;
      Math::multiply_keys(state.q + first * query_width, rows, keys, used, dim, scores);
      for (int row = 0; row < rows; ++row) {
        const int64_t c = first + row;
        const int visible = static_cast<int>(std::max<int64_t>(0, std::min<int64_t>(limit(c) - begin, count)));
        weigh_column<Math>(scores + row * kKeyTile, weights + row * kKeyTile, visible, used, factor,
                           state.sums + c * sums_width, sums_width, state.top + c, state.total + c * kLanes);
      }
      Math::multiply_values(weights, rows, values, used, dim, state.sums + first * sums_width);
    }
  }

  HYDRA_TARGET void write_result(int64_t head) {
    Columns<Math>& state = heads[head - task.head_begin];
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t token = sequence.query_begin + task.token_begin + c / group;
      Stored* row = static_cast<Stored*>(call.out) + (token * call.num_heads + head * group + c % group) * dim;
      Math::store_result(state.sums + c * sums_width, 1.0f / sum(load(state.total + c * kLanes)), dim, row);
    }
  }
};

template <class Math>
HYDRA_TARGET void attend_with(const AttentionCall& call, const AttentionTask& task) {
  Driver<Math>(call, task).run();
}

}  // namespace hydra::HYDRA_LEVEL

// The walk over key tiles with a running softmax, shared by all levels. A `Math` supplies how a key tile is packed and
// multiplied; the driver owns order, masks and state. Include after defining a level, see cpu/simd.h.
// Columns (task_columns.h) are worked on in tiles of kColumnTile, of which the last may be partly filled.
#pragma once

#include <algorithm>

#include "cpu/attention/prefetch.h"
#include "cpu/attention/task_columns.h"
#include "cpu/scratch.h"

namespace hydra::HYDRA_LEVEL {

// Rows of all heads that are worked on before the next ones. Not more than scores need: rows that lie 4 KB apart, as 8
// heads of 128 floats do, compete for the same 8 ways of a first-level cache.
constexpr int kRowGroup = kLanes > 8 ? kLanes : 8;

// Rows in turns: blocks of a cache lie anywhere, and memory answers faster where several are read at once. So a group
// of rows takes kTurnKeys of each quarter of a tile, and this is the place of a key's row among the tile's rows.
constexpr int kTurns = 4, kQuarter = kKeyTile / kTurns, kTurnKeys = kRowGroup / kTurns;
constexpr int64_t place_in_turns(int64_t key) {
  const int64_t turn = key / kQuarter, inside = key % kQuarter;
  return inside / kTurnKeys * kRowGroup + turn * kTurnKeys + inside % kTurnKeys;
}

// The columns of one KV head, padded to whole tiles.
template <class Math>
struct HeadState {
  typename Math::Element* q;  // [columns][Math::query_width(D)]
  ColumnState columns;
  ColumnState span;  // of the current span, from the second one on
};

// One task on one thread.
template <class Math>
struct Driver : TaskColumns<Math> {
  using Base = TaskColumns<Math>;
  using Element = typename Math::Element;  // of packed queries, keys, values and weights
  using typename Base::Stored;
  using Cached = typename Math::Cached;  // of keys and values
  using Base::call, Base::task, Base::sequence, Base::dim, Base::group, Base::columns, Base::sums_width, Base::factor;

  int64_t column_tiles, query_width;
  int64_t key_begin, key_end;  // the keys of this task
  int64_t* limits;  // [columns]: how many keys a column sees
  HeadState<Math>* heads;
  Element* keys;
  Element* values;
  float* scores[2];
  Element* weights;
  const Cached* zeros;
  const char* k_rows[2][kKeyTile];  // head 0 of the rows of this tile and of the next one, in turn; see place_of
  const char* v_rows[2][kKeyTile];
  const float* scale_rows[2][2][kKeyTile];  // of keys and of values, head 0; only if rows are quantized
  float scales[2][kKeyTile];                // of one head's tile
  int next_slot = 0;
  int64_t next_count = 0;  // rows of the next tile

  HYDRA_TARGET Driver(const AttentionCall& c, const AttentionTask& t) : Base(c, t) {
    column_tiles = (columns + kColumnTile - 1) / kColumnTile;
    query_width = Math::query_width(dim);
    key_begin = task.partials ? task.span * kSpanKeys : 0;
    key_end = Base::limit(columns - 1);
    if (task.partials) key_end = std::min(key_end, key_begin + kSpanKeys);
    reserve();
  }

  HYDRA_TARGET void run() {
    Math::begin(static_cast<int>(std::min<int64_t>(columns, kColumnTile)));
    for (int64_t c = 0; c < columns; ++c) limits[c] = Base::limit(c);
    find_rows(key_begin, 0);
    next_count = std::min<int64_t>(kKeyTile, key_end - key_begin);
    if (!Math::kByRows) {
      for (int64_t head = task.head_begin; head < task.head_end; ++head) share_of(head).rest();
    }
    for (int64_t head = task.head_begin; head < task.head_end; ++head) load_queries(head);
    for (int64_t tile = 0, begin = key_begin; begin < key_end; ++tile, begin += kKeyTile) {
      const int current = static_cast<int>(tile & 1);
      next_slot = current ^ 1;
      next_count = std::max<int64_t>(0, std::min<int64_t>(kKeyTile, key_end - begin - kKeyTile));
      if (next_count) find_rows(begin + kKeyTile, next_slot);
      if (Math::kByRows && !next_count) repeat_tile(current);
      const int count = static_cast<int>(std::min<int64_t>(kKeyTile, key_end - begin));
      if constexpr (Math::kByRows) {
        visit_rows(begin, count, current);
      } else {
        for (int64_t head = task.head_begin; head < task.head_end; ++head) visit(head, begin, count, current);
      }
      if (in_later_span(begin) && (begin + kKeyTile >= key_end || (begin + kKeyTile) % kSpanKeys == 0)) {
        for (int64_t head = task.head_begin; head < task.head_end; ++head) merge_span(head, begin);
      }
    }
    for (int64_t head = task.head_begin; head < task.head_end; ++head) {
      task.partials ? write_partial(head) : write_result(head);
    }
    Math::end();
  }

 private:
  // The prefetch distance for rows: it covers the latency of memory.
  static constexpr int64_t kAheadBytes = 32 << 10;
  static constexpr int kTurnsTaken = Math::kInTurns ? kTurns : 1;  // first key of a group: its first row / this

  // True if the tile that starts at `begin` belongs to the second span of this task or to a later one.
  HYDRA_INLINE bool in_later_span(int64_t begin) const { return call.causal && begin >= key_begin + kSpanKeys; }

  HYDRA_TARGET void reserve() {
    static thread_local Scratch scratch;
    const int64_t num_heads = task.head_end - task.head_begin, padded = column_tiles * kColumnTile;
    const auto aligned = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    const int64_t q_bytes = aligned(padded * query_width * static_cast<int64_t>(sizeof(Element)));
    const int64_t sums_bytes = padded * sums_width * 4, top_bytes = aligned(padded * 4);
    const int64_t total_bytes = padded * kLanes * 4;
    const int64_t packs = Math::kByRows ? 0 : 1, score_tiles = Math::kByRows ? num_heads : 1;
    const int64_t keys_bytes = packs * aligned(kKeyTile * query_width * static_cast<int64_t>(sizeof(Element)));
    const int64_t values_bytes = packs * kKeyTile * sums_width * 4;
    const int64_t zero_bytes = aligned(kMaxHeadDim * static_cast<int64_t>(sizeof(Cached)));
    const int64_t limits_bytes = aligned(columns * 8);
    const int64_t heads_bytes = aligned(num_heads * static_cast<int64_t>(sizeof(HeadState<Math>)));
    const int64_t tile_bytes = score_tiles * std::min<int64_t>(padded, kColumnTile) * kKeyTile * 4;
    const int64_t states = in_later_span(key_end - 1) ? 2 : 1;
    const int64_t head_bytes = q_bytes + states * (sums_bytes + top_bytes + total_bytes);
    char* memory = static_cast<char*>(scratch.reserve(limits_bytes + heads_bytes + num_heads * head_bytes + keys_bytes +
                                                      values_bytes + zero_bytes + 3 * tile_bytes));
    const auto take = [&memory](int64_t bytes) {
      char* piece = memory;
      memory += bytes;
      return piece;
    };
    limits = reinterpret_cast<int64_t*>(take(limits_bytes));
    heads = reinterpret_cast<HeadState<Math>*>(take(heads_bytes));
    for (int64_t head = 0; head < num_heads; ++head) {
      heads[head].q = reinterpret_cast<Element*>(take(q_bytes));
      for (int64_t i = 0; i < states; ++i) {
        ColumnState& state = i == 0 ? heads[head].columns : heads[head].span;
        state.sums_width = sums_width;
        state.sums = reinterpret_cast<float*>(take(sums_bytes));
        state.top = reinterpret_cast<float*>(take(top_bytes));
        state.total = reinterpret_cast<float*>(take(total_bytes));
        clear(state, padded);
      }
    }
    keys = reinterpret_cast<Element*>(take(keys_bytes));
    values = reinterpret_cast<Element*>(take(values_bytes));
    scores[0] = reinterpret_cast<float*>(take(tile_bytes));
    scores[1] = reinterpret_cast<float*>(take(tile_bytes));
    weights = reinterpret_cast<Element*>(take(tile_bytes));
    std::memset(static_cast<void*>(weights), 0, static_cast<size_t>(tile_bytes));  // rows after the last column
    char* zero = take(zero_bytes);
    std::memset(zero, 0, static_cast<size_t>(zero_bytes));
    zeros = reinterpret_cast<const Cached*>(zero);
  }

  HYDRA_TARGET void load_queries(int64_t head) {
    HeadState<Math>& state = heads[head - task.head_begin];
    const int64_t padded = column_tiles * kColumnTile;
    std::memset(static_cast<void*>(state.q), 0, static_cast<size_t>(padded * query_width) * sizeof(Element));
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t token = sequence.query_begin + task.token_begin + c / group;
      const Stored* row = static_cast<const Stored*>(call.q) + token * call.q_stride + (head * group + c % group) * dim;
      Math::pack_query(row, dim, c, state.q);
    }
  }

  // Addresses of head 0 of the tile's rows; none after the task's last key.
  HYDRA_TARGET void find_rows(int64_t begin, int slot) {
    const int64_t count = std::min<int64_t>(kKeyTile, key_end - begin);
    point_at_keys(begin, count, slot);
    if (!Math::kByRows) return;
    const char *last_k = k_rows[slot][place_of(count - 1)], *last_v = v_rows[slot][place_of(count - 1)];
    for (int64_t j = count; j < kKeyTile; ++j) {
      k_rows[slot][place_of(j)] = last_k;
      v_rows[slot][place_of(j)] = last_v;
    }
  }

  // The index of a key's row in k_rows and v_rows.
  HYDRA_INLINE static int64_t place_of(int64_t key) {
    if constexpr (Math::kInTurns) return place_in_turns(key);
    return key;
  }

  HYDRA_TARGET void point_at_keys(int64_t begin, int64_t count, int slot) {
    if (!sequence.blocks) {
      for (int64_t j = 0; j < count; ++j) {
        k_rows[slot][place_of(j)] = sequence.k + (begin + j) * sequence.k_row_bytes;
        v_rows[slot][place_of(j)] = sequence.v + (begin + j) * sequence.v_row_bytes;
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
      k_rows[slot][place_of(j)] = sequence.k + start + offset * sequence.k_row_bytes;
      v_rows[slot][place_of(j)] = sequence.v + start + offset * sequence.v_row_bytes;
      if (Math::kScaled) {
        scale_rows[slot][0][j] = reinterpret_cast<const float*>(sequence.k + start + sequence.scales_offset) + offset;
        scale_rows[slot][1][j] = reinterpret_cast<const float*>(sequence.v + start + sequence.scales_offset) + offset;
      }
    }
  }

  // Collects the scales of one head's tile; 0 for padding keys.
  HYDRA_TARGET void find_scales(int64_t head, int count, int slot) {
    if (!Math::kScaled) return;
    for (int x = 0; x < 2; ++x) {
      for (int j = 0; j < count; ++j) scales[x][j] = scale_rows[slot][x][j][head * sequence.block_size];
      std::fill(scales[x] + count, scales[x] + kKeyTile, 0.0f);
    }
  }

  // Repeats the last tile as the next one: addresses that can be prefetched.
  HYDRA_TARGET void repeat_tile(int slot) {
    std::copy_n(k_rows[slot], kKeyTile, k_rows[slot ^ 1]);
    std::copy_n(v_rows[slot], kKeyTile, v_rows[slot ^ 1]);
  }

  // This head's share of the next tile: the heads share its rows among them, a row being all the task's heads side by
  // side, so that memory is read in long pieces.
  HYDRA_INLINE Prefetcher share_of(int64_t head) const {
    const int64_t num_heads = task.head_end - task.head_begin, index = head - task.head_begin;
    const int64_t first_row = next_count * index / num_heads, end_row = next_count * (index + 1) / num_heads;
    const int64_t head_bytes = dim * static_cast<int64_t>(sizeof(Cached));
    return Prefetcher(k_rows[next_slot] + first_row, v_rows[next_slot] + first_row, end_row - first_row,
                      task.head_begin * head_bytes, task.head_end * head_bytes);
  }

  // One key tile of one head for all its columns.
  HYDRA_TARGET void visit(int64_t head, int64_t begin, int count, int slot) {
    const Cached* k[kKeyTile];
    const Cached* v[kKeyTile];
    const int used = count > kKeyTile / 2 ? kKeyTile : kKeyTile / 2;  // half tiles save work at the end of a context
    for (int j = 0; j < used; ++j) {
      // A slot after the last key may hold anything, also NaN, which a weight of 0 would not cancel.
      k[j] = j < count ? reinterpret_cast<const Cached*>(k_rows[slot][j]) + head * dim : zeros;
      v[j] = j < count ? reinterpret_cast<const Cached*>(v_rows[slot][j]) + head * dim : zeros;
    }
    find_scales(head, count, slot);
    Prefetcher next = share_of(head);
    const int64_t some = next.lines() / 8;
    const auto key_tile = Math::pack_keys(k, used, dim, keys);
    next.lines(some);
    Math::pack_values(v, used, dim, values, next);
    HeadState<Math>& state = heads[head - task.head_begin];
    int64_t first = 0;
    while (limits[std::min(first + kColumnTile, columns) - 1] <= begin) first += kColumnTile;
    // The next columns' scores are on their way while these are weighed.
    score(state, key_tile, first, used, scores[0]);
    next.lines(some);
    for (int parity = 0; first < columns; first += kColumnTile, parity ^= 1) {
      if (first + kColumnTile < columns) score(state, key_tile, first + kColumnTile, used, scores[parity ^ 1]);
      add_values(state, first, begin, used, scores[parity]);
    }
    next.rest();
  }

  // One key tile of all heads, up to kColumnTile columns each: keys and then values in the order in which they lie in
  // memory, a few rows at a time with all their heads. Rows that lie `ahead` of them are asked for meanwhile.
  HYDRA_TARGET void visit_rows(int64_t begin, int count, int slot) {
    const int64_t head_bytes = dim * static_cast<int64_t>(sizeof(Cached)), tile = columns * kKeyTile;
    const int64_t row_bytes = (task.head_end - task.head_begin) * head_bytes;
    const int64_t ahead = std::clamp<int64_t>(kAheadBytes / row_bytes / kRowGroup, 1, kKeyTile / kRowGroup) * kRowGroup;
    const int end = std::min(kTurnsTaken * count, kKeyTile);  // of the groups with keys
    for (int first = 0; first < end; first += kRowGroup) {
      for (int64_t head = task.head_begin; head < task.head_end; ++head) {
        const int64_t index = head - task.head_begin, offset = head * head_bytes;
        ask_for(k_rows[0] + (slot * kKeyTile + first + ahead) % (2 * kKeyTile), head, head_bytes);
        Math::multiply_keys(heads[index].q, static_cast<int>(columns), k_rows[slot] + first, offset, dim,
                            scores[0] + index * tile + first / kTurnsTaken);
      }
    }
    // kInTurns multiplies every quarter, so all weights are computed: 0 after the last key.
    const int used = Math::kInTurns || count > kKeyTile / 2 ? kKeyTile : kKeyTile / 2;
    for (int64_t head = task.head_begin; head < task.head_end; ++head) {
      const int64_t index = head - task.head_begin;
      find_scales(head, count, slot);
      weigh_columns(heads[index], 0, begin, used, scores[0] + index * tile, weights + index * tile);
    }
    for (int first = 0; first < end; first += kRowGroup) {
      for (int64_t head = task.head_begin; head < task.head_end; ++head) {
        const int64_t index = head - task.head_begin, offset = head * head_bytes;
        ask_for(v_rows[0] + (slot * kKeyTile + first + ahead) % (2 * kKeyTile), head, head_bytes);
        Math::multiply_values(weights + index * tile + first / kTurnsTaken, static_cast<int>(columns),
                              v_rows[slot] + first, offset, std::min(kRowGroup, end - first), dim,
                              state_of(heads[index], begin).sums);
      }
    }
  }

  // Prefetches this head's share of a group of rows. Many heads take whole rows in turn, which memory serves faster
  // than a piece of every row for every head; few heads take such pieces.
  HYDRA_INLINE void ask_for(const char* const* rows, int64_t head, int64_t head_bytes) const {
    const int64_t begin = task.head_begin * head_bytes, row_bytes = task.head_end * head_bytes - begin;
    const int64_t share = kRowGroup * head_bytes;
    if (share > row_bytes) {
      for (int j = 0; j < kRowGroup; ++j) ask_for(rows[j] + head * head_bytes, head_bytes);
      return;
    }
    int64_t at = (head - task.head_begin) * share;
    for (; at >= row_bytes; at -= row_bytes) ++rows;
    const int64_t first = std::min(share, row_bytes - at);
    ask_for(rows[0] + begin + at, first);
    if (first < share) ask_for(rows[1] + begin, share - first);
  }

  HYDRA_INLINE static void ask_for(const char* place, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(place + line, 0, 2);
  }

  HYDRA_INLINE const ColumnState& state_of(const HeadState<Math>& head, int64_t begin) const {
    return in_later_span(begin) ? head.span : head.columns;
  }

  HYDRA_INLINE int rows_from(int64_t first) const {
    return static_cast<int>(std::min<int64_t>(kColumnTile, columns - first));
  }

  template <class Keys>
  HYDRA_INLINE void score(const HeadState<Math>& state, const Keys& key_tile, int64_t first, int used,
                          float* target) const {
    Math::multiply_keys(state.q + first * query_width, rows_from(first), key_tile, used, dim, target);
  }

  // Adds the tile's values, weighted, to the sums of columns [first, first + rows).
  HYDRA_INLINE void add_values(const HeadState<Math>& state, int64_t first, int64_t begin, int used, float* tile) {
    const ColumnState tile_state = weigh_columns(state, first, begin, used, tile, weights);
    Math::multiply_values(weights, rows_from(first), values, used, dim, tile_state.sums);
  }

  HYDRA_INLINE ColumnState weigh_columns(const HeadState<Math>& state, int64_t first, int64_t begin, int used,
                                         float* tile, Element* target) const {
    const int rows = rows_from(first);
    int visible[kColumnTile];
    const bool all = limits[first] >= begin + used;
    if (!all) {
      for (int row = 0; row < rows; ++row) {
        visible[row] = static_cast<int>(std::max<int64_t>(0, std::min<int64_t>(limits[first + row] - begin, used)));
      }
    }
    const ColumnState& all_columns = state_of(state, begin);
    const ColumnState tile_state{all_columns.sums + first * sums_width, sums_width, all_columns.top + first,
                                 all_columns.total + first * kLanes};
    if (Math::kScaled) scale_rows_by(tile, rows, used, scales[0]);
    weigh<Math>(tile, target, all ? nullptr : visible, rows, used, factor, tile_state);
    if constexpr (Math::kScaled) scale_rows_by(target, rows, used, scales[1]);
    return tile_state;
  }

  // Merges the span whose last tile starts at `begin` into the state. Columns that see no key of the span are skipped.
  HYDRA_TARGET void merge_span(int64_t head, int64_t begin) {
    HeadState<Math>& state = heads[head - task.head_begin];
    const ColumnState &merged = state.columns, &span = state.span;
    const int64_t span_begin = begin / kSpanKeys * kSpanKeys;
    int64_t c = 0;
    while (limits[c] <= span_begin) ++c;
    for (; c < columns; ++c) {
      merge_column(merged.sums + c * sums_width, merged.total + c * kLanes, merged.top + c, span.sums + c * sums_width,
                   span.total + c * kLanes, span.top[c], sums_width, factor);
    }
    if (begin + kKeyTile < key_end) clear(span, column_tiles * kColumnTile);
  }

  HYDRA_TARGET static void clear(const ColumnState& state, int64_t padded) {
    std::memset(state.sums, 0, static_cast<size_t>(padded * state.sums_width) * 4);
    std::memset(state.total, 0, static_cast<size_t>(padded * kLanes) * 4);
    std::fill(state.top, state.top + padded, -INFINITY);
  }

  HYDRA_TARGET void write_result(int64_t head) {
    const ColumnState& state = heads[head - task.head_begin].columns;
    for (int64_t c = 0; c < columns; ++c) {
      Math::store_result(state.sums + c * sums_width, 1.0f / sum(load(state.total + c * kLanes)), dim,
                         Base::result(head, c));
    }
  }

  HYDRA_TARGET void write_partial(int64_t head) {
    const ColumnState& state = heads[head - task.head_begin].columns;
    for (int64_t c = 0; c < columns; ++c) {
      float* sums = task.partials + (head * columns + c) * partial_width(dim);
      float* total = sums + partial_sums(dim);
      std::memcpy(sums, state.sums + c * sums_width, static_cast<size_t>(sums_width) * 4);
      std::memcpy(total, state.total + c * kLanes, kLanes * 4);
      total[kPartialTotal] = state.top[c];
    }
  }
};

template <class Math>
HYDRA_TARGET void attend_with(const AttentionCall& call, const AttentionTask& task) {
  Driver<Math>(call, task).run();
}

}  // namespace hydra::HYDRA_LEVEL

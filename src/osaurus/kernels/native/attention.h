// Attention of query rows over key and value blocks, in the online form of FlashAttention (Dao et
// al. 2022): for each piece of 16 or 32 tokens, oldest first, scores, running maximum, weights
// rounded to bfloat16, weighted values. Parts of PART_TOKENS are summed by themselves and joined.
#pragma once
#include "run.h"
#include "simd.h"

namespace {
using namespace osaurus;

struct AttendShape {
  int heads, kv_heads, dim, v_dim, block_tokens, window;  // window 0: none
  float softcap;                                          // 0: none
};

constexpr int MAX_PIECE = 32;

// A part's outcome for one query: weighted values, the largest score, the sum of weights. While
// the part is read, weights are summed lane by lane in `totals`.
struct Partial {
  float* values;
  float *best, *total, *totals;
};

// Tokens [low, high) of a piece that a query may read.
struct Reader {
  int query, low, high;
};

// A head's tokens in a block are consecutive, but blocks lie anywhere and the hardware does not
// see the next piece coming: it is asked for row by row while this one is unpacked.
INLINE void fetch_row(const uint16_t* row, int numbers) {
  for (int i = 0; i < numbers; i += 32) __builtin_prefetch(row + i, 0, 2);
}

template <int NV>
void unpack_keys(const uint16_t* rows, const uint16_t* next, int64_t stride, int dim, Pair* out) {
#if defined(__AVX512BF16__)
  __m512i t[16], u[16];
  for (int v = 0; v < NV; ++v)
    for (int d = 0; d < dim; d += 32) {
      bool half = dim - d < 32;  // sixteen numbers are left
      for (int i = 0; i < 16; ++i) __builtin_prefetch(next + (v * 16 + i) * stride + d, 0, 2);
      for (int i = 0; i < 16; ++i) {
        const uint16_t* row = rows + (v * 16 + i) * stride + d;
        t[i] = half ? _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)row)) : _mm512_loadu_si512(row);
      }
      // A 16 x 16 transposition of dwords.
      for (int i = 0; i < 16; i += 2) {
        u[i] = _mm512_unpacklo_epi32(t[i], t[i + 1]);
        u[i + 1] = _mm512_unpackhi_epi32(t[i], t[i + 1]);
      }
      for (int i = 0; i < 16; i += 4) {
        t[i] = _mm512_unpacklo_epi64(u[i], u[i + 2]);
        t[i + 1] = _mm512_unpackhi_epi64(u[i], u[i + 2]);
        t[i + 2] = _mm512_unpacklo_epi64(u[i + 1], u[i + 3]);
        t[i + 3] = _mm512_unpackhi_epi64(u[i + 1], u[i + 3]);
      }
      for (int i = 0; i < 4; ++i) {
        u[i] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88);
        u[i + 4] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
        u[i + 8] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
        u[i + 12] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
      }
      for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(u[i], u[i + 8], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(u[i + 4], u[i + 12], 0x88);
        t[i + 8] = _mm512_shuffle_i32x4(u[i], u[i + 8], 0xdd);
        t[i + 12] = _mm512_shuffle_i32x4(u[i + 4], u[i + 12], 0xdd);
      }
      for (int i = 0; i < (half ? 8 : 16); ++i) out[(d / 2 + i) * NV + v].v = t[i];
    }
#else
  for (int i = 0; i < NV * 16; ++i) fetch_row(next + i * stride, dim);
  for (int v = 0; v < NV; ++v)
    for (int d = 0; d < dim; d += 2) {
      uint32_t both[16];
      for (int i = 0; i < 16; ++i) std::memcpy(&both[i], rows + (v * 16 + i) * stride + d, 4);
      out[d / 2 * NV + v] = bfloat_pair(load_u32(both));
    }
#endif
}

template <int NV>
void unpack_values(const uint16_t* rows, const uint16_t* next, int64_t stride, int dim, Pair* out) {
  for (int i = 0; i < NV * 8; ++i) {
    fetch_row(next + 2 * i * stride, dim);
    fetch_row(next + (2 * i + 1) * stride, dim);
    for (int d = 0; d < dim; d += LANES) {
      U even = widen(rows + 2 * i * stride + d), odd = widen(rows + (2 * i + 1) * stride + d);
      out[i * (dim / LANES) + d / LANES] = bfloat_pair(even | (odd << 16));
    }
  }
}

// Scores of QB queries for NV * 16 tokens.
template <int NV, int QB>
INLINE void score(const Pair* keys, const Input* const* q, int dim, float (*out)[MAX_PIECE]) {
  F acc[QB][NV];
  for (int i = 0; i < QB; ++i)
    for (int v = 0; v < NV; ++v) acc[i][v] = zero();
  for (int d = 0; d < dim / 2; ++d) {
    Pair key[NV];
    for (int v = 0; v < NV; ++v) key[v] = keys[d * NV + v];
    for (int i = 0; i < QB; ++i) {
      InputPair x = pair_at(q[i], 2 * d);
      for (int v = 0; v < NV; ++v) acc[i][v] = dot(acc[i][v], key[v], x);
    }
  }
  for (int i = 0; i < QB; ++i)
    for (int v = 0; v < NV; ++v) store(out[i] + v * LANES, acc[i][v]);
}

// values = values * keep + weights * V for QB queries and DV * 16 columns.
template <int NV, int QB, int DV>
INLINE void weigh(const Pair* values, int columns, Input (*weights)[MAX_PIECE], const float* keep,
                  float* const* out) {
  F acc[QB][DV];
  for (int i = 0; i < QB; ++i)
    for (int d = 0; d < DV; ++d) acc[i][d] = load(out[i] + d * LANES) * set1(keep[i]);
  for (int t = 0; t < NV * 8; ++t) {
    Pair v[DV];
    for (int d = 0; d < DV; ++d) v[d] = values[t * columns + d];
    for (int i = 0; i < QB; ++i) {
      InputPair w = pair_at(weights[i], 2 * t);
      for (int d = 0; d < DV; ++d) acc[i][d] = dot(acc[i][d], v[d], w);
    }
  }
  for (int i = 0; i < QB; ++i)
    for (int d = 0; d < DV; ++d) store(out[i] + d * LANES, acc[i][d]);
}

template <int NV, int QB>
void read_piece(const AttendShape& s, const Pair* keys, const Pair* values, const Reader* readers,
                const Input* const* q, const Partial* partials) {
  alignas(64) float scores[QB][MAX_PIECE];
  alignas(64) Input weights[QB][MAX_PIECE];
  alignas(64) float keep[LANES] = {};
  const Input* queries[QB];
  float* out[QB];
  for (int i = 0; i < QB; ++i) {
    queries[i] = q[readers[i].query];
    out[i] = partials[readers[i].query].values;
  }
  score<NV, QB>(keys, queries, s.dim, scores);
  for (int i = 0; i < QB; ++i) {
    if (s.softcap != 0)
      for (int v = 0; v < NV; ++v) {
        F capped = tanh(load(scores[i] + v * LANES) / set1(s.softcap)) * set1(s.softcap);
        store(scores[i] + v * LANES, capped);
      }
    for (int t = 0; t < readers[i].low; ++t) scores[i][t] = -INFINITY;
    for (int t = readers[i].high; t < NV * LANES; ++t) scores[i][t] = -INFINITY;
    F largest_yet = load(scores[i]);
    if (NV == 2) largest_yet = max(largest_yet, load(scores[i] + LANES));
    const Partial& partial = partials[readers[i].query];
    float best = largest(largest_yet);
    best = *partial.best > best ? *partial.best : best;
    keep[i] = *partial.best - best;
    *partial.best = best;
  }
  store(keep, exp(load(keep)));
  for (int i = 0; i < QB; ++i) {
    const Partial& partial = partials[readers[i].query];
    F total = zero();
    for (int v = 0; v < NV; ++v) {
      F weight = exp(load(scores[i] + v * LANES) - set1(*partial.best));
      store_inputs(weights[i] + v * LANES, weight);
      total = total + load_inputs(weights[i] + v * LANES);
    }
    store(partial.totals, fma(load(partial.totals), set1(keep[i]), total));
  }
  int columns = s.v_dim / LANES, d = 0;
  for (; d + 4 <= columns; d += 4) {
    weigh<NV, QB, 4>(values + d, columns, weights, keep, out);
    for (int i = 0; i < QB; ++i) out[i] += 4 * LANES;
  }
  for (; d < columns; ++d) {
    weigh<NV, QB, 1>(values + d, columns, weights, keep, out);
    for (int i = 0; i < QB; ++i) out[i] += LANES;
  }
}

// Join a later part to what came before it: both are [values, best, total].
void join(float* values, float* best, float* total, const Partial& later, int v_dim) {
  float largest_of_both = *later.best > *best ? *later.best : *best;
  alignas(64) float factors[LANES] = {*best - largest_of_both, *later.best - largest_of_both};
  store(factors, exp(load(factors)));
  F before = set1(factors[0]), after = set1(factors[1]);
  for (int d = 0; d < v_dim; d += LANES)
    store(values + d, fma(load(later.values + d), after, load(values + d) * before));
  *total = *total * factors[0] + *later.total * factors[1];
  *best = largest_of_both;
}

INLINE int64_t partial_floats(int v_dim) { return v_dim + 2 * LANES; }
INLINE Partial partial_at(float* p, int v_dim) {
  return Partial{p, p + v_dim, p + v_dim + 1, p + v_dim + LANES};
}
INLINE void clear(const Partial& p, int v_dim) {
  for (int d = 0; d < v_dim; d += LANES) store(p.values + d, zero());
  store(p.totals, zero());
  *p.best = -INFINITY;
  *p.total = 0;
}

// One kv head's part of an item. `q` is the first row's first query of that head; `slots[r]` is
// where row r's parts go, for each part `heads * partial_floats` floats, or for many parts at once
// one such.
template <int NV>
void attend_item(const AttendShape& s, const Span& span, const AttendItem& item, const int32_t* table,
                 int first_block, const uint16_t* storage, int kv_head, const Input* q, int64_t q_row,
                 float* const* slots, void* scratch) {
  constexpr int PIECE = NV * LANES;
  int per_kv = s.heads / s.kv_heads, queries = item.rows * per_kv;
  Pair* keys = (Pair*)scratch;
  Pair* values = keys + s.dim / 2 * NV;
  float* own = (float*)(values + NV * 8 * (s.v_dim / LANES));
  int64_t width = s.dim + s.v_dim, floats = partial_floats(s.v_dim);
  int64_t head_stride = (int64_t)s.block_tokens * width, block_stride = s.kv_heads * head_stride;
  int first_position = span.first_position + (item.row - span.start);
  Reader readers[TILE_QUERIES];
  Partial partials[TILE_QUERIES];
  bool joins = item.end_part - item.first_part > 1;
  // Queries of all rows one stride apart: row r's query g is at q + r * q_row + g * dim.
  const Input* at[TILE_QUERIES];
  for (int i = 0; i < queries; ++i) at[i] = q + i / per_kv * q_row + i % per_kv * s.dim;

  for (int part = item.first_part; part < item.end_part; ++part) {
    for (int i = 0; i < queries; ++i) {
      float* slot = slots[i / per_kv] + (int64_t)(kv_head * per_kv + i % per_kv) * floats;
      partials[i] = partial_at(joins ? own + i * floats : slot, s.v_dim);
      clear(partials[i], s.v_dim);
      if (joins && part == item.first_part) clear(partial_at(slot, s.v_dim), s.v_dim);
    }
    int oldest = s.window ? first_position - s.window + 1 : 0;
    int start = part * PART_TOKENS, last = first_position + item.rows - 1;
    if (start < oldest) start = oldest / PIECE * PIECE;
    int end = (part + 1) * PART_TOKENS < last + 1 ? (part + 1) * PART_TOKENS : last + 1;
    for (int token = start; token < end; token += PIECE) {
      int count = 0;
      for (int r = 0; r < item.rows; ++r) {
        int position = first_position + r;
        int low = s.window ? position - s.window + 1 - token : 0, high = position + 1 - token;
        low = low < 0 ? 0 : low;
        high = high > PIECE ? PIECE : high;
        if (low >= high) continue;
        for (int g = 0; g < per_kv; ++g) readers[count++] = Reader{r * per_kv + g, low, high};
      }
      if (!count) continue;
      auto piece_at = [&](int t) {
        int64_t block = table[t / s.block_tokens - first_block];
        return storage + block * block_stride + kv_head * head_stride + (int64_t)(t % s.block_tokens) * width;
      };
      const uint16_t* rows = piece_at(token);
      const uint16_t* next = token + PIECE < end ? piece_at(token + PIECE) : rows;
      unpack_keys<NV>(rows, next, width, s.dim, keys);
      unpack_values<NV>(rows + s.dim, next + s.dim, width, s.v_dim, values);
      for (int i = 0, run; i < count; i += run) {
        run = count - i < 6 ? count - i : 6;
        switch (run) {
          case 6: read_piece<NV, 6>(s, keys, values, readers + i, at, partials); break;
          case 5: read_piece<NV, 5>(s, keys, values, readers + i, at, partials); break;
          case 4: read_piece<NV, 4>(s, keys, values, readers + i, at, partials); break;
          case 3: read_piece<NV, 3>(s, keys, values, readers + i, at, partials); break;
          case 2: read_piece<NV, 2>(s, keys, values, readers + i, at, partials); break;
          default: read_piece<NV, 1>(s, keys, values, readers + i, at, partials);
        }
      }
    }
    for (int i = 0; i < queries; ++i) *partials[i].total = sum(load(partials[i].totals));
    if (!joins) continue;
    for (int i = 0; i < queries; ++i) {
      if (*partials[i].total == 0 && *partials[i].best == -INFINITY) continue;  // it read nothing here
      float* slot = slots[i / per_kv] + (int64_t)(kv_head * per_kv + i % per_kv) * floats;
      Partial total = partial_at(slot, s.v_dim);
      join(total.values, total.best, total.total, partials[i], s.v_dim);
    }
  }
}

// Join the parts of one row's head, oldest first, add the sink and divide.
void finish_head(float* parts, int count, int64_t part_stride, int v_dim, const float* sink, float* out) {
  float best = -INFINITY, total = 0;
  for (int d = 0; d < v_dim; d += LANES) store(out + d, zero());
  for (int i = 0; i < count; ++i) {
    Partial part = partial_at(parts + i * part_stride, v_dim);
    if (*part.total == 0 && *part.best == -INFINITY) continue;
    join(out, &best, &total, part, v_dim);
  }
  if (sink) {
    float largest_of_both = *sink > best ? *sink : best;
    alignas(64) float factors[LANES] = {best - largest_of_both, *sink - largest_of_both};
    store(factors, exp(load(factors)));
    total = total * factors[0] + factors[1];
    for (int d = 0; d < v_dim; d += LANES) store(out + d, load(out + d) * set1(factors[0]));
  }
  F divisor = set1(total);
  for (int d = 0; d < v_dim; d += LANES) store(out + d, load(out + d) / divisor);
}

}  // namespace

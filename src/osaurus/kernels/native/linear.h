// Products of input rows with a matrix of codes, few rows or many, in one arithmetic: for each
// output feature and group of K, codes times inputs are summed pair by pair in ascending k; then
// total = scale * sum + total and total = offset * (sum of inputs) + total. Few rows unpack codes
// in registers; many unpack a panel once. Both give a row the same bits.
#pragma once
#include "run.h"
#include "simd.h"

namespace {
using namespace osaurus;

constexpr int PANEL_K = 2048;
constexpr int FEW_ROWS = 32;
constexpr int BLOCK_ROWS = 6;

INLINE F load_scale(const uint8_t* p, int kind) {
  if (kind == F16) return from_half((const uint16_t*)p);
  if (kind == BF16) return from_bfloat((const uint16_t*)p);
  return load((const float*)p);
}

struct Layout {
  int64_t group, code_bytes, scale_bytes, group_bytes, tile_bytes;
  explicit Layout(const Matrix& w) {
    group = w.bits == 16 ? w.k : w.group;
    code_bytes = group * w.bits * 2;
    scale_bytes = w.bits == 16 ? 0 : (w.scale_kind == F32 ? 64 : 32);
    group_bytes = code_bytes + scale_bytes * (w.has_offset ? 2 : 1);
    tile_bytes = group_bytes * (w.k / group);
  }
};

struct Rows {  // input rows and where their sums over the matrix's groups are
  const Input* x;
  const float* sums;
  int64_t ld, ld_sums;
};

// Where products go: a row's outputs side by side.
struct Columns {
  const Matrix& w;
  float* out;
  int64_t ld;
  bool add;

  static constexpr int step(int nv) { return nv; }
  // NV tiles that are taken at a time, and in `step` how far on the next ones of each lie.
  template <int NV>
  INLINE void tiles(const Layout& at, int64_t tile, const uint8_t** found) const {
    for (int v = 0; v < NV; ++v) found[v] = w.data + (tile + v) * at.tile_bytes;
  }
  template <int NV>
  INLINE void take(int row, int64_t tile, const F* totals) const {
    for (int v = 0; v < NV; ++v) write(row, (tile + v) * LANES, totals[v]);
  }
  template <int NV>
  INLINE void expect(int row, int64_t tile) const {
    for (int v = 0; v < NV; ++v) __builtin_prefetch(out + row * ld + (tile + v) * LANES, 1, 3);
  }

 private:
  INLINE void write(int row, int64_t n, F total) const {
    float* to = out + row * ld + n;
    if (n + LANES <= w.n) {
      if (w.bias) total = total + load(w.bias + n);
      store(to, add ? load(to) + total : total);
      return;
    }
    float lanes[LANES];
    store(lanes, total);
    for (int64_t i = 0; i < w.n - n; ++i) {
      float y = w.bias ? lanes[i] + w.bias[n + i] : lanes[i];
      to[i] = add ? to[i] + y : y;
    }
  }
};

// activation(gate) * up as a product's input: half of the tiles that are taken at a time are the
// gate's, the other half the same tiles of up, which begins at tile `first_up` of its matrix.
struct Gated {
  const Matrix &gate, &up;
  int64_t first_up;
  Input* out;
  int64_t ld;
  int activation;

  static constexpr int step(int nv) { return nv / 2; }
  template <int NV>
  INLINE void tiles(const Layout& at, int64_t tile, const uint8_t** found) const {
    for (int v = 0; v < NV / 2; ++v) {
      found[v] = gate.data + (tile / 2 + v) * at.tile_bytes;
      found[NV / 2 + v] = up.data + (first_up + tile / 2 + v) * at.tile_bytes;
    }
  }
  template <int NV>
  INLINE void take(int row, int64_t tile, const F* totals) const {
    for (int v = 0; v < NV / 2; ++v) {
      int64_t n = (tile / 2 + v) * LANES;
      F g = totals[v], u = totals[NV / 2 + v];
      if (gate.bias) g = g + load(gate.bias + n);
      if (up.bias) u = u + load(up.bias + first_up * LANES + n);
      store_inputs(out + row * ld + n, (activation == GELU_TANH ? gelu_tanh(g) : silu(g)) * u);
    }
  }
  template <int NV>
  INLINE void expect(int row, int64_t tile) const {
    __builtin_prefetch(out + row * ld + tile / 2 * LANES, 1, 3);
  }
};

template <int BITS, int NV, int M, class Target>
void few_rows(const Matrix& w, const Layout& at, const Rows& rows, const Target& target, int first_row,
              int64_t tile) {
  constexpr int PAIRS = 16 / BITS;  // in a chunk
  const uint8_t* tiles[NV];
  target.template tiles<NV>(at, tile, tiles);
  F total[M][NV];
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < NV; ++v) total[m][v] = zero();
  int64_t group = 0;
  for (int64_t k = 0; k < w.k; ++group) {
    F acc[M][NV];
    for (int m = 0; m < M; ++m) {
      F start = zero();
      if (BITS != 16 && !w.has_offset) start = set1(-w.centre * rows.sums[m * rows.ld_sums + group]);
      for (int v = 0; v < NV; ++v) acc[m][v] = start;
    }
    int64_t codes = group * at.group_bytes, scales_at = codes + at.code_bytes;
    if (BITS != 16)
      // The tiles after these are asked for early, place by place.
      for (int v = 0; v < NV; ++v)
        for (int64_t i = 0; i < at.group_bytes; i += 64)
          __builtin_prefetch(tiles[v] + Target::step(NV) * at.tile_bytes + codes + i, 0, 2);
    for (int64_t end = k + at.group; k < end; k += 2 * PAIRS, codes += 64) {
      U chunk[NV];
      for (int v = 0; v < NV; ++v) chunk[v] = load_u32(tiles[v] + codes);
#pragma GCC unroll 4
      for (int j = 0; j < PAIRS; ++j) {
        Pair pair[NV];
        for (int v = 0; v < NV; ++v) pair[v] = unpack<BITS>(chunk[v], j);
        for (int m = 0; m < M; ++m) {
          InputPair x = pair_at(rows.x + m * rows.ld, k + 2 * j);
          for (int v = 0; v < NV; ++v) acc[m][v] = dot(acc[m][v], pair[v], x);
        }
      }
    }
    if (BITS == 16) {
      for (int m = 0; m < M; ++m)
        for (int v = 0; v < NV; ++v) total[m][v] = acc[m][v];
      break;
    }
    for (int v = 0; v < NV; ++v) {
      const uint8_t* scales = tiles[v] + scales_at;
      F scale = load_scale(scales, w.scale_kind);
      for (int m = 0; m < M; ++m) total[m][v] = fma(scale, acc[m][v], total[m][v]);
      if (!w.has_offset) continue;
      F offset = load_scale(scales + at.scale_bytes, w.scale_kind);
      for (int m = 0; m < M; ++m)
        total[m][v] = fma(offset, set1(rows.sums[m * rows.ld_sums + group]), total[m][v]);
    }
  }
  for (int m = 0; m < M; ++m) target.template take<NV>(first_row + m, tile, total[m]);
}

// A panel of NV tiles: pairs [k / 2][NV], then scales and offsets [group][NV] as floats.
struct Panel {
  Pair* pairs;
  float *scales, *offsets, *totals;
  explicit Panel(void* scratch) {
    pairs = (Pair*)scratch;
    scales = (float*)(pairs + PANEL_K / 2 * 2);
    offsets = scales + PANEL_K / 16 * 2 * LANES;
    totals = offsets + PANEL_K / 16 * 2 * LANES;
  }
};
static_assert(PANEL_K * sizeof(Pair) + 2 * (PANEL_K / 16 * 2 * LANES * 4) + MAX_PIECE_ROWS * 2 * LANES * 4 <=
                  SCRATCH_BYTES, "a panel fits");

// `ahead`: bytes from these tiles to those of the next panel.
template <int BITS, int NV>
void fill_panel(const Matrix& w, const Layout& at, const uint8_t* const* tiles, int64_t ahead, int64_t k0,
                int64_t k1, Panel panel) {
  constexpr int PAIRS = 16 / BITS;
  for (int v = 0; v < NV; ++v) {
    const uint8_t* start = tiles[v];
    if (BITS == 16) {
      for (int64_t k = k0; k < k1; k += 2)
        panel.pairs[(k - k0) / 2 * NV + v] = unpack<BITS>(load_u32(start + k * 32), 0);
      continue;
    }
    Pair* out = panel.pairs + v;
    for (int64_t g = k0 / at.group; g < k1 / at.group; ++g) {
      const uint8_t* p = start + g * at.group_bytes;
      for (int64_t k = 0; k < at.group; k += 2 * PAIRS, p += 64) {
        __builtin_prefetch(p + ahead, 0, 2);
        U chunk = load_u32(p);
#pragma GCC unroll 4
        for (int j = 0; j < PAIRS; ++j, out += NV) *out = unpack<BITS>(chunk, j);
      }
      int64_t place = ((g - k0 / at.group) * NV + v) * LANES;
      store(panel.scales + place, load_scale(p, w.scale_kind));
      if (w.has_offset) store(panel.offsets + place, load_scale(p + at.scale_bytes, w.scale_kind));
    }
  }
}

// Where a panel's sums go: totals of K so far in memory, the last ones to the target.
template <class Target>
struct Sink {
  const Target& target;
  float* totals;  // of the rows from `row` on
  int row;
  int64_t tile;
  bool starts, ends;  // whether the panel is the first, the last of K
};

template <int NV, int M, bool CODES, class Target>
void panel_rows(const Matrix& w, const Layout& at, const Rows& rows, int64_t k0, int64_t k1, const Panel& panel,
                const Sink<Target>& to) {
  F total[M][NV];
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < NV; ++v) total[m][v] = to.starts ? zero() : load(to.totals + (m * NV + v) * LANES);
  // Rows lie far apart: their places are asked for before there is something to write.
  if (to.ends)
    for (int m = 0; m < M; ++m) to.target.template expect<NV>(to.row + m, to.tile);
  const Pair* pair = panel.pairs;
  int64_t size = CODES ? at.group : k1 - k0;
  for (int64_t k = k0; k < k1;) {
    int64_t group = CODES ? k / at.group : 0, local = CODES ? group - k0 / at.group : 0;
    F acc[M][NV];
    for (int m = 0; m < M; ++m) {
      F start = zero();
      if (CODES && !w.has_offset) start = set1(-w.centre * rows.sums[m * rows.ld_sums + group]);
      for (int v = 0; v < NV; ++v) acc[m][v] = CODES ? start : total[m][v];
    }
    for (int64_t end = k + size; k < end; k += 2, pair += NV) {
      Pair now[NV];
      for (int v = 0; v < NV; ++v) now[v] = pair[v];
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        InputPair x = pair_at(rows.x + m * rows.ld, k);
        for (int v = 0; v < NV; ++v) acc[m][v] = dot(acc[m][v], now[v], x);
      }
    }
    for (int v = 0; v < NV; ++v) {
      if (!CODES) {
        for (int m = 0; m < M; ++m) total[m][v] = acc[m][v];
        continue;
      }
      F scale = load(panel.scales + (local * NV + v) * LANES);
      for (int m = 0; m < M; ++m) total[m][v] = fma(scale, acc[m][v], total[m][v]);
      if (!w.has_offset) continue;
      F offset = load(panel.offsets + (local * NV + v) * LANES);
      for (int m = 0; m < M; ++m)
        total[m][v] = fma(offset, set1(rows.sums[m * rows.ld_sums + group]), total[m][v]);
    }
  }
  for (int m = 0; m < M; ++m) {
    if (to.ends) {
      to.target.template take<NV>(to.row + m, to.tile, total[m]);
      continue;
    }
    for (int v = 0; v < NV; ++v) store(to.totals + (m * NV + v) * LANES, total[m][v]);
  }
}

template <int NV, int M, bool CODES, class Target>
void panel_blocks(const Matrix& w, const Layout& at, Rows rows, int m, int64_t k0, int64_t k1, const Panel& panel,
                  Sink<Target> to) {
  for (; m >= M; m -= M) {
    panel_rows<NV, M, CODES>(w, at, rows, k0, k1, panel, to);
    rows.x += M * rows.ld;
    rows.sums += M * rows.ld_sums;
    to.totals += M * NV * LANES;
    to.row += M;
  }
  if constexpr (M > 1)
    if (m) panel_blocks<NV, M - 1, CODES>(w, at, rows, m, k0, k1, panel, to);
}

template <int BITS, int NV, class Target>
void many_rows(const Matrix& w, const Layout& at, const Rows& rows, int m, const Target& target, int64_t tile,
               int first_row, void* scratch) {
  Panel panel(scratch);
  const uint8_t* tiles[NV];
  target.template tiles<NV>(at, tile, tiles);
  for (int64_t k0 = 0; k0 < w.k; k0 += PANEL_K) {
    int64_t k1 = k0 + PANEL_K < w.k ? k0 + PANEL_K : w.k;
    fill_panel<BITS, NV>(w, at, tiles, Target::step(NV) * at.tile_bytes, k0, k1, panel);
    Sink<Target> to{target, panel.totals, first_row, tile, k0 == 0, k1 == w.k};
    panel_blocks<NV, BLOCK_ROWS, BITS != 16>(w, at, rows, m, k0, k1, panel, to);
  }
}

// Rows in blocks of at most eight: the codes of a few tiles stay in the nearest cache.
template <int BITS, class Target>
void few_blocks(const Matrix& w, const Layout& at, const Rows& rows, int m, const Target& target, int64_t tile,
                int first_row) {
  for (int done = 0; done < m; done += 8) {
    Rows part{rows.x + done * rows.ld, rows.sums + done * rows.ld_sums, rows.ld, rows.ld_sums};
    int row = first_row + done;
    switch (m - done < 8 ? m - done : 8) {
      case 1: few_rows<BITS, 2, 1>(w, at, part, target, row, tile); break;
      case 2: few_rows<BITS, 2, 2>(w, at, part, target, row, tile); break;
      case 3: few_rows<BITS, 2, 3>(w, at, part, target, row, tile); break;
      case 4: few_rows<BITS, 2, 4>(w, at, part, target, row, tile); break;
      case 5: few_rows<BITS, 2, 5>(w, at, part, target, row, tile); break;
      case 6: few_rows<BITS, 2, 6>(w, at, part, target, row, tile); break;
      case 7: few_rows<BITS, 2, 7>(w, at, part, target, row, tile); break;
      default: few_rows<BITS, 2, 8>(w, at, part, target, row, tile);
    }
  }
}

// Tiles are even in number: a matrix ends in an empty one where it has to.
template <int BITS, class Target>
void multiply_tiles(const Matrix& w, const Rows& rows, int m, const Target& target, int first_row, int64_t first,
                    int64_t end, void* scratch) {
  Layout at(w);
  int64_t tile = first;
  if (m <= 2)
    for (; tile + 4 <= end; tile += 4)
      m == 1 ? few_rows<BITS, 4, 1>(w, at, rows, target, first_row, tile)
             : few_rows<BITS, 4, 2>(w, at, rows, target, first_row, tile);
  for (; tile < end; tile += 2) {
    if (m <= FEW_ROWS)
      few_blocks<BITS>(w, at, rows, m, target, tile, first_row);
    else
      many_rows<BITS, 2>(w, at, rows, m, target, tile, first_row, scratch);
  }
}

// Tiles [first, end) of the target for m rows; `w` says how its matrices are made.
template <class Target>
void multiply(const Matrix& w, const Rows& rows, int m, const Target& target, int64_t first, int64_t end,
              void* scratch) {
  for (int done = 0; done < m; done += MAX_PIECE_ROWS) {
    int piece = m - done < MAX_PIECE_ROWS ? m - done : MAX_PIECE_ROWS;
    Rows part{rows.x + done * rows.ld, rows.sums + done * rows.ld_sums, rows.ld, rows.ld_sums};
    if (w.bits == 4) multiply_tiles<4>(w, part, piece, target, done, first, end, scratch);
    if (w.bits == 8) multiply_tiles<8>(w, part, piece, target, done, first, end, scratch);
    if (w.bits == 16) multiply_tiles<16>(w, part, piece, target, done, first, end, scratch);
  }
}

}  // namespace

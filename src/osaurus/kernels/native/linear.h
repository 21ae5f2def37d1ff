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

struct Target {
  float* out;
  int64_t ld;
  bool add;
};

INLINE void write_out(const Matrix& w, const Target& t, int row, int64_t n, F total) {
  float* out = t.out + row * t.ld + n;
  if (n + LANES <= w.n) {
    if (w.bias) total = total + load(w.bias + n);
    store(out, t.add ? load(out) + total : total);
    return;
  }
  float lanes[LANES];
  store(lanes, total);
  for (int64_t i = 0; i < w.n - n; ++i) {
    float y = w.bias ? lanes[i] + w.bias[n + i] : lanes[i];
    out[i] = t.add ? out[i] + y : y;
  }
}

template <int BITS, int NV, int M>
void few_rows(const Matrix& w, const Layout& at, const Rows& rows, const Target& target, int64_t tile) {
  constexpr int PAIRS = 16 / BITS;  // in a chunk
  const uint8_t* p = w.data + tile * at.tile_bytes;
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
    const uint8_t* codes = p;
    if (BITS != 16 && M <= 4)
      // Bound by memory: the tiles after these are asked for early, place by place.
      for (int v = 0; v < NV; ++v)
        for (int64_t i = 0; i < at.group_bytes; i += 64)
          __builtin_prefetch(p + (NV + v) * at.tile_bytes + i, 0, 2);
    for (int64_t end = k + at.group; k < end; k += 2 * PAIRS, codes += 64) {
      U chunk[NV];
      for (int v = 0; v < NV; ++v) chunk[v] = load_u32(codes + v * at.tile_bytes);
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
      const uint8_t* scales = p + v * at.tile_bytes + at.code_bytes;
      F scale = load_scale(scales, w.scale_kind);
      for (int m = 0; m < M; ++m) total[m][v] = fma(scale, acc[m][v], total[m][v]);
      if (!w.has_offset) continue;
      F offset = load_scale(scales + at.scale_bytes, w.scale_kind);
      for (int m = 0; m < M; ++m)
        total[m][v] = fma(offset, set1(rows.sums[m * rows.ld_sums + group]), total[m][v]);
    }
    p += at.group_bytes;
  }
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < NV; ++v) write_out(w, target, m, (tile + v) * LANES, total[m][v]);
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

template <int BITS, int NV>
void fill_panel(const Matrix& w, const Layout& at, int64_t tile, int64_t k0, int64_t k1, Panel panel) {
  constexpr int PAIRS = 16 / BITS;
  for (int v = 0; v < NV; ++v) {
    const uint8_t* start = w.data + (tile + v) * at.tile_bytes;
    if (BITS == 16) {
      for (int64_t k = k0; k < k1; k += 2)
        panel.pairs[(k - k0) / 2 * NV + v] = unpack<BITS>(load_u32(start + k * 32), 0);
      continue;
    }
    Pair* out = panel.pairs + v;
    for (int64_t g = k0 / at.group; g < k1 / at.group; ++g) {
      const uint8_t* p = start + g * at.group_bytes;
      for (int64_t k = 0; k < at.group; k += 2 * PAIRS, p += 64) {
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

template <int NV, int M, bool CODES>
void panel_rows(const Matrix& w, const Layout& at, const Rows& rows, int64_t k0, int64_t k1, Panel panel,
                float* totals) {
  F total[M][NV];
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < NV; ++v) total[m][v] = load(totals + (m * NV + v) * LANES);
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
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < NV; ++v) store(totals + (m * NV + v) * LANES, total[m][v]);
}

template <int NV, int M, bool CODES>
void panel_blocks(const Matrix& w, const Layout& at, Rows rows, int m, int64_t k0, int64_t k1, Panel panel) {
  float* totals = panel.totals;
  for (; m >= M; m -= M) {
    panel_rows<NV, M, CODES>(w, at, rows, k0, k1, panel, totals);
    rows.x += M * rows.ld;
    rows.sums += M * rows.ld_sums;
    totals += M * NV * LANES;
  }
  if constexpr (M > 1) {
    if (m) {
      panel.totals = totals;
      panel_blocks<NV, M - 1, CODES>(w, at, rows, m, k0, k1, panel);
    }
  }
}

template <int BITS, int NV>
void many_rows(const Matrix& w, const Layout& at, const Rows& rows, int m, const Target& target, int64_t tile,
               void* scratch) {
  Panel panel(scratch);
  std::memset(panel.totals, 0, sizeof(float) * m * NV * LANES);
  for (int64_t k0 = 0; k0 < w.k; k0 += PANEL_K) {
    int64_t k1 = k0 + PANEL_K < w.k ? k0 + PANEL_K : w.k;
    fill_panel<BITS, NV>(w, at, tile, k0, k1, panel);
    Rows part = rows;
    panel_blocks<NV, BLOCK_ROWS, BITS != 16>(w, at, part, m, k0, k1, panel);
  }
  for (int r = 0; r < m; ++r)
    for (int v = 0; v < NV; ++v)
      write_out(w, target, r, (tile + v) * LANES, load(panel.totals + (r * NV + v) * LANES));
}

// Rows in blocks of at most eight: the codes of a few tiles stay in the nearest cache.
template <int BITS>
void few_blocks(const Matrix& w, const Layout& at, const Rows& rows, int m, const Target& target, int64_t tile) {
  for (int done = 0; done < m; done += 8) {
    Rows part{rows.x + done * rows.ld, rows.sums + done * rows.ld_sums, rows.ld, rows.ld_sums};
    Target to{target.out + done * target.ld, target.ld, target.add};
    switch (m - done < 8 ? m - done : 8) {
      case 1: few_rows<BITS, 2, 1>(w, at, part, to, tile); break;
      case 2: few_rows<BITS, 2, 2>(w, at, part, to, tile); break;
      case 3: few_rows<BITS, 2, 3>(w, at, part, to, tile); break;
      case 4: few_rows<BITS, 2, 4>(w, at, part, to, tile); break;
      case 5: few_rows<BITS, 2, 5>(w, at, part, to, tile); break;
      case 6: few_rows<BITS, 2, 6>(w, at, part, to, tile); break;
      case 7: few_rows<BITS, 2, 7>(w, at, part, to, tile); break;
      default: few_rows<BITS, 2, 8>(w, at, part, to, tile);
    }
  }
}

// Tiles are even in number: a matrix ends in an empty one where it has to.
template <int BITS>
void multiply_tiles(const Matrix& w, const Rows& rows, int m, const Target& target, int64_t first, int64_t end,
                    void* scratch) {
  Layout at(w);
  int64_t tile = first;
  if (m <= 2)
    for (; tile + 4 <= end; tile += 4)
      m == 1 ? few_rows<BITS, 4, 1>(w, at, rows, target, tile) : few_rows<BITS, 4, 2>(w, at, rows, target, tile);
  for (; tile < end; tile += 2) {
    if (m <= FEW_ROWS)
      few_blocks<BITS>(w, at, rows, m, target, tile);
    else
      many_rows<BITS, 2>(w, at, rows, m, target, tile, scratch);
  }
}

// Output features of tiles [first, end) for m rows.
void multiply(const Matrix& w, const Rows& rows, int m, const Target& target, int64_t first, int64_t end,
              void* scratch) {
  for (int done = 0; done < m; done += MAX_PIECE_ROWS) {
    int piece = m - done < MAX_PIECE_ROWS ? m - done : MAX_PIECE_ROWS;
    Rows part{rows.x + done * rows.ld, rows.sums + done * rows.ld_sums, rows.ld, rows.ld_sums};
    Target to{target.out + done * target.ld, target.ld, target.add};
    if (w.bits == 4) multiply_tiles<4>(w, part, piece, to, first, end, scratch);
    if (w.bits == 8) multiply_tiles<8>(w, part, piece, to, first, end, scratch);
    if (w.bits == 16) multiply_tiles<16>(w, part, piece, to, first, end, scratch);
  }
}

}  // namespace

// What Python and the kernels share: plain structs, mirrored in step.py and matrix.py.
//
// Letters: T rows, N output features, K input features, D head dimension.
#pragma once
#include <cstddef>
#include <cstdint>

namespace osaurus {

constexpr int LANES = 16;  // output features of a tile
constexpr int ABI_VERSION = 2;

enum ScaleKind : int32_t { F16 = 0, BF16 = 1, F32 = 2 };

// W[n, k] = code * scale + offset by groups of K, or plain bfloat16 (bits 16). A tile holds 16
// output features; for each group first its codes, then 16 scales, then 16 offsets where stored.
// A dword of codes belongs to one feature and to 32 / bits consecutive k: even k lie in its low
// half, odd ones in its high half, the first in the lowest bits.
struct Matrix {
  const uint8_t* data;
  const float* bias;  // [n] or null
  int64_t n, k;
  int32_t bits;        // 4, 8 or 16
  int32_t group;       // 16, 32, 64 or 128; of no meaning with 16 bits
  int32_t scale_kind;  // ScaleKind
  int32_t has_offset;  // 0: the offset is -centre * scale
  float centre;
};

enum OpKind : int32_t {
  EMBED = 0,      // token rows of a matrix, times f[0], to f32
  NORM = 1,       // x / rms(x) * weight to a product's input; optionally of the logits' rows
  NORM_ADD = 2,   // out += x / rms(x) * weight
  LINEAR = 3,     // product to f32 columns; stored or added
  ROPE = 4,       // q/k norm, rotary, keys and values into their blocks
  ATTEND = 5,     // attention over block tables, in parts
  JOIN = 6,       // parts of a row to one product's input
  GATE = 7,       // activation(gate) * up to a product's input
  ROUND = 8,      // f32 to a product's input
  COPY = 9,       // a copy of the hidden rows, for whoever taps them
  TAKE = 10,      // the caller's bfloat16 or f32 rows to a product's input
  GIVE = 11,      // f32 to the caller's bfloat16 rows
  GATED = 12,     // LINEAR of gate and up, then GATE
};

enum Activation : int32_t { SILU = 0, GELU_TANH = 1 };

// An even number: kernels take two tiles at a time.
inline int64_t tiles_of(const Matrix& w) { return (w.n + 2 * LANES - 1) / (2 * LANES) * 2; }

// i and p by kind:
//   EMBED    p0 Matrix                   f0 factor
//   NORM     p0 weight                   f0 eps
//   NORM_ADD p0 weight                   f0 eps
//   LINEAR   p0 Matrix; i0 first column of out, i1 row length where out is -1, i2 add
//   ROPE     p0, p1 q and k norm weights or null; f0 eps, f1 scale of queries
//   ATTEND   f0 softcap; both and JOIN: i0 heads, i1 kv heads, i2 key and i3 value dims,
//            i4 rotary dims (ROPE) or window (0 none), i5 rotary table or attention plan,
//            i6 storage, i7 group
//   JOIN     p0 sinks or null
//   GATE     i0 Activation
//   COPY     i0 which of the taps
//   TAKE     p0 rows, i0 1 for bfloat16
//   GIVE     p0 rows
//   GATED    p0 gate, p1 up, two matrices made alike or one; i0 Activation, i1 the group of the
//            product that reads the result, i2 up's first feature in its matrix, i3 features of
//            each, both multiples of 2 * LANES
struct Op {
  int32_t kind;
  int32_t in, out;  // buffers; out -1 is the caller's memory
  int32_t rows;     // 0 all rows, 1 the rows whose logits are wanted
  int32_t beside;   // 1: may run while the operation before it does
  int32_t reserved;
  int32_t i[8];
  float f[4];
  const void* p[4];
};

// One slot's consecutive rows in a forward.
struct Span {
  int32_t start, length, first_position, reserved;
};

// Where one KV group's blocks are: table[table_start[s] + b - first_block[s]] for block b.
struct Group {
  const int32_t* table;
  const int32_t* table_start;
  const int32_t* first_block;
};

struct Args {
  int32_t rows, spans, groups, logits_rows;
  int32_t block_tokens, reserved;
  const int64_t* token_ids;
  const int32_t* positions;
  const float* embeds;  // [rows, hidden] in place of token ids, or null
  const Span* span;
  const Group* group;
  const int64_t* logits_row;
  float* logits;              // [logits_rows, vocabulary]
  float* const* taps;         // one [rows, hidden] for each COPY
  void* const* storage;       // one for each layer with keys and values
  const float* const* rotary; // one table [positions][2][dims] for each kind of rotary
};

}  // namespace osaurus

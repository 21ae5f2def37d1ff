// Operations on single rows: norms, rounding to inputs, gates, rotary and the write into blocks.
#pragma once
#include "run.h"
#include "simd.h"

namespace {
using namespace osaurus;

INLINE Input* inputs_at(const Buffer& b, int64_t row) { return (Input*)b.inputs + row * b.ld; }
INLINE float* floats_at(const Buffer& b, int64_t row) { return b.floats + row * b.ld; }

// Sums of rounded inputs [from, to) in group sizes up to `largest`; both are multiples of it or the
// ends.
void sum_inputs(const Buffer& b, int64_t row, int64_t from, int64_t to, int largest = 128) {
  const Input* x = inputs_at(b, row);
  float* sums = b.sums + row * sums_of(b.width);
  for (int64_t k = from; k < to; k += 16) sums[k / 16] = sum(load_inputs(x + k));
  float* below = sums;
  for (int size = 32; size <= largest; size *= 2) {
    float* here = below + b.width / (size / 2);
    for (int64_t g = from / size; g < to / size; ++g) here[g] = below[2 * g] + below[2 * g + 1];
    below = here;
  }
}

float inverse_rms(const float* x, int64_t n, float eps) {
  F squares = zero();
  for (int64_t i = 0; i < n; i += LANES) squares = fma(load(x + i), load(x + i), squares);
  return 1.0f / std::sqrt(sum(squares) / (float)n + eps);
}

void norm_row(const float* x, const float* weight, float eps, const Buffer& out, int64_t row) {
  F factor = set1(inverse_rms(x, out.width, eps));
  Input* y = inputs_at(out, row);
  for (int64_t i = 0; i < out.width; i += LANES)
    store_inputs(y + i, load(x + i) * factor * load(weight + i));
  sum_inputs(out, row, 0, out.width);
}

void norm_add_row(const float* x, const float* weight, float eps, float* out, int64_t n) {
  F factor = set1(inverse_rms(x, n, eps));
  for (int64_t i = 0; i < n; i += LANES)
    store(out + i, load(out + i) + load(x + i) * factor * load(weight + i));
}

void round_row(const float* x, const Buffer& out, int64_t row) {
  Input* y = inputs_at(out, row);
  for (int64_t i = 0; i < out.width; i += LANES) store_inputs(y + i, load(x + i));
  sum_inputs(out, row, 0, out.width);
}

// Columns [from, to) of activation(gate) * up; gate and up lie side by side.
void gate_row(const float* gate, const float* up, int activation, const Buffer& out, int64_t row, int64_t from,
              int64_t to) {
  Input* y = inputs_at(out, row);
  for (int64_t i = from; i < to; i += LANES) {
    F g = load(gate + i);
    store_inputs(y + i, (activation == GELU_TANH ? gelu_tanh(g) : silu(g)) * load(up + i));
  }
  sum_inputs(out, row, from, to);
}

struct RopeShape {
  int heads, kv_heads, dim, rotary, block_tokens, v_dim;
};

// Rotate the first `rotary` numbers in place; table is cos and signed sin.
INLINE void rotate(float* x, const float* table, int rotary) {
  float turned[MAX_HEAD_DIM];
  int half = rotary / 2;
  const float *cosine = table, *sine = table + rotary;
  for (int i = 0; i < half; ++i) turned[i] = x[i] * cosine[i] + x[i + half] * sine[i];
  for (int i = half; i < rotary; ++i) turned[i] = x[i] * cosine[i] + x[i - half] * sine[i];
  std::memcpy(x, turned, sizeof(float) * rotary);
}

INLINE void norm_head(float* x, const float* weight, int dim, float eps) {
  if (!weight) return;
  F factor = set1(inverse_rms(x, dim, eps));
  for (int i = 0; i < dim; i += LANES) store(x + i, load(x + i) * factor * load(weight + i));
}

void round_to_block(const float* x, uint16_t* out, int n) {
  for (int i = 0; i < n; i += LANES) store_high(out + i, round_bfloat(load(x + i)));
}

// One row: queries to `q`, its key and value to slot `offset` of a block [kv heads, tokens, 2 dims].
void rope_row(const Op& op, const RopeShape& s, float* heads, const float* table, Input* q, uint16_t* block,
              int offset) {
  const float *q_weight = (const float*)op.p[0], *k_weight = (const float*)op.p[1];
  float eps = op.f[0];
  F scale = set1(op.f[1]);
  for (int h = 0; h < s.heads; ++h) {
    float* x = heads + h * s.dim;
    norm_head(x, q_weight, s.dim, eps);
    if (s.rotary) rotate(x, table, s.rotary);
    for (int i = 0; i < s.dim; i += LANES) store_inputs(q + h * s.dim + i, load(x + i) * scale);
  }
  int width = s.dim + s.v_dim;
  for (int h = 0; h < s.kv_heads; ++h) {
    float* key = heads + (s.heads + h) * s.dim;
    norm_head(key, k_weight, s.dim, eps);
    if (s.rotary) rotate(key, table, s.rotary);
    uint16_t* out = block + ((int64_t)h * s.block_tokens + offset) * width;
    round_to_block(key, out, s.dim);
    round_to_block(heads + (s.heads + s.kv_heads) * s.dim + h * s.v_dim, out + s.dim, s.v_dim);
  }
}

// One output feature of a matrix as floats, times a factor.
void embed_row(const Matrix& w, int64_t n, float factor, float* out) {
  int64_t group = w.bits == 16 ? w.k : w.group;
  int64_t code_bytes = group * w.bits * 2, scale_bytes = w.bits == 16 ? 0 : (w.scale_kind == F32 ? 64 : 32);
  int64_t group_bytes = code_bytes + scale_bytes * (w.has_offset ? 2 : 1);
  int64_t lane = n % LANES;
  const uint8_t* p = w.data + n / LANES * group_bytes * (w.k / group);
  for (int64_t k0 = 0; k0 < w.k; k0 += group, p += group_bytes) {
    float scale = 1, offset = 0;
    if (w.bits != 16) {
      float lanes[LANES];
      auto read = [&](const uint8_t* at) {
        if (w.scale_kind == F16) store(lanes, from_half((const uint16_t*)at));
        if (w.scale_kind == BF16) store(lanes, from_bfloat((const uint16_t*)at));
        if (w.scale_kind == F32) store(lanes, load((const float*)at));
        return lanes[lane];
      };
      scale = read(p + code_bytes);
      offset = w.has_offset ? read(p + code_bytes + scale_bytes) : -w.centre * scale;
    }
    int per_chunk = 32 / w.bits;
    for (int64_t k = 0; k < group; ++k) {
      uint32_t chunk;
      std::memcpy(&chunk, p + (k / per_chunk * LANES + lane) * 4, 4);
      int within = k % per_chunk, shift = (within & 1) * 16 + within / 2 * w.bits;
      uint32_t code = chunk >> shift & (w.bits == 16 ? 0xffffu : (1u << w.bits) - 1);
      float value = w.bits == 16 ? float_of((uint16_t)code) : (float)code * scale + offset;
      out[k0 + k] = value * factor;
    }
  }
}

}  // namespace

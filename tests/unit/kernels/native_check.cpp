// Native kernels against plain scalar sums in double, and each row against itself in company.
// For a processor that Python and torch are not there for: needs the library alone. Prints what
// is wrong and returns 1.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <algorithm>

#include "run.h"

using namespace osaurus;

extern "C" {
const char* osaurus_kernels();
int64_t osaurus_matrix_bytes(const Matrix*);
void osaurus_pack(const Matrix*, int64_t, int64_t, const void*, const void*, const void*);
void* osaurus_program(const Op*, int, const BufferShape*, int);
void osaurus_free(void*);
int osaurus_run(void*, const Args*, int, int);
int osaurus_linear(const Matrix*, const void*, int, int, void*, int, int);
void osaurus_rows(const Matrix*, const int64_t*, int, float*, int);
}

namespace {

int faults = 0;
void check(bool good, const char* what, double found) {
  if (good) return;
  ++faults;
  std::printf("WRONG: %s (%g)\n", what, found);
}

uint32_t state = 1;
uint32_t bits() { return state = state * 1664525u + 1013904223u; }
float uniform() { return (float)(bits() >> 8) / (1 << 23) - 1.0f; }
std::vector<float> random(size_t n) {
  std::vector<float> x(n);
  for (float& one : x) one = uniform() + uniform() + uniform();
  return x;
}

uint16_t bfloat(float x) {
  uint32_t b;
  std::memcpy(&b, &x, 4);
  return (uint16_t)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
float widened(uint16_t x) {
  uint32_t b = (uint32_t)x << 16;
  float y;
  std::memcpy(&y, &b, 4);
  return y;
}
float rounded(float x) { return widened(bfloat(x)); }

// Relative distance of two rows of numbers.
double distance(const std::vector<float>& got, const std::vector<double>& wanted) {
  double apart = 0, size = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    apart += (got[i] - wanted[i]) * (got[i] - wanted[i]);
    size += wanted[i] * wanted[i];
  }
  return std::sqrt(apart / size);
}

// A packed matrix and the numbers it stands for.
struct Made {
  Matrix w{};
  std::vector<double> weight;
  std::vector<float> bias;
  Made(int n, int k, int code_bits, int group, ScaleKind kind, float centre) : weight((size_t)n * k) {
    w = Matrix{nullptr, nullptr, n, k, code_bits, group, kind, centre == 0, centre};
    if (code_bits == 16) w.has_offset = 0;
    int64_t bytes = (osaurus_matrix_bytes(&w) + 63) / 64 * 64;
    w.data = (const uint8_t*)std::aligned_alloc(64, bytes);
    std::memset((void*)w.data, 0, bytes);
  }
  Made(const Made&) = delete;
  ~Made() { std::free((void*)w.data); }

  void fill() {
    bias = random(w.n);
    w.bias = bias.data();
    if (w.bits == 16) {
      std::vector<uint16_t> codes(w.n * w.k);
      for (size_t i = 0; i < codes.size(); ++i) weight[i] = widened(codes[i] = bfloat(uniform()));
      osaurus_pack(&w, 0, w.n, codes.data(), nullptr, nullptr);
      return;
    }
    int64_t groups = w.n * w.k / w.group;
    std::vector<uint8_t> codes(w.n * w.k);
    std::vector<float> scales(groups), offsets(groups);
    std::vector<uint16_t> short_scales(groups), short_offsets(groups);
    auto keep = [&](float& x, uint16_t& kept) {
      if (w.scale_kind == BF16) x = widened(kept = bfloat(x));
      if (w.scale_kind != F16) return;
      // float16 of a normal number with eight bits of mantissa is exact.
      x = rounded(x);
      if (std::fabs(x) < 6.2e-5f) x = 6.103515625e-5f;
      uint32_t b;
      std::memcpy(&b, &x, 4);
      kept = (uint16_t)((b >> 16 & 0x8000) | (((b >> 23 & 255) - 112) << 10) | (b >> 13 & 1023));
    };
    for (int64_t g = 0; g < groups; ++g) {
      scales[g] = (uniform() + 1.5f) / (1 << w.bits);
      offsets[g] = uniform();
      keep(scales[g], short_scales[g]);
      keep(offsets[g], short_offsets[g]);
    }
    for (size_t i = 0; i < codes.size(); ++i) {
      codes[i] = bits() >> 24 & ((1 << w.bits) - 1);
      double scale = scales[i / w.group];
      weight[i] = codes[i] * scale + (w.has_offset ? offsets[i / w.group] : -w.centre * scale);
    }
    bool wide = w.scale_kind == F32;
    osaurus_pack(&w, 0, w.n, codes.data(), wide ? (void*)scales.data() : short_scales.data(),
                 wide ? (void*)offsets.data() : short_offsets.data());
  }
  void fill_one() {
    std::vector<uint16_t> codes(w.n * w.k);
    for (int64_t i = 0; i < w.n; ++i) codes[i * w.k + i] = bfloat(1);
    osaurus_pack(&w, 0, w.n, codes.data(), nullptr, nullptr);
  }
};

void products(int n, int k, int code_bits, int group, ScaleKind kind, float centre) {
  Made made(n, k, code_bits, group, kind, centre);
  made.fill();
  const Matrix& w = made.w;
  int64_t asked[] = {n - 1, 0, 3};
  std::vector<float> rows(3 * k);
  osaurus_rows(&w, asked, 3, rows.data(), 1);
  std::vector<double> wanted_rows;
  for (int64_t row : asked)
    wanted_rows.insert(wanted_rows.end(), made.weight.begin() + row * k, made.weight.begin() + (row + 1) * k);
  check(distance(rows, wanted_rows) < 1e-6, "rows of a matrix", distance(rows, wanted_rows));

  const int count = 70;
  std::vector<float> x = random((size_t)count * k);
  std::vector<double> wanted((size_t)count * n);
  for (int m = 0; m < count; ++m)
    for (int f = 0; f < n; ++f) {
      double total = made.bias[f];
      for (int i = 0; i < k; ++i) total += made.weight[(size_t)f * k + i] * rounded(x[(size_t)m * k + i]);
      wanted[(size_t)m * n + f] = total;
    }
  std::vector<float> got((size_t)count * n), part((size_t)count * n);
  osaurus_linear(&w, x.data(), 0, count, got.data(), 0, 2);
  check(distance(got, wanted) < 1e-6, "a product", distance(got, wanted));
  for (int some : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32, 33, 41})
    for (int threads : {1, 3}) {
      osaurus_linear(&w, x.data() + (size_t)(count - some) * k, 0, some, part.data(), 0, threads);
      bool same = !std::memcmp(part.data(), got.data() + (size_t)(count - some) * n, sizeof(float) * some * n);
      check(same, "a row of a product in other company", some);
    }
}

// Norm and gate of rows 2 * width long, told through a product with one.
void row_operations(int width) {
  const int count = 9, wide = 2 * width;
  std::vector<float> x = random((size_t)count * wide), weight = random(wide);
  std::vector<int64_t> all(count), ids(count);
  for (int i = 0; i < count; ++i) all[i] = i;
  for (int kind : {0, 1, 2}) {
    int out_width = kind ? width : wide;
    Made source(wide, wide, 16, 0, F32, 0), one(out_width, out_width, 16, 0, F32, 0);
    one.fill_one();
    Op norm{NORM, 0, 1, 0, 0, 0, {}, {1e-5f}, {weight.data()}};
    Op gate{GATE, 0, 1, 0, 0, 0, {kind == 2 ? GELU_TANH : SILU}, {}, {}};
    Op ops[] = {{EMBED, -1, 0, 0, 0, 0, {}, {1}, {&source.w}},
                kind ? gate : norm,
                {LINEAR, 1, -1, 1, 0, 0, {0, out_width}, {}, {&one.w}}};
    BufferShape shapes[] = {{FLOATS, wide}, {INPUTS, out_width}};
    std::vector<float> got((size_t)count * out_width);
    Args a{};
    a.rows = a.logits_rows = count;
    a.block_tokens = 16;
    a.token_ids = ids.data();
    a.embeds = x.data();
    a.logits_row = all.data();
    a.logits = got.data();
    void* program = osaurus_program(ops, 3, shapes, 2);
    check(osaurus_run(program, &a, 3, 2) == 0, "a run", kind);
    osaurus_free(program);
    std::vector<double> wanted;
    for (int m = 0; m < count; ++m) {
      const float* row = x.data() + (size_t)m * wide;
      double squares = 0;
      for (int i = 0; i < wide; ++i) squares += (double)row[i] * row[i];
      for (int i = 0; i < out_width; ++i) {
        double g = row[i];
        if (kind == 0) wanted.push_back(g / std::sqrt(squares / wide + 1e-5) * weight[i]);
        if (kind == 1) wanted.push_back(g / (1 + std::exp(-g)) * row[width + i]);
        if (kind == 2)
          wanted.push_back(0.5 * g * (1 + std::tanh(0.7978845608 * (g + 0.044715 * g * g * g))) * row[width + i]);
      }
    }
    check(distance(got, wanted) < 4e-3, kind ? "a gate" : "a norm", distance(got, wanted));
  }
}

// Rotary, write and attention over one layer's blocks of `block` tokens.
struct Attention {
  int heads, kv, dim, block, window;
  float softcap;
  int total, out, blocks = 40;
  std::vector<uint16_t> storage;
  std::vector<float> rotary;
  Made source, one;
  void* program;

  Attention(int heads, int kv, int dim, int block, int window, float softcap)
      : heads(heads), kv(kv), dim(dim), block(block), window(window), softcap(softcap),
        total((heads + 2 * kv) * dim), out(heads * dim), storage((size_t)blocks * kv * block * 2 * dim),
        rotary((size_t)1024 * 2 * dim), source(total, total, 16, 0, F32, 0), one(out, out, 16, 0, F32, 0) {
    one.fill_one();
    for (int p = 0; p < 1024; ++p)
      for (int i = 0; i < dim; ++i) {
        double angle = p * std::pow(0.7, i % (dim / 2));
        rotary[(size_t)p * 2 * dim + i] = (float)std::cos(angle);
        rotary[(size_t)p * 2 * dim + dim + i] = (float)(i < dim / 2 ? -std::sin(angle) : std::sin(angle));
      }
    Op ops[] = {{EMBED, -1, 0, 0, 0, 0, {}, {1}, {&source.w}},
                {ROPE, 0, 1, 0, 0, 0, {heads, kv, dim, dim, dim, 0, 0, 0}, {1e-6f, 0.2f}, {}},
                {ATTEND, 1, -1, 0, 0, 0, {heads, kv, dim, dim, window, 0, 0, 0}, {softcap}, {}},
                {JOIN, -1, 2, 0, 0, 0, {heads, kv, dim, dim, window, 0, 0, 0}, {}, {}},
                {LINEAR, 2, -1, 1, 0, 0, {0, out}, {}, {&one.w}}};
    BufferShape shapes[] = {{FLOATS, total}, {INPUTS, out}, {INPUTS, out}};
    program = osaurus_program(ops, 5, shapes, 3);
  }
  ~Attention() { osaurus_free(program); }

  std::vector<float> run(const float* rows, int first, int count, int threads) {
    std::vector<int32_t> positions(count), table;
    std::vector<int64_t> all(count), ids(count);
    for (int i = 0; i < count; ++i) positions[i] = first + (int)(all[i] = i);
    for (int b = 0; b * block < first + count; ++b) table.push_back(blocks - 1 - b);
    int32_t starts[] = {0, (int32_t)table.size()}, oldest = 0;
    Group group{table.data(), starts, &oldest};
    Span span{0, count, first, 0};
    void* layers[] = {storage.data()};
    const float* tables[] = {rotary.data()};
    std::vector<float> got((size_t)count * out);
    Args a{count, 1, 1, count, block, 0, ids.data(), positions.data(), rows, &span, &group, all.data(),
           got.data(), nullptr, layers, tables};
    check(osaurus_run(program, &a, 5, threads) == 0, "a run", count);
    return got;
  }
  float stored(int token, int head, int i) const {
    int64_t place = (int64_t)(blocks - 1 - token / block) * kv + head;
    return widened(storage[(place * block + token % block) * 2 * dim + i]);
  }
};

void attention(int heads, int kv, int dim, int block, int window, float softcap) {
  Attention layer(heads, kv, dim, block, window, softcap);
  const int count = 400;
  std::vector<float> rows = random((size_t)count * layer.total);
  std::vector<float> got = layer.run(rows.data(), 0, count, 2);
  std::vector<double> wanted((size_t)count * layer.out);
  for (int t = 0; t < count; ++t)
    for (int h = 0; h < heads + kv; ++h) {
      const float* x = rows.data() + (size_t)t * layer.total + h * dim;
      const float* table = layer.rotary.data() + (size_t)t * 2 * dim;
      std::vector<double> turned(dim), scores;
      for (int i = 0; i < dim; ++i) turned[i] = x[i] * table[i] + x[(i + dim / 2) % dim] * table[dim + i];
      if (h >= heads) {  // a key and its value, as they were written
        for (int i = 0; i < dim; ++i) {
          double apart = std::fabs(layer.stored(t, h - heads, i) - turned[i]);
          check(apart < 1e-2 + std::fabs(turned[i]) / 128, "a key", apart);
          check(layer.stored(t, h - heads, dim + i) == rounded(x[kv * dim + i]), "a value", t);
        }
        continue;
      }
      int from = window && t >= window ? t - window + 1 : 0, shared = h / (heads / kv);
      double best = -1e30, sum = 0;
      for (int s = from; s <= t; ++s) {
        double score = 0;
        for (int i = 0; i < dim; ++i) score += rounded((float)turned[i] * 0.2f) * layer.stored(s, shared, i);
        if (softcap) score = softcap * std::tanh(score / softcap);
        scores.push_back(score);
        best = std::fmax(best, score);
      }
      for (double& score : scores) sum += score = std::exp(score - best);
      for (int i = 0; i < dim; ++i) {
        double value = 0;
        for (int s = from; s <= t; ++s) value += scores[s - from] * layer.stored(s, shared, dim + i);
        wanted[(size_t)t * layer.out + h * dim + i] = value / sum;
      }
    }
  check(distance(got, wanted) < 8e-3, "attention", distance(got, wanted));

  std::vector<uint16_t> filled = layer.storage;
  std::fill(layer.storage.begin(), layer.storage.end(), 0);
  int first = 0;
  for (int some : {17, 1, 130, 16, 2, 200, 34}) {
    std::vector<float> part = layer.run(rows.data() + (size_t)first * layer.total, first, some, 1 + first % 3);
    bool same = !std::memcmp(part.data(), got.data() + (size_t)first * layer.out, sizeof(float) * part.size());
    check(same, "a row of attention in another chunk", some);
    first += some;
  }
  check(layer.storage == filled, "keys and values of other chunks", first);
}

}  // namespace

int main() {
  std::printf("kernels: %s\n", osaurus_kernels());
  for (int k : {128, 2176}) {
    products(100, k, 4, 32, F16, 0);
    products(64, k, 4, 64, BF16, 0);
    products(7, k, 4, 16, F32, 0);
    products(64, k, 4, 32, F16, 8);
    products(40, k, 8, 32, F16, 128);
    products(64, k, 8, 128, F32, 0);
    products(64, k, 16, 0, F32, 0);
  }
  row_operations(16);
  row_operations(288);
  attention(9, 3, 64, 32, 0, 0);
  attention(4, 4, 32, 16, 70, 15);
  attention(8, 1, 16, 64, 256, 0);
  std::printf(faults ? "%d wrong\n" : "all right\n", faults);
  return faults != 0;
}

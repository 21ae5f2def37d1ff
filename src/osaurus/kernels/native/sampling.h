// Passes over one piece of a row of logits.
#pragma once
#include "choice.h"
#include "simd.h"

namespace {
using namespace osaurus;

constexpr int STRIDE = 64;  // entries that one look at their largest may pass over

// The last entries of a piece, with what loses every comparison after them.
INLINE F load_some(const float* x, int64_t n) {
  if (n >= 16) return load(x);
  alignas(64) float padded[16];
  for (int i = 0; i < 16; ++i) padded[i] = i < n ? x[i] : -INFINITY;
  return load(padded);
}

INLINE float largest_of(const float* x, int64_t n) {
  if (n >= STRIDE)
    return largest(max(max(load(x), load(x + 16)), max(load(x + 32), load(x + 48))));
  float best = -INFINITY;
  for (int64_t i = 0; i < n; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

bool choice_best(const float* x, int64_t n, float* out) {
  F best[2] = {set1(-INFINITY), set1(-INFINITY)}, bad = zero();
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    F a = load(x + i), b = load(x + i + 16);
    best[0] = max(a, best[0]);
    best[1] = max(b, best[1]);
    bad = bad + (a - a) + (b - b);  // a NaN for what is not finite
  }
  float whole = largest(max(best[0], best[1])), spoilt = sum(bad);
  for (; i < n; ++i) {
    whole = x[i] > whole ? x[i] : whole;
    spoilt += x[i] - x[i];
  }
  *out = whole;
  return spoilt == 0;
}

int64_t choice_find(const float* x, int64_t n, float value) {
  for (int64_t i = 0; i < n; i += STRIDE) {
    int64_t left = n - i < STRIDE ? n - i : STRIDE;
    if (largest_of(x + i, left) < value) continue;
    for (int64_t j = i; j < i + left; ++j)
      if (x[j] == value) return j;
  }
  return -1;
}

template <bool WEIGHS> INLINE void measure(const float* x, int64_t n, float best, float scale, Depths* out) {
  F total = zero(), weight[DEPTHS];
  ivec count[DEPTHS][PARTS];
  for (int d = 0; d < DEPTHS; ++d) {
    weight[d] = zero();
    EACH_PART count[d][p] = (ivec){};
  }
  for (int64_t i = 0; i < n; i += STRIDE) {
    F most = set1(-INFINITY);
    for (int64_t j = i; j < i + STRIDE && j < n; j += 16) {
      F below = (load_some(x + j, n - j) - set1(best)) * set1(scale);
      if (WEIGHS) total = total + exp(below);
      most = max(below, most);
    }
    F e = WEIGHS ? exp(most) : zero();
    for (int d = 0; d < DEPTHS; ++d) EACH_PART {
        ivec inside = (ivec)(most.v[p] >= (-DEPTH[d] - (fvec){}));
        count[d][p] -= inside;
        if (WEIGHS) weight[d].v[p] += (fvec)((ivec)e.v[p] & inside);
      }
  }
  out->total = sum(total);
  for (int d = 0; d < DEPTHS; ++d) {
    out->weight[d] = sum(weight[d]);
    out->count[d] = 0;
    EACH_PART for (int i = 0; i < WIDE; ++i) out->count[d] += count[d][p][i];
  }
}
void choice_measure(const float* x, int64_t n, float best, float scale, bool weighs, Depths* out) {
  weighs ? measure<true>(x, n, best, scale, out) : measure<false>(x, n, best, scale, out);
}

void choice_weigh(const float* x, int64_t n, float best, float scale, float least, float* total, float* above) {
  F all = zero(), over = zero();
  for (int64_t i = 0; i < n; i += 16) {
    F entry = load_some(x + i, n - i);
    F e = exp((entry - set1(best)) * set1(scale));
    all = all + e;
    EACH_PART over.v[p] += (fvec)((ivec)e.v[p] & (ivec)(entry.v[p] >= (least - (fvec){})));
  }
  *total = sum(all);
  *above = sum(over);
}

int64_t choice_collect(const float* x, int64_t n, float best, float scale, float depth, Candidate* out) {
  int64_t found = 0;
  for (int64_t i = 0; i < n; i += STRIDE) {
    int64_t left = n - i < STRIDE ? n - i : STRIDE;
    if (!((largest_of(x + i, left) - best) * scale >= -depth)) continue;
    for (int64_t j = i; j < i + left; ++j) {
      out[found] = Candidate{x[j], (int32_t)j};
      found += (x[j] - best) * scale >= -depth;
    }
  }
  return found;
}

// Noise is -log(-log u) for a uniform u of the key and the place. A score s reaches b where
// -log u <= exp(s - b); as 1 - u <= -log u, only places with 1 - u <= exp(s - b) can.
int64_t choice_contend(const float* x, int64_t from, int64_t n, int64_t first_id, uint64_t key, float best,
                       float scale, float least, int32_t* out, int* found) {
  for (int64_t i = from; i < n; i += 16) {
    alignas(64) uint32_t above[16];
    uint64_t start = (uint64_t)(first_id + i) * WEYL + key;
    for (int j = 0; j < 16; ++j) above[j] = (uint32_t)(~mixed(start + (uint64_t)j * WEYL) >> 33);
    F rest = to_float(load_u32(above)) * set1(4.656612873e-10f);  // 2^-31
    F below = (load_some(x + i, n - i) - set1(best)) * set1(scale);
    F reach = exp(below - set1(least)) * set1(1.001f) - rest;
    if (!(largest(reach) >= 0)) continue;
    alignas(64) float lanes[16];
    store(lanes, reach);
    int64_t left = n - i < 16 ? n - i : 16;
    int count = 0;
    for (int j = 0; j < left; ++j)
      if (lanes[j] >= 0) out[count++] = (int32_t)(i + j);
    if (count) {
      *found = count;
      return i + 16;
    }
  }
  *found = 0;
  return n;
}

}  // namespace

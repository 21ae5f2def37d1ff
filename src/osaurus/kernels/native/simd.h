// Sixteen floats as one value on every instruction set. Products and sums are written out as
// fma() where they shall be fused; files are compiled with contraction off, so two instances of
// one template round alike.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int WIDE = 16;
#elif defined(__AVX2__)
constexpr int WIDE = 8;
#else
constexpr int WIDE = 4;
#endif
constexpr int PARTS = 16 / WIDE;

typedef float fvec __attribute__((vector_size(4 * WIDE)));
typedef int32_t ivec __attribute__((vector_size(4 * WIDE)));
typedef uint32_t uvec __attribute__((vector_size(4 * WIDE)));

struct F { fvec v[PARTS]; };
struct U { uvec v[PARTS]; };

#define EACH_PART _Pragma("GCC unroll 4") for (int p = 0; p < PARTS; ++p)

template <class To, class From> INLINE To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

INLINE F set1(float x) {
  F r;
  EACH_PART r.v[p] = x - (fvec){};
  return r;
}
INLINE F zero() {
  F r;
  EACH_PART r.v[p] = (fvec){};
  return r;
}
INLINE F load(const float* x) {
  F r;
  std::memcpy(&r, x, sizeof(r));
  return r;
}
INLINE void store(float* x, F a) { std::memcpy(x, &a, sizeof(a)); }
INLINE U load_u32(const void* x) {
  U r;
  std::memcpy(&r, x, sizeof(r));
  return r;
}
INLINE F operator+(F a, F b) {
  EACH_PART a.v[p] = a.v[p] + b.v[p];
  return a;
}
INLINE F operator-(F a, F b) {
  EACH_PART a.v[p] = a.v[p] - b.v[p];
  return a;
}
INLINE F operator*(F a, F b) {
  EACH_PART a.v[p] = a.v[p] * b.v[p];
  return a;
}
INLINE F operator/(F a, F b) {
  EACH_PART a.v[p] = a.v[p] / b.v[p];
  return a;
}
INLINE U operator&(U a, uint32_t b) {
  EACH_PART a.v[p] = a.v[p] & b;
  return a;
}
INLINE U operator|(U a, U b) {
  EACH_PART a.v[p] = a.v[p] | b.v[p];
  return a;
}
INLINE U operator+(U a, U b) {
  EACH_PART a.v[p] = a.v[p] + b.v[p];
  return a;
}
INLINE U operator>>(U a, int n) {
  EACH_PART a.v[p] = a.v[p] >> n;
  return a;
}
INLINE U operator<<(U a, int n) {
  EACH_PART a.v[p] = a.v[p] << n;
  return a;
}
INLINE F as_float(U a) { return bits_of<F>(a); }
INLINE U as_bits(F a) { return bits_of<U>(a); }
INLINE F to_float(U a) {
  F r;
  EACH_PART r.v[p] = __builtin_convertvector((ivec)a.v[p], fvec);
  return r;
}

// A NaN in b stays.
INLINE F max(F a, F b) {
  EACH_PART a.v[p] = a.v[p] > b.v[p] ? a.v[p] : b.v[p];
  return a;
}
INLINE F select_below(F x, float limit, F below, F otherwise) {
  F r;
  EACH_PART r.v[p] = x.v[p] < (limit - (fvec){}) ? below.v[p] : otherwise.v[p];
  return r;
}

// a * b + c, fused where the processor can.
INLINE F fma(F a, F b, F c) {
#if defined(__AVX512F__)
  c.v[0] = (fvec)_mm512_fmadd_ps((__m512)a.v[0], (__m512)b.v[0], (__m512)c.v[0]);
#elif defined(__AVX2__)
  EACH_PART c.v[p] = (fvec)_mm256_fmadd_ps((__m256)a.v[p], (__m256)b.v[p], (__m256)c.v[p]);
#elif defined(__aarch64__)
  EACH_PART c.v[p] = (fvec)vfmaq_f32((float32x4_t)c.v[p], (float32x4_t)a.v[p], (float32x4_t)b.v[p]);
#else
  EACH_PART c.v[p] = a.v[p] * b.v[p] + c.v[p];
#endif
  return c;
}

// Lanes in pairs at distance 8, 4, 2, 1: one order on every instruction set.
INLINE float sum(F a) {
#if defined(__AVX512F__)
  __m512 wide = bits_of<__m512>(a);
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(wide),
                              _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(wide), 1)));
  __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
#else
  float x[16];
  store(x, a);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) x[i] += x[i + width];
  return x[0];
#endif
}
INLINE float largest(F a) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(bits_of<__m512>(a));
#else
  float x[16];
  store(x, a);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
  return x[0];
#endif
}

// e to the x to about 1 ulp; exactly 0 for -inf (and below -87), NaN for NaN.
INLINE F exp(F x) {
#if defined(__AVX512F__)
  // The form below in fewer instructions.
  __m512 v = bits_of<__m512>(x);
  __m512 safe = _mm512_min_ps(_mm512_set1_ps(88.0f), v);  // the second operand where one is NaN
  __mmask16 kept = _mm512_cmp_ps_mask(safe, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(safe, _mm512_set1_ps(1.44269504f)),
                                  _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-0.693359375f), safe);
  r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
  __m512 y = _mm512_set1_ps(1.9875691500e-4f);
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.3981999507e-3f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(8.3334519073e-3f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(4.1665795894e-2f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.6666665459e-1f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.0000001201e-1f));
  y = _mm512_fmadd_ps(y, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return bits_of<F>(_mm512_maskz_scalef_ps(kept, y, n));
#else
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  F capped;
  EACH_PART capped.v[p] = x.v[p] > (88.0f - (fvec){}) ? (88.0f - (fvec){}) : x.v[p];
  F safe = select_below(capped, -87.0f, set1(-87.0f), capped);
  F n = fma(safe, set1(1.44269504f), set1(magic)) - set1(magic);
  F r = fma(n, set1(-0.693359375f), safe);
  r = fma(n, set1(2.12194440e-4f), r);
  F y = set1(1.9875691500e-4f);
  y = fma(y, r, set1(1.3981999507e-3f));
  y = fma(y, r, set1(8.3334519073e-3f));
  y = fma(y, r, set1(4.1665795894e-2f));
  y = fma(y, r, set1(1.6666665459e-1f));
  y = fma(y, r, set1(5.0000001201e-1f));
  y = fma(y, r * r, r + set1(1.0f));
  U power;
  EACH_PART {
    fvec whole = n.v[p] == n.v[p] ? n.v[p] : (fvec){};  // for a NaN y is one already
    power.v[p] = (uvec)((__builtin_convertvector(whole, ivec) + 127) << 23);
  }
  F result = y * as_float(power);
  return select_below(capped, -87.0f, zero(), result);
#endif
}

INLINE F tanh(F x) {
  F e = exp(x + x);
  return set1(1.0f) - set1(2.0f) / (e + set1(1.0f));
}
INLINE F silu(F x) { return x / (set1(1.0f) + exp(zero() - x)); }
INLINE F gelu_tanh(F x) {
  F inner = set1(0.7978845608f) * fma(set1(0.044715f) * x * x, x, x);
  return set1(0.5f) * x * (set1(1.0f) + tanh(inner));
}

INLINE F from_half(const uint16_t* x) {
#if defined(__AVX512F__)
  return bits_of<F>(_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x)));
#else
  uint32_t wide[16];
  for (int i = 0; i < 16; ++i) wide[i] = x[i];
  U h = load_u32(wide);
  // The exponent is 112 too small until the product, which also makes subnormals right.
  F magnitude = as_float((h & 0x7fff) << 13) * set1(5.192296858534828e33f);
  return as_float(as_bits(magnitude) | ((h & 0x8000) << 16));
#endif
}
INLINE U widen(const uint16_t* x) {
#if defined(__AVX512F__)
  return bits_of<U>(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)));
#else
  uint32_t wide[16];
  for (int i = 0; i < 16; ++i) wide[i] = x[i];
  return load_u32(wide);
#endif
}
INLINE F from_bfloat(const uint16_t* x) { return as_float(widen(x) << 16); }

// bfloat16 bits in the upper half of each lane, rounded to nearest even; NaN stays NaN.
INLINE U round_bfloat(F a) {
  U r;
  EACH_PART {
    uvec bits = (uvec)a.v[p];
    uvec rounded = bits + 0x7fff + ((bits >> 16) & 1);
    r.v[p] = (uvec)(a.v[p] == a.v[p] ? (ivec)rounded : (ivec)(bits | 0x400000)) & 0xffff0000u;
  }
  return r;
}
INLINE void store_high(uint16_t* out, U a) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)out, _mm512_cvtepi32_epi16(bits_of<__m512i>(a >> 16)));
#else
  uint32_t wide[16];
  std::memcpy(wide, &a, sizeof(a));
  for (int i = 0; i < 16; ++i) out[i] = (uint16_t)(wide[i] >> 16);
#endif
}
INLINE uint16_t bfloat_of(float x) {
  uint32_t bits = bits_of<uint32_t>(x);
  if (x != x) return (uint16_t)((bits | 0x400000) >> 16);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
INLINE float float_of(uint16_t x) { return bits_of<float>((uint32_t)x << 16); }

// Sixteen pairs of numbers that are exact in bfloat16, and pairs of one row's inputs. With
// AVX512-BF16 a pair is a dword and a product one instruction; elsewhere pairs are two floats.
#if defined(__AVX512BF16__)
typedef uint16_t Input;
struct Pair { __m512i v; };
typedef __m512i InputPair;

INLINE F dot(F acc, Pair w, InputPair x) {
  return bits_of<F>(_mm512_dpbf16_ps(bits_of<__m512>(acc), (__m512bh)w.v, (__m512bh)x));
}
INLINE InputPair pair_at(const Input* x, int k) {
  int32_t both;
  std::memcpy(&both, x + k, 4);
  return _mm512_set1_epi32(both);
}
INLINE void store_inputs(Input* out, F a) {  // subnormal numbers become 0, as they are in products
  _mm256_storeu_si256((__m256i*)out, bits_of<__m256i>(_mm512_cvtneps_pbh(bits_of<__m512>(a))));
}
INLINE F load_inputs(const Input* x) { return from_bfloat(x); }
INLINE Pair bfloat_pair(U both) { return Pair{bits_of<__m512i>(both)}; }
INLINE Pair pair_of(F even, F odd) {  // both exact in bfloat16
  return Pair{bits_of<__m512i>((as_bits(even) >> 16) | as_bits(odd))};
}
#else
typedef float Input;
struct Pair { F even, odd; };
struct InputPair { F even, odd; };

INLINE F dot(F acc, Pair w, InputPair x) { return fma(w.odd, x.odd, fma(w.even, x.even, acc)); }
INLINE InputPair pair_at(const Input* x, int k) { return InputPair{set1(x[k]), set1(x[k + 1])}; }
INLINE void store_inputs(Input* out, F a) { store(out, as_float(round_bfloat(a))); }
INLINE F load_inputs(const Input* x) { return load(x); }
INLINE Pair bfloat_pair(U both) { return Pair{as_float(both << 16), as_float(both & 0xffff0000u)}; }
INLINE Pair pair_of(F even, F odd) { return Pair{even, odd}; }
#endif
static_assert(sizeof(Pair) % 64 == 0, "whole cache lines");

// The j-th pair of codes of a chunk (see Matrix).
template <int BITS> INLINE Pair unpack(U chunk, int j);
#if defined(__AVX512BF16__)
template <> INLINE Pair unpack<4>(U chunk, int j) {
  // Twice the numbers 0 to 15: the index is five bits, and the fifth is the next code's.
  const __m512i table = _mm512_set_epi32(
      0x41704160, 0x41504140, 0x41304120, 0x41104100, 0x40e040c0, 0x40a04080, 0x40404000, 0x3f800000,
      0x41704160, 0x41504140, 0x41304120, 0x41104100, 0x40e040c0, 0x40a04080, 0x40404000, 0x3f800000);
  return Pair{_mm512_permutexvar_epi16(_mm512_srli_epi16(bits_of<__m512i>(chunk), 4 * j), table)};
}
#else
template <> INLINE Pair unpack<4>(U chunk, int j) {
  return pair_of(to_float((chunk >> (4 * j)) & 15), to_float((chunk >> (16 + 4 * j)) & 15));
}
#endif
template <> INLINE Pair unpack<8>(U chunk, int j) {
  return pair_of(to_float((chunk >> (8 * j)) & 255), to_float((chunk >> (16 + 8 * j)) & 255));
}
template <> INLINE Pair unpack<16>(U chunk, int) { return bfloat_pair(chunk); }

}  // namespace

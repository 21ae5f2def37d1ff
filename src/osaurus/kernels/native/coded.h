// Sums over one block of codes. Sixteen tokens are taken side by side for scores, sixteen
// dimensions for values; a score sums its dimensions in order, a value its tokens.
#pragma once
#include "codes.h"
#include "simd.h"

namespace {
using namespace osaurus;

constexpr int MAX_BLOCK = 256;  // tokens

// The levels that sixteen codes stand for.
template <int BITS> INLINE F levels_of(U codes, const float* levels) {
#if defined(__AVX512F__)
  __m512i at = bits_of<__m512i>(codes);
  if (BITS <= 4) return bits_of<F>(_mm512_permutexvar_ps(at, _mm512_loadu_ps(levels)));
  if (BITS == 5)
    return bits_of<F>(_mm512_permutex2var_ps(_mm512_loadu_ps(levels), at, _mm512_loadu_ps(levels + 16)));
  return bits_of<F>(_mm512_i32gather_ps(at, levels, 4));
#else
  uint32_t at[16];
  float found[16];
  std::memcpy(at, &codes, sizeof(at));
  for (int i = 0; i < 16; ++i) found[i] = levels[at[i]];
  return load(found);
#endif
}

INLINE F halves(const uint8_t* at, int count) {
  uint16_t padded[16] = {};
  std::memcpy(padded, at, 2 * (count < 16 ? count : 16));
  return from_half(padded);
}

// acc[q] += queries[q][d] * level, over all d in order, for tokens from `words` on.
template <int BITS, int QB>
INLINE void score_codes(const uint32_t* words, int stride, int tokens, int dim, const float* levels,
                        const float* const* queries, F* acc) {
  constexpr int PER_WORD = 32 / BITS;
  constexpr uint32_t MASK = (1u << BITS) - 1;
  int d = 0, w = 0;
  auto take = [&](int count) {
    uint32_t lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = words[(i < tokens ? i : 0) * stride + w];
    U word = load_u32(lanes);
    for (int j = 0; j < count; ++j) {
      F level = levels_of<BITS>(word & MASK, levels);
      word = word >> BITS;
      for (int q = 0; q < QB; ++q) acc[q] = fma(level, set1(queries[q][d + j]), acc[q]);
    }
  };
  for (; d + PER_WORD <= dim; d += PER_WORD, ++w) take(PER_WORD);
  if (d < dim) take(dim - d);
}

template <int BITS, int QB>
void score_block(const CodedBlocks& c, const uint8_t* block, const float* queries, float* out) {
  static const float SIGNS[16] = {-1, 1};
  int words = (c.k_dim + 32 / BITS - 1) / (32 / BITS), sign_words = (c.k_dim + 31) / 32;
  int width = c.has_signs ? 2 * c.k_dim : c.k_dim;
  const float *first[QB], *second[QB];
  for (int q = 0; q < QB; ++q) {
    first[q] = queries + q * width;
    second[q] = first[q] + c.k_dim;
  }
  for (int t = 0; t < c.block_tokens; t += 16) {
    int tokens = c.block_tokens - t < 16 ? c.block_tokens - t : 16;
    F acc[QB], rest[QB];
    for (int q = 0; q < QB; ++q) acc[q] = rest[q] = zero();
    score_codes<BITS, QB>((const uint32_t*)(block + c.k_codes_at) + t * words, words, tokens, c.k_dim, c.k_levels,
                          first, acc);
    F norm = halves(block + c.k_norm_at + 2 * t, tokens);
    if (c.has_signs) {
      score_codes<1, QB>((const uint32_t*)(block + c.k_signs_at) + t * sign_words, sign_words, tokens, c.k_dim, SIGNS,
                         second, rest);
      F size = halves(block + c.k_rest_at + 2 * t, tokens);
      for (int q = 0; q < QB; ++q) acc[q] = fma(rest[q], size, acc[q]);
    }
    for (int q = 0; q < QB; ++q) {
      alignas(64) float lanes[16];
      store(lanes, acc[q] * norm);
      std::memcpy(out + q * c.block_tokens + t, lanes, sizeof(float) * tokens);
    }
  }
}

// Where the codes of dimensions [d, d + 16) lie in a token's words, of which there are `count`. What
// lies past the last of them is of no meaning.
template <int BITS> struct Places {
  static constexpr int PER_WORD = 32 / BITS;
  static constexpr uint32_t MASK = (1u << BITS) - 1;
  alignas(64) uint32_t word[16], shift[16];
  int first, words;

  Places(int d, int count) : first(d / PER_WORD), words(count - d / PER_WORD) {
    if (words > 6) words = 6;  // sixteen codes of eight bits that begin inside a word take five
    for (int i = 0; i < 16; ++i) {
      int at = (d + i) / PER_WORD - first;
      word[i] = (uint32_t)(at < words ? at : 0);
      shift[i] = (uint32_t)((d + i) % PER_WORD * BITS);
    }
  }
  INLINE F levels(const uint32_t* token, const float* table) const {
#if defined(__AVX512F__)
    __m512i near = _mm512_maskz_loadu_epi32((__mmask16)((1u << words) - 1), token + first);
    __m512i own = _mm512_srlv_epi32(_mm512_permutexvar_epi32(_mm512_load_si512(word), near), _mm512_load_si512(shift));
    return levels_of<BITS>(bits_of<U>(own) & MASK, table);
#else
    alignas(64) uint32_t codes[16];
    for (int i = 0; i < 16; ++i) codes[i] = (token[first + word[i]] >> shift[i]) & MASK;
    return levels_of<BITS>(load_u32(codes), table);
#endif
  }
};

template <int BITS, int QB>
void sum_block(const CodedBlocks& c, const uint8_t* block, const float* weights, float* out) {
  int count = (c.v_dim + 32 / BITS - 1) / (32 / BITS);
  const uint32_t* words = (const uint32_t*)(block + c.v_codes_at);
  alignas(64) float scaled[QB][MAX_BLOCK + 16];
  for (int t = 0; t < c.block_tokens; t += 16) {
    F norm = halves(block + c.v_norm_at + 2 * t, c.block_tokens - t);
    for (int q = 0; q < QB; ++q) {
      alignas(64) float padded[16] = {};
      int tokens = c.block_tokens - t < 16 ? c.block_tokens - t : 16;
      std::memcpy(padded, weights + q * c.block_tokens + t, sizeof(float) * tokens);
      store(scaled[q] + t, load(padded) * norm);
    }
  }
  for (int d = 0; d < c.v_dim; d += 16) {
    const Places<BITS> places(d, count);
    F acc[QB];
    for (int q = 0; q < QB; ++q) acc[q] = zero();
    for (int t = 0; t < c.block_tokens; ++t) {
      F level = places.levels(words + t * count, c.v_levels);
      for (int q = 0; q < QB; ++q) acc[q] = fma(level, set1(scaled[q][t]), acc[q]);
    }
    for (int q = 0; q < QB; ++q) {
      alignas(64) float lanes[16];
      store(lanes, acc[q]);
      std::memcpy(out + q * c.v_dim + d, lanes, sizeof(float) * (c.v_dim - d < 16 ? c.v_dim - d : 16));
    }
  }
}

// Queries share an unpacking by fours; each is summed by itself, so the grouping changes no bit.
template <int BITS>
void scores_of(const CodedBlocks& c, const uint8_t* block, const float* queries, int count, float* out) {
  int width = c.has_signs ? 2 * c.k_dim : c.k_dim;
  for (; count >= 4; count -= 4, queries += 4 * width, out += 4 * c.block_tokens)
    score_block<BITS, 4>(c, block, queries, out);
  if (count == 3) score_block<BITS, 3>(c, block, queries, out);
  if (count == 2) score_block<BITS, 2>(c, block, queries, out);
  if (count == 1) score_block<BITS, 1>(c, block, queries, out);
}
template <int BITS>
void sums_of_values(const CodedBlocks& c, const uint8_t* block, const float* weights, int count, float* out) {
  for (; count >= 4; count -= 4, weights += 4 * c.block_tokens, out += 4 * c.v_dim)
    sum_block<BITS, 4>(c, block, weights, out);
  if (count == 3) sum_block<BITS, 3>(c, block, weights, out);
  if (count == 2) sum_block<BITS, 2>(c, block, weights, out);
  if (count == 1) sum_block<BITS, 1>(c, block, weights, out);
}

#define EACH_WIDTH(call) \
  switch (bits) {        \
    case 1: return call<1>; \
    case 2: return call<2>; \
    case 3: return call<3>; \
    case 4: return call<4>; \
    case 5: return call<5>; \
    case 6: return call<6>; \
    case 7: return call<7>; \
    default: return call<8>; \
  }
typedef void (*BlockWork)(const CodedBlocks&, const uint8_t*, const float*, int, float*);
BlockWork scores_by(int bits) { EACH_WIDTH(scores_of) }
BlockWork sums_by(int bits) { EACH_WIDTH(sums_of_values) }
#undef EACH_WIDTH

void coded_scores(const CodedBlocks& c, const uint8_t* block, const float* queries, int count, float* out) {
  scores_by(c.k_bits)(c, block, queries, count, out);
}
void coded_sums(const CodedBlocks& c, const uint8_t* block, const float* weights, int count, float* out) {
  sums_by(c.v_bits)(c, block, weights, count, out);
}

}  // namespace

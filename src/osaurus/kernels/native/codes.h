// Attention's two sums over blocks of TurboQuant codes: what Python describes (mirrored in coded.py)
// and what each instruction set does with one block of one kv head.
#pragma once
#include <cstdint>

namespace osaurus {

// One codec's blocks: `at` are bytes from a block's start. Codes lie in words of 32 / bits each, the
// first in the lowest bits, and a token starts on a word; norms are float16.
struct CodedBlocks {
  int64_t block_bytes;
  int32_t block_tokens, k_dim, v_dim, k_bits, v_bits, has_signs;
  int32_t k_codes_at, k_norm_at, v_codes_at, v_norm_at, k_signs_at, k_rest_at;
  const float* k_levels;  // [max(16, 1 << k_bits)]
  const float* v_levels;
};

struct CodedKernels {
  const char* name;
  // Scores [queries, block_tokens] of rotated queries [queries, k_dim, or twice that with signs].
  void (*scores)(const CodedBlocks& c, const uint8_t* block, const float* queries, int count, float* out);
  // Sums [queries, v_dim] of values weighted by [queries, block_tokens].
  void (*sums)(const CodedBlocks& c, const uint8_t* block, const float* weights, int count, float* out);
};

extern const CodedKernels coded_portable;
#if defined(__x86_64__)
extern const CodedKernels coded_avx2, coded_avx512, coded_avx512bf16;
#endif

}  // namespace osaurus

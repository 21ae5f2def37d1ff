// Attention's sums over coded blocks, pair of a row and a block by pair.
#include <cstring>

#include "codes.h"
#include "run.h"

#define API extern "C" __attribute__((visibility("default")))

using namespace osaurus;

API const char* osaurus_kernels();

namespace {

constexpr int64_t UNITS = 8;  // a thread takes at a time

const CodedKernels& kernels() {
#if defined(__x86_64__)
  for (const CodedKernels* set : {&coded_avx512bf16, &coded_avx512, &coded_avx2})
    if (!std::strcmp(set->name, osaurus_kernels())) return *set;
#endif
  return coded_portable;
}

}  // namespace

// storage [blocks, heads, block_bytes]; block and row of each pair; queries [rows, heads, per_head,
// width]. Writes scores [pairs, heads, per_head, block_tokens].
API void osaurus_coded_scores(const CodedBlocks* c, const uint8_t* storage, const int64_t* block, const int64_t* row,
                              int64_t pairs, int heads, int per_head, const float* queries, float* out, int threads) {
  const CodedKernels& k = kernels();
  int64_t width = c->has_signs ? 2 * c->k_dim : c->k_dim;
  each(pairs * heads, UNITS, threads, [&](int64_t i) {
    int64_t pair = i / heads, head = i % heads;
    k.scores(*c, storage + (block[pair] * heads + head) * c->block_bytes,
             queries + (row[pair] * heads + head) * per_head * width, per_head,
             out + i * per_head * c->block_tokens);
  });
}

// weights [pairs, heads, per_head, block_tokens]. Writes sums [pairs, heads, per_head, v_dim].
API void osaurus_coded_sums(const CodedBlocks* c, const uint8_t* storage, const int64_t* block, int64_t pairs,
                            int heads, int per_head, const float* weights, float* out, int threads) {
  const CodedKernels& k = kernels();
  each(pairs * heads, UNITS, threads, [&](int64_t i) {
    k.sums(*c, storage + (block[i / heads] * heads + i % heads) * c->block_bytes,
           weights + i * per_head * c->block_tokens, per_head, out + i * per_head * c->v_dim);
  });
}

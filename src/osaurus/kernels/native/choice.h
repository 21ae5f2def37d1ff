// Choosing tokens: what Python asks for (Ask is mirrored in choice.py) and what each
// instruction set does for it with one piece of a row.
#pragma once
#include <cstddef>
#include <cstdint>

namespace osaurus {

// Entries of a piece. Pieces end at multiples of it and their sums are joined in order, so neither
// threads nor other rows change a result.
constexpr int64_t CHOICE_PIECE = 16384;
// How far below the best score it is looked how many entries there are, and of what weight.
constexpr int DEPTHS = 8;
constexpr float DEPTH[DEPTHS] = {1, 2, 4, 6, 8, 11, 16, 24};

struct Candidate {
  float score;
  int32_t id;
};

// What of a row survives top-k, top-p and min-p, the best first; or, where `draws` is set, those
// of it whose score and keyed noise together are the largest.
struct Ask {
  const float* row;
  int64_t vocab;
  uint64_t key;
  double top_p;       // 0: none
  float temperature;
  float min_p;        // logarithm, or -inf
  int32_t top_k;      // 0: none
  int32_t draws;
  int32_t capacity, reserved;
  int32_t* ids;      // [capacity]
  float* scores;     // [capacity] of the ids, after temperature, or null
  double log_total;  // out: of all scores
  int32_t count;     // out; -1 where the row has no choice to make or it needs more room
};

// Weights are exponentials of scores less the best. Of every four entries only the largest is
// weighed and counted, so a depth holds this much at least.
struct Depths {
  float total;  // of all entries
  float weight[DEPTHS];
  int32_t count[DEPTHS];
};

struct Contender {
  double score;
  int32_t id;
};

// Scores near enough to each other that another logarithm might order them otherwise.
constexpr double CHOICE_MARGIN = 1e-9;

// `best` is the row's largest logit, `scale` 1 / temperature.
struct ChoiceKernels {
  const char* name;
  // The largest entry, NaN aside; false where an entry is not finite.
  bool (*best)(const float* x, int64_t n, float* largest);
  int64_t (*find)(const float* x, int64_t n, float value);
  // Weights only where asked for.
  void (*measure)(const float* x, int64_t n, float best, float scale, bool weighs, Depths* out);
  // The weight of all entries, and of those that are `least` or more.
  void (*weigh)(const float* x, int64_t n, float best, float scale, float least, float* total, float* above);
  // Entries with (x - best) * scale >= -depth: their logits and places.
  int64_t (*collect)(const float* x, int64_t n, float best, float scale, float depth, Candidate* out);
  // Places of entries that may reach `least` (a sum of score and noise, less the best score). The
  // caller raises it as it goes. Looks at [from, n), returns where it stopped after `room` or more
  // finds were written.
  int64_t (*contend)(const float* x, int64_t from, int64_t n, int64_t first_id, uint64_t key, float best,
                     float scale, float least, int32_t* out, int* found);
};

extern const ChoiceKernels choice_portable;
#if defined(__x86_64__)
extern const ChoiceKernels choice_avx2, choice_avx512, choice_avx512bf16;
#endif

// splitmix64 (Steele et al. 2014), as in kernels/sample.py.
constexpr uint64_t WEYL = 0x9E3779B97F4A7C15u;
inline uint64_t mixed(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

}  // namespace osaurus

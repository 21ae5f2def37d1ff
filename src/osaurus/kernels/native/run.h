// A program (a model's step as a list of operations on row buffers) and one run of it.
#pragma once
#include <atomic>
#include <cstring>
#include <vector>

#include "abi.h"

namespace osaurus {

// Rows beyond these are taken in pieces, so that what a piece reads again stays in the cache.
constexpr int MAX_PIECE_ROWS = 512;
// Tokens of one part of a row's attention. Parts end at multiples of it whatever runs beside a
// row and are joined oldest first, so neither threads nor company change a sum's order.
constexpr int PART_TOKENS = 256;
// Rows of a span from which on a thread takes all parts of its rows, one after another.
constexpr int MANY_ROWS = 17;
// Queries that share one unpacking of keys and values.
constexpr int TILE_QUERIES = 64;
constexpr size_t SCRATCH_BYTES = 640 << 10;
constexpr int MAX_HEAD_DIM = 512;

enum BufferKind : int32_t { FLOATS = 0, INPUTS = 1 };

struct BufferShape {
  int32_t kind, width;
};

struct Buffer {
  float* floats = nullptr;  // FLOATS: [T, width]
  void* inputs = nullptr;   // INPUTS: [T, width] of the kernels' input type
  float* sums = nullptr;    // INPUTS: [T, sums_of(width)]
  int64_t width = 0;
  int64_t ld = 0;           // numbers from row to row
};

// Sums of inputs over groups of 16, then 32, 64 and 128, as far as these divide the width.
inline int64_t sums_before(int64_t width, int group) {
  int64_t offset = 0;
  for (int size = 16; size < group; size *= 2) offset += width / size;
  return offset;
}
inline int64_t sums_of(int64_t width) { return sums_before(width, 256); }

// Rows one page apart would all fall into the same few places of a cache.
inline int64_t row_length(int64_t width, size_t bytes) {
  return width * bytes % 1024 ? width : width + 128 / (int64_t)bytes;
}

struct Program {
  std::vector<Op> ops;
  std::vector<BufferShape> shapes;
};

// Rows [first, first + rows) of a span, and the parts of the sequence they attend to.
struct AttendItem {
  int32_t span, row, rows, first_part, end_part;
};

// Attention work of one window over one KV group.
struct AttendPlan {
  int32_t window, tile_rows;
  std::vector<AttendItem> items;
  std::vector<int32_t> first_slot;  // [T + 1] where a row's parts lie among all parts
};

struct Run {
  const Program* program;
  const Args* args;
  const Buffer* buffers;
  const AttendPlan* plans;  // by op i[5]
  float* parts;             // of one layer's attention at a time
  const int32_t* row_span;  // [T] the span of each row
  int threads;
};

struct Kernels {
  const char* name;
  size_t input_bytes, pair_bytes;
  int (*chunks)(const Run&, const Op&);
  void (*execute)(const Run&, const Op&, int chunk, void* scratch);
};

extern const Kernels kernels_portable;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512bf16;
#endif

// Runs work(thread) on every thread of the team and returns when all have.
void parallel(int threads, void (*work)(void* data, int thread), void* data);

// Runs work(i) for all i in [0, count); a thread takes `unit` of them at a time.
template <class Work> void each(int64_t count, int64_t unit, int threads, const Work& work) {
  struct Job {
    const Work* work;
    int64_t count, unit;
    std::atomic<int64_t> next{0};
  } job{&work, count, unit};
  if (threads > count / unit) threads = (int)(count / unit);
  parallel(threads, [](void* data, int) {
    Job& j = *(Job*)data;
    for (int64_t first; (first = j.next.fetch_add(j.unit)) < j.count;)
      for (int64_t i = first; i < first + j.unit && i < j.count; ++i) (*j.work)(i);
  }, &job);
}

}  // namespace osaurus

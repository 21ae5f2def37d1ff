// Runs programs: buffers, attention plans and the walk of all threads through the operations.
#include <algorithm>
#include <cstdlib>
#include <new>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <sched.h>

#include "step.h"

namespace osaurus {
namespace {

constexpr int SPINS_BEFORE_YIELD = 1024;

void pause_once(int spins) {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
  if (spins % SPINS_BEFORE_YIELD == 0) sched_yield();
}

// Progress through one operation. Whoever comes takes the next chunk; the operation after it
// starts when every chunk is done, whether or not every thread has come by.
struct alignas(64) Progress {
  std::atomic<int> next{0};
  char apart[60];
  std::atomic<int> done{0};
};

struct Walk {
  const Run* run;
  const Kernels* kernels;
  const Op* ops;
  int count;
  const int* chunks;
  Progress* progress;
  char* scratch;
};

void walk(void* data, int thread) {
  Walk& w = *(Walk*)data;
  void* scratch = w.scratch + (size_t)thread * SCRATCH_BYTES;
  for (int i = 0; i < w.count; ++i) {
    Progress& at = w.progress[i];
    for (int chunk; (chunk = at.next.fetch_add(1, std::memory_order_relaxed)) < w.chunks[i];) {
      w.kernels->execute(*w.run, w.ops[i], chunk, scratch);
      at.done.fetch_add(1, std::memory_order_release);
    }
    if (i + 1 < w.count && w.ops[i + 1].beside) continue;
    for (int j = i; j >= 0; --j) {
      for (int spins = 1; w.progress[j].done.load(std::memory_order_acquire) < w.chunks[j]; ++spins)
        pause_once(spins);
      if (!w.ops[j].beside) break;
    }
  }
}

AttendPlan plan_of(const Args& a, int window, int per_kv) {
  AttendPlan plan;
  plan.window = window;
  plan.tile_rows = std::max(1, TILE_QUERIES / per_kv);
  plan.first_slot.assign(1, 0);
  for (int s = 0; s < a.spans; ++s) {
    const Span& span = a.span[s];
    bool many = span.length >= MANY_ROWS;
    auto first_part = [&](int position) {
      return window && position >= window ? (position - window + 1) / PART_TOKENS : 0;
    };
    for (int r = 0; r < span.length; ++r) {
      int position = span.first_position + r;
      int parts = many ? 1 : position / PART_TOKENS + 1 - first_part(position);
      plan.first_slot.push_back(plan.first_slot.back() + parts);
    }
    for (int r = 0; r < span.length;) {
      int position = span.first_position + r;
      int rows = std::min(plan.tile_rows, span.length - r);
      // Rows that read the same parts share an item, so that each part finds its rows' slots.
      if (!many)
        while (first_part(position + rows - 1) != first_part(position) ||
               (position + rows - 1) / PART_TOKENS != position / PART_TOKENS)
          --rows;
      int last = (position + rows - 1) / PART_TOKENS + 1, first = first_part(position);
      if (many)
        plan.items.push_back({s, span.start + r, rows, first, last});
      else
        for (int part = first; part < last; ++part) plan.items.push_back({s, span.start + r, rows, part, part + 1});
      r += rows;
    }
  }
  return plan;
}

}  // namespace

void* Arena::get(size_t bytes) {
  if (bytes > size_) {
    std::free(data_);
    size_ = (bytes + 4095) / 4096 * 4096;
    data_ = std::aligned_alloc(4096, size_);
    if (!data_) {
      size_ = 0;
      throw std::bad_alloc();
    }
  }
  return data_;
}

void Arena::drop() {
  std::free(data_);
  data_ = nullptr;
  size_ = 0;
}

Stage::~Stage() {
  rows_.drop();
  parts_.drop();
  scratch_.drop();
}

void Stage::run(const Program& program, const Kernels& kernels, const Args& args, int count, int threads) {
  size_t total = 0;
  auto align = [](size_t n) { return (n + 63) / 64 * 64; };
  size_t rows = std::max(args.rows, args.logits_rows);
  for (const BufferShape& shape : program.shapes) {
    size_t bytes = shape.kind == FLOATS ? sizeof(float) : kernels.input_bytes;
    total += align(rows * row_length(shape.width, bytes) * bytes);
    if (shape.kind == INPUTS) total += align(rows * sums_of(shape.width) * sizeof(float));
  }
  char* at = (char*)rows_.get(total);
  std::vector<Buffer> buffers;
  for (const BufferShape& shape : program.shapes) {
    Buffer b;
    b.width = shape.width;
    b.ld = row_length(shape.width, shape.kind == FLOATS ? sizeof(float) : kernels.input_bytes);
    if (shape.kind == FLOATS) {
      b.floats = (float*)at;
      at += align(rows * b.ld * sizeof(float));
    } else {
      b.inputs = at;
      at += align(rows * b.ld * kernels.input_bytes);
      b.sums = (float*)at;
      at += align(rows * sums_of(shape.width) * sizeof(float));
    }
    buffers.push_back(b);
  }
  // One plan for each pair of window and queries a kv head; ATTEND and JOIN name it by number.
  std::vector<AttendPlan> plans;
  size_t parts = 0;
  for (int i = 0; i < count; ++i) {
    const Op& op = program.ops[i];
    if (op.kind != ATTEND) continue;
    if (op.i[5] >= (int)plans.size()) plans.resize(op.i[5] + 1);
    AttendPlan& plan = plans[op.i[5]];
    if (plan.first_slot.empty()) plan = plan_of(args, op.i[4], op.i[0] / op.i[1]);
    parts = std::max(parts, (size_t)plan.first_slot.back() * op.i[0] * (op.i[3] + 2 * LANES));
  }
  std::vector<int32_t> row_span(args.rows);
  for (int s = 0; s < args.spans; ++s)
    for (int r = 0; r < args.span[s].length; ++r) row_span[args.span[s].start + r] = s;

  Run run{&program, &args, buffers.data(), plans.data(), (float*)parts_.get(parts * sizeof(float)),
          row_span.data(), threads};
  std::vector<int> chunks(count);
  for (int i = 0; i < count; ++i) chunks[i] = kernels.chunks(run, program.ops[i]);
  std::vector<Progress> progress(count);
  Walk all{&run, &kernels, program.ops.data(), count, chunks.data(), progress.data(),
           (char*)scratch_.get((size_t)threads * SCRATCH_BYTES)};
  parallel(threads, walk, &all);
}

}  // namespace osaurus

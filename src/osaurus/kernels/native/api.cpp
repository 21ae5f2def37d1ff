// What Python calls, through ctypes: plain C, which releases the interpreter's lock.
#include <algorithm>
#include <exception>

#include "step.h"

#define API extern "C" __attribute__((visibility("default")))

using namespace osaurus;

namespace {

// Instruction sets of this build that this processor has, the best first.
const std::vector<const Kernels*>& available() {
  static const std::vector<const Kernels*> found = [] {
    std::vector<const Kernels*> all;
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) all.push_back(&kernels_avx512bf16);
    if (avx512) all.push_back(&kernels_avx512);
    if (avx2) all.push_back(&kernels_avx2);
#endif
    all.push_back(&kernels_portable);
    return all;
  }();
  return found;
}

const Kernels* current = nullptr;

const Kernels& kernels() {
  if (!current) current = available().front();
  return *current;
}

struct Layout {
  int64_t group, code_bytes, scale_size, group_bytes, tile_bytes;
  explicit Layout(const Matrix& w) {
    group = w.bits == 16 ? w.k : w.group;
    code_bytes = group * w.bits * 2;
    scale_size = w.bits == 16 ? 0 : (w.scale_kind == F32 ? 4 : 2);
    group_bytes = code_bytes + scale_size * LANES * (w.has_offset ? 2 : 1);
    tile_bytes = group_bytes * (w.k / group);
  }
};

struct Program_ {
  Program program;
  Stage stage;
};

}  // namespace

API int osaurus_abi() { return ABI_VERSION; }
API const char* osaurus_kernels() { return kernels().name; }
API const char* osaurus_kernels_at(int index) {
  return index >= 0 && index < (int)available().size() ? available()[index]->name : nullptr;
}
API void osaurus_use_kernels(int index) { current = available()[index]; }

API int64_t osaurus_matrix_bytes(const Matrix* w) {
  return Layout(*w).tile_bytes * tiles_of(*w);
}

// Rows [first, first + count) from codes [count, k] (bytes, or bfloat16 with 16 bits) and scales
// and offsets [count, k / group] of the matrix's kind.
API void osaurus_pack(const Matrix* w, int64_t first, int64_t count, const void* codes, const void* scales,
                      const void* offsets) {
  Layout at(*w);
  uint8_t* data = const_cast<uint8_t*>(w->data);
  int64_t groups = w->k / at.group, per_chunk = 32 / w->bits;
  for (int64_t r = 0; r < count; ++r) {
    int64_t n = first + r, lane = n % LANES;
    uint8_t* p = data + n / LANES * at.tile_bytes;
    for (int64_t g = 0; g < groups; ++g, p += at.group_bytes) {
      for (int64_t k = 0; k < at.group; k += per_chunk) {
        uint32_t chunk = 0;
        for (int64_t i = 0; i < per_chunk; ++i) {
          int64_t place = r * w->k + g * at.group + k + i;
          uint32_t code = w->bits == 16 ? ((const uint16_t*)codes)[place] : ((const uint8_t*)codes)[place];
          chunk |= code << ((i & 1) * 16 + i / 2 * w->bits);
        }
        std::memcpy(p + (k / per_chunk * LANES + lane) * 4, &chunk, 4);
      }
      if (w->bits == 16) continue;
      uint8_t* scale = p + at.code_bytes + lane * at.scale_size;
      int64_t place = (r * groups + g) * at.scale_size;
      std::memcpy(scale, (const uint8_t*)scales + place, at.scale_size);
      if (w->has_offset)
        std::memcpy(scale + LANES * at.scale_size, (const uint8_t*)offsets + place, at.scale_size);
    }
  }
}

API void* osaurus_program(const Op* ops, int count, const BufferShape* shapes, int shape_count) {
  auto* made = new Program_;
  made->program.ops.assign(ops, ops + count);
  made->program.shapes.assign(shapes, shapes + shape_count);
  return made;
}
API void osaurus_free(void* program) { delete (Program_*)program; }

// 0, or 1 when there is no memory for the rows.
API int osaurus_run(void* program, const Args* args, int count, int threads) {
  auto* p = (Program_*)program;
  try {
    p->stage.run(p->program, kernels(), *args, count, threads);
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}

// out [rows, n] = x [rows, k] times the matrix; both bfloat16, or float32 where the flag is 0.
API int osaurus_linear(const Matrix* w, const void* x, int x_is_bfloat, int rows, void* out, int out_is_bfloat,
                       int threads) {
  thread_local Program_ held;
  Op take{TAKE, -1, 0, 0, 0, 0, {x_is_bfloat}, {}, {x}};
  Op linear{LINEAR, 0, out_is_bfloat ? 1 : -1, 0, 0, 0, {0, (int32_t)w->n}, {}, {w}};
  Op give{GIVE, 1, -1, 0, 0, 0, {}, {}, {out}};
  held.program.ops = {take, linear, give};
  held.program.shapes = {{INPUTS, (int32_t)w->k}, {FLOATS, (int32_t)w->n}};
  if (!out_is_bfloat) held.program.shapes.pop_back();
  Args args{};
  args.rows = rows;
  args.logits = (float*)out;
  return osaurus_run(&held, &args, out_is_bfloat ? 3 : 2, threads);
}

// Output features as floats: out [count, k].
API void osaurus_rows(const Matrix* w, const int64_t* rows, int count, float* out, int threads) {
  Args args{};
  args.rows = count;
  args.token_ids = rows;
  Program program;
  program.ops.push_back(Op{EMBED, -1, 0, 0, 0, 0, {}, {1.0f}, {w}});
  Buffer target;
  target.floats = out;
  target.width = target.ld = w->k;
  Run run{&program, &args, &target, nullptr, nullptr, nullptr, threads};
  struct Job {
    const Run* run;
    std::atomic<int> next{0};
  } job{&run};
  parallel(threads, [](void* data, int) {
    Job& j = *(Job*)data;
    int total = kernels().chunks(*j.run, j.run->program->ops[0]);
    for (int chunk; (chunk = j.next.fetch_add(1)) < total;)
      kernels().execute(*j.run, j.run->program->ops[0], chunk, nullptr);
  }, &job);
}

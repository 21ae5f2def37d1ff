// The operations of a program, compiled once for each instruction set (OSAURUS_KERNELS names it).
#include "attention.h"
#include "linear.h"
#include "rows.h"

namespace {
using namespace osaurus;

constexpr int GATE_COLUMNS = 512;  // a multiple of the largest group
static_assert(GATE_COLUMNS % 128 == 0, "a piece holds whole groups");

int rows_of(const Run& run, const Op& op) { return op.rows ? run.args->logits_rows : run.args->rows; }
int rows_a_chunk(const Run& run, int rows) {
  int share = rows / (run.threads * 4);
  return share < 1 ? 1 : share;
}
int divide_up(int64_t a, int64_t b) { return (int)((a + b - 1) / b); }

// A gated product counts the tiles of both matrices.
int64_t tiles_of(const Op& op) { return op.kind == GATED ? op.i[3] / LANES * 2 : tiles_of(*(const Matrix*)op.p[0]); }

int64_t tiles_a_chunk(const Run& run, const Op& op) {
  bool few = rows_of(run, op) <= FEW_ROWS;
  int64_t unit = few ? 4 : 2;
  // A chunk of inputs holds whole groups of them.
  if (op.kind == GATED && op.i[1] / LANES * 2 > unit) unit = op.i[1] / LANES * 2;
  int64_t share = tiles_of(op) / unit / (run.threads * 16);
  return unit * (share < 1 ? 1 : share);
}

int chunks(const Run& run, const Op& op) {
  int rows = rows_of(run, op);
  if (!rows) return 0;
  switch (op.kind) {
    case LINEAR:
    case GATED:
      return divide_up(tiles_of(op), tiles_a_chunk(run, op));
    case ATTEND:
      return (int)run.plans[op.i[5]].items.size() * op.i[1];
    case GATE:
      return divide_up(rows, rows_a_chunk(run, rows)) * divide_up(run.buffers[op.out].width, GATE_COLUMNS);
    default:
      return divide_up(rows, rows_a_chunk(run, rows));
  }
}

void linear_chunk(const Run& run, const Op& op, int chunk, void* scratch) {
  const Matrix& w = *(const Matrix*)op.p[0];
  int64_t step = tiles_a_chunk(run, op), first = chunk * step, end = first + step;
  if (end > tiles_of(op)) end = tiles_of(op);
  const Buffer& in = run.buffers[op.in];
  const float* sums = in.sums + (w.bits == 16 ? 0 : sums_before(in.width, w.group));
  Rows rows{(const Input*)in.inputs, sums, in.ld, sums_of(in.width)};
  int m = rows_of(run, op);
  if (op.kind == GATED) {
    const Buffer& out = run.buffers[op.out];
    Gated target{w, *(const Matrix*)op.p[1], op.i[2] / LANES, (Input*)out.inputs, out.ld, op.i[0]};
    multiply(w, rows, m, target, first, end, scratch);
    int64_t from = first / 2 * LANES, to = end / 2 * LANES < out.width ? end / 2 * LANES : out.width;
    for (int row = 0; row < m; ++row) sum_inputs(out, row, from, to, op.i[1]);
    return;
  }
  if (op.out < 0) {
    multiply(w, rows, m, Columns{w, run.args->logits + op.i[0], op.i[1], op.i[2] != 0}, first, end, scratch);
  } else {
    const Buffer& out = run.buffers[op.out];
    multiply(w, rows, m, Columns{w, out.floats + op.i[0], out.ld, op.i[2] != 0}, first, end, scratch);
  }
}

void attend_chunk(const Run& run, const Op& op, int chunk, void* scratch) {
  const AttendPlan& plan = run.plans[op.i[5]];
  const AttendItem& item = plan.items[chunk / op.i[1]];
  int kv_head = chunk % op.i[1];
  const Args& a = *run.args;
  const Group& group = a.group[op.i[7]];
  AttendShape s{op.i[0], op.i[1], op.i[2], op.i[3], a.block_tokens, op.i[4], op.f[0]};
  const Buffer& q = run.buffers[op.in];
  int64_t part = op.i[0] * partial_floats(s.v_dim);
  float* slots[TILE_QUERIES];
  for (int r = 0; r < item.rows; ++r) {
    int row = item.row + r, slot = plan.first_slot[row];
    bool split = plan.first_slot[row + 1] - slot > 1;
    if (split) {
      int first = a.span[item.span].first_position + row - a.span[item.span].start;
      int oldest = s.window && first >= s.window ? first - s.window + 1 : 0;
      slot += item.first_part - oldest / PART_TOKENS;
    }
    slots[r] = run.parts + slot * part;
  }
  const int32_t* table = group.table + group.table_start[item.span];
  const Input* first_query = inputs_at(q, item.row) + kv_head * (s.heads / s.kv_heads) * s.dim;
  const uint16_t* storage = (const uint16_t*)a.storage[op.i[6]];
  if (s.block_tokens % 32 == 0)
    attend_item<2>(s, a.span[item.span], item, table, group.first_block[item.span], storage, kv_head, first_query,
                   q.ld, slots, scratch);
  else
    attend_item<1>(s, a.span[item.span], item, table, group.first_block[item.span], storage, kv_head, first_query,
                   q.ld, slots, scratch);
}

void join_row(const Run& run, const Op& op, int row, void* scratch) {
  const AttendPlan& plan = run.plans[op.i[5]];
  int64_t floats = partial_floats(op.i[3]), part = op.i[0] * floats;
  int slot = plan.first_slot[row], count = plan.first_slot[row + 1] - slot;
  float* out = (float*)scratch;
  const float* sinks = (const float*)op.p[0];
  for (int h = 0; h < op.i[0]; ++h)
    finish_head(run.parts + slot * part + h * floats, count, part, op.i[3], sinks ? sinks + h : nullptr,
                out + h * op.i[3]);
  round_row(out, run.buffers[op.out], row);
}

void rope_one(const Run& run, const Op& op, int row) {
  const Args& a = *run.args;
  const Group& group = a.group[op.i[7]];
  int position = a.positions[row], span = run.row_span[row];
  RopeShape s{op.i[0], op.i[1], op.i[2], op.i[4], a.block_tokens, op.i[3]};
  int64_t block = group.table[group.table_start[span] + position / s.block_tokens - group.first_block[span]];
  int64_t block_numbers = (int64_t)s.kv_heads * s.block_tokens * (s.dim + s.v_dim);
  const float* table = s.rotary ? a.rotary[op.i[5]] + (int64_t)position * 2 * s.rotary : nullptr;
  rope_row(op, s, floats_at(run.buffers[op.in], row), table, inputs_at(run.buffers[op.out], row),
           (uint16_t*)a.storage[op.i[6]] + block * block_numbers, position % s.block_tokens);
}

void take_row(const Op& op, const Buffer& out, int row) {
  if (!op.i[0]) return round_row((const float*)op.p[0] + row * out.width, out, row);
  const uint16_t* x = (const uint16_t*)op.p[0] + row * out.width;
  Input* y = inputs_at(out, row);
  for (int64_t i = 0; i < out.width; i += LANES) store_inputs(y + i, from_bfloat(x + i));
  sum_inputs(out, row, 0, out.width);
}

void one_row(const Run& run, const Op& op, int row, void* scratch) {
  const Args& a = *run.args;
  const Buffer* b = run.buffers;
  int source = op.rows ? (int)a.logits_row[row] : row;
  switch (op.kind) {
    case EMBED: {
      const Matrix& w = *(const Matrix*)op.p[0];
      if (a.embeds)
        std::memcpy(floats_at(b[op.out], row), a.embeds + row * w.k, sizeof(float) * w.k);
      else
        embed_row(w, a.token_ids[row], op.f[0], floats_at(b[op.out], row));
      break;
    }
    case NORM:
      norm_row(floats_at(b[op.in], source), (const float*)op.p[0], op.f[0], b[op.out], row);
      break;
    case NORM_ADD:
      norm_add_row(floats_at(b[op.in], row), (const float*)op.p[0], op.f[0], floats_at(b[op.out], row),
                   b[op.out].width);
      break;
    case ROPE:
      rope_one(run, op, row);
      break;
    case JOIN:
      join_row(run, op, row, scratch);
      break;
    case ROUND:
      round_row(floats_at(b[op.in], row), b[op.out], row);
      break;
    case COPY:
      std::memcpy(a.taps[op.i[0]] + row * b[op.in].width, floats_at(b[op.in], row), sizeof(float) * b[op.in].width);
      break;
    case TAKE:
      take_row(op, b[op.out], row);
      break;
    case GIVE: {
      const float* x = floats_at(b[op.in], row);
      uint16_t* y = (uint16_t*)op.p[0] + row * b[op.in].width;
      for (int64_t i = 0; i < b[op.in].width; ++i) y[i] = bfloat_of(x[i]);
    }
  }
}

void execute(const Run& run, const Op& op, int chunk, void* scratch) {
  if (op.kind == LINEAR || op.kind == GATED) return linear_chunk(run, op, chunk, scratch);
  if (op.kind == ATTEND) return attend_chunk(run, op, chunk, scratch);
  int rows = rows_of(run, op), step = rows_a_chunk(run, rows), pieces = 1, piece = 0;
  if (op.kind == GATE) {
    pieces = divide_up(run.buffers[op.out].width, GATE_COLUMNS);
    piece = chunk % pieces;
  }
  int first = chunk / pieces * step, end = first + step < rows ? first + step : rows;
  for (int row = first; row < end; ++row) {
    if (op.kind != GATE) {
      one_row(run, op, row, scratch);
      continue;
    }
    const Buffer& out = run.buffers[op.out];
    const float* gate = floats_at(run.buffers[op.in], row);
    int64_t from = (int64_t)piece * GATE_COLUMNS, to = from + GATE_COLUMNS;
    gate_row(gate, gate + out.width, op.i[0], out, row, from, to < out.width ? to : out.width);
  }
}

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#define JOINED_OF(a, b) a##b
#define JOINED(a, b) JOINED_OF(a, b)

}  // namespace

namespace osaurus {
extern const Kernels JOINED(kernels_, OSAURUS_KERNELS);
const Kernels JOINED(kernels_, OSAURUS_KERNELS) = {TEXT(OSAURUS_KERNELS), sizeof(Input), sizeof(Pair), chunks,
                                                   execute};
}  // namespace osaurus

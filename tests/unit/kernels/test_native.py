"""Claims: native kernels compute what their torch references do, on every instruction set this
processor has, and a row's bits depend on that row alone: not on the rows beside it, not on the
number of threads, not on whether it is decoded or part of a prefill chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from osaurus.kernels.native.library import kernel_set, kernel_sets, native, use_kernel_set
from osaurus.kernels.native.matrix import NativeMatrix
from osaurus.kernels.native.program import (
    Activation,
    AttentionShape,
    ProgramBuilder,
    StepRows,
)
from osaurus.kernels.norm import rms_norm_reference
from osaurus.kernels.paged_attention import attention_reference
from osaurus.kernels.rope import apply_rope

pytestmark = pytest.mark.skipif(native().library is None, reason=native().reason)


@pytest.fixture(params=kernel_sets() if native().library else [], autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    before, threads = kernel_set(), torch.get_num_threads()
    use_kernel_set(request.param)
    yield request.param
    use_kernel_set(before)
    torch.set_num_threads(threads)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Products.


@dataclass(frozen=True)
class Form:
    bits: int
    group: int = 0
    dtype: torch.dtype = torch.float16
    centre: float | None = None


FORMS = [
    Form(4, 32),
    Form(4, 64, torch.bfloat16),
    Form(4, 16, torch.float32),
    Form(4, 32, centre=8.0),
    Form(8, 32, centre=128.0),
    Form(8, 128, torch.float32),
    Form(8, 16, torch.bfloat16),
    Form(16),
]


def made(form: Form, n: int, k: int, seed: int) -> tuple[NativeMatrix, Tensor]:
    """A matrix with a bias, and [n, k] float64 of what it stands for."""
    bias = random(n, seed=seed + 1)
    matrix = NativeMatrix(
        n, k, form.bits, group=form.group, scale_dtype=form.dtype, centre=form.centre, bias=bias
    )
    if form.bits == 16:
        weight = random(n, k, seed=seed).bfloat16()
        for first in range(0, n, 7):
            matrix.fill_dense(first, weight[first : first + 7])
        return matrix, weight.double()
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << form.bits, (n, k), generator=g, dtype=torch.uint8)
    scale = (torch.rand(n, k // form.group, generator=g) / (1 << form.bits)).to(form.dtype)
    offset = random(n, k // form.group, seed=seed + 2).to(form.dtype)
    for first in range(0, n, 7):
        rows = slice(first, first + 7)
        matrix.fill_codes(first, codes[rows], scale[rows], None if form.centre else offset[rows])
    if form.centre:
        offset = -form.centre * scale.double()
    grouped = codes.double().view(n, -1, form.group) * scale.double().unsqueeze(-1)
    return matrix, (grouped + offset.double().unsqueeze(-1)).view(n, k)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(64, 128), (100, 640), (7, 2176), (200, 4352)])
def test_products_are_those_of_the_stored_weights(form: Form, n: int, k: int) -> None:
    matrix, weight = made(form, n, k, seed=n + k)
    torch.testing.assert_close(
        matrix.rows(torch.tensor([n - 1, 0, 3])).double(),
        weight[[n - 1, 0, 3]],
        rtol=1e-6,
        atol=1e-6,
    )
    x = random(37, k, seed=5).bfloat16()
    got = matrix.linear(x, torch.float32).double()
    assert matrix.bias is not None
    wanted = x.double() @ weight.t() + matrix.bias.double()
    assert (got - wanted).norm() / wanted.norm() < 1e-6
    assert torch.equal(matrix.linear(x, torch.bfloat16), got.float().bfloat16())


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_row_of_a_product_has_the_bits_it_has_alone(form: Form) -> None:
    matrix, _ = made(form, 176, 2304, seed=3)
    x = random(600, 2304, seed=4)
    together = matrix.linear(x, torch.float32)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 32, 33, 40, 513):
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for first in (0, 600 - count):
                alone = matrix.linear(x[first : first + count], torch.float32)
                assert torch.equal(alone, together[first : first + count]), (count, threads)


def test_inputs_that_are_no_numbers_spoil_their_own_row_only() -> None:
    matrix, _ = made(Form(4, 32), 64, 128, seed=1)
    x = random(3, 128, seed=2)
    clean = matrix.linear(x, torch.float32)
    x[1, 5] = float("nan")
    got = matrix.linear(x, torch.float32)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


# Operations of a step, each in a program that ends in a product with one.


def one(width: int) -> NativeMatrix:
    matrix = NativeMatrix(width, width, 16)
    matrix.fill_dense(0, torch.eye(width))
    return matrix


def plain_rows(x: Tensor) -> StepRows:
    count = x.shape[0]
    return StepRows(
        token_ids=torch.zeros(count, dtype=torch.int64),
        q_start=(0, count),
        kv_len=(count,),
        block_table=(),
        first_block=(),
        logits_rows=torch.arange(count),
        embeds=x,
    )


def run_plain(build: ProgramBuilder, x: Tensor, out: int, *, width: int) -> Tensor:
    build.head(out, one(width))
    ops = build.num_ops
    logits = build.build().run(
        plain_rows(x), num_ops=ops, block_tokens=16, storage=[], rotary=[], vocab_size=width
    )
    assert logits is not None
    return logits


@pytest.mark.parametrize("width", [16, 576, 2560])
def test_norms_and_gates_are_those_of_their_references(width: int) -> None:
    x, weight = 3 * random(40, 2 * width, seed=width), random(2 * width, seed=1)
    build = ProgramBuilder()
    source, out = build.floats(2 * width), build.inputs(2 * width)
    build.embed(one(2 * width), source, 1.0)
    build.norm(source, out, weight, 1e-5)
    wanted = rms_norm_reference(x, weight, 1e-5)
    got = run_plain(build, x, out, width=2 * width)
    torch.testing.assert_close(got.double(), wanted, rtol=1 / 256, atol=1e-6)
    assert torch.equal(got, got.bfloat16().float())

    build = ProgramBuilder()
    source, target = build.floats(2 * width), build.floats(2 * width)
    out = build.inputs(2 * width)
    build.embed(one(2 * width), source, 1.0)
    build.embed(one(2 * width), target, 1.0)
    build.norm_add(source, target, weight, 1e-5)
    build.round(target, out)
    got = run_plain(build, x, out, width=2 * width)
    torch.testing.assert_close(got.double(), wanted + x.double(), rtol=1 / 256, atol=1e-5)

    for activation, reference in (
        ("silu", torch.nn.functional.silu),
        ("gelu_tanh", lambda z: torch.nn.functional.gelu(z, approximate="tanh")),
    ):
        build = ProgramBuilder()
        source, out = build.floats(2 * width), build.inputs(width)
        build.embed(one(2 * width), source, 1.0)
        build.gate(source, out, activation)  # type: ignore[arg-type]
        wanted = reference(x[:, :width].double()) * x[:, width:].double()
        got = run_plain(build, x, out, width=width)
        torch.testing.assert_close(got.double(), wanted, rtol=1 / 200, atol=1e-5)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("is_one", [True, False])
def test_a_gated_product_has_the_bits_of_its_parts(form: Form, is_one: bool) -> None:
    k, width = 2176, 256
    gate, _ = made(form, width * (2 if is_one else 1), k, seed=7)
    gate_up = [gate] if is_one else [gate, made(form, width, k, seed=8)[0]]
    down, _ = made(form, 48, width, seed=9)
    x = random(530, k, seed=10)

    def run(rows: Tensor, activation: Activation, together: bool) -> Tensor:
        build = ProgramBuilder()
        source, rounded = build.floats(k), build.inputs(k)
        gates, gated = build.floats(2 * width), build.inputs(width)
        build.embed(one(k), source, 1.0)
        build.round(source, rounded)
        if together:
            assert build.gated(rounded, gated, gate_up, activation, for_group=form.group)
        else:
            build.linear(rounded, gates, gate_up)
            build.gate(gates, gated, activation)
        build.head(gated, down)
        ops, program = build.num_ops, build.build()
        logits = program.run(
            plain_rows(rows), num_ops=ops, block_tokens=16, storage=[], rotary=[], vocab_size=48
        )
        assert logits is not None
        return logits

    activation: Activation = "silu" if is_one else "gelu_tanh"
    wanted = run(x, activation, together=False)
    for count, threads in ((1, 2), (2, 1), (5, 3), (8, 2), (33, 2), (100, 3), (530, 2)):
        torch.set_num_threads(threads)
        assert torch.equal(run(x[:count], activation, together=True), wanted[:count]), count


def test_matrices_that_do_not_pair_are_not_gated_together() -> None:
    build = ProgramBuilder()
    one_form, other = Form(4, 32), Form(8, 32, centre=128.0)
    for gate_up in (
        [made(one_form, 64, 128, seed=1)[0], made(other, 64, 128, seed=2)[0]],
        [made(one_form, 48, 128, seed=1)[0], made(one_form, 48, 128, seed=2)[0]],
        [made(one_form, 96, 128, seed=1)[0]],
        [made(one_form, 32, 128, seed=seed)[0] for seed in (1, 2, 3)],
    ):
        assert not build.gated(0, 1, gate_up, "silu", for_group=32)
    assert build.num_ops == 0


@dataclass
class Slot:
    """One slot: which rows it feeds, and its blocks."""

    first: int
    count: int
    table: list[int]
    first_block: int = 0


class Attention:
    """Rotary, write and attention over one layer's storage, as a program."""

    def __init__(
        self,
        shape: AttentionShape,
        block: int,
        *,
        blocks: int = 200,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        norms: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.shape, self.block = shape, block
        width = shape.k_dim + shape.v_dim
        self.storage = torch.zeros(blocks, shape.kv_heads, block, width, dtype=torch.bfloat16)
        angles = torch.arange(4096).unsqueeze(1) * 0.7 ** torch.arange(shape.rotary_dims // 2)
        cos, sin = angles.cos(), angles.sin()
        self.rotary = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1)
        total = shape.heads * shape.k_dim + shape.kv_heads * width
        build = ProgramBuilder()
        heads, queries = build.floats(total), build.inputs(shape.heads * shape.k_dim)
        out = build.inputs(shape.heads * shape.v_dim)
        self._out = shape.heads * shape.v_dim
        build.embed(one(total), heads, 1.0)
        q_norm, k_norm = norms or (None, None)
        build.rope(heads, queries, shape, q_norm=q_norm, k_norm=k_norm, eps=1e-6, scale=0.2)
        build.attend(queries, out, shape, softcap=softcap, sinks=sinks)
        build.head(out, one(self._out))
        self._ops, self._program = build.num_ops, build.build()

    def run(self, rows: Tensor, slots: Sequence[Slot]) -> Tensor:
        starts = [0]
        for slot in slots:
            starts.append(starts[-1] + slot.count)
        logits = self._program.run(
            StepRows(
                token_ids=torch.zeros(starts[-1], dtype=torch.int64),
                q_start=starts,
                kv_len=[slot.first + slot.count for slot in slots],
                block_table=[[slot.table for slot in slots]],
                first_block=[[slot.first_block for slot in slots]],
                logits_rows=torch.arange(starts[-1]),
                embeds=rows,
            ),
            num_ops=self._ops,
            block_tokens=self.block,
            storage=[self.storage.data_ptr()],
            rotary=[self.rotary],
            vocab_size=self._out,
        )
        assert logits is not None
        return logits

    def memory_of(self, table: Sequence[int]) -> Tensor:
        """[tokens, kv heads, k + v] of a slot."""
        return self.storage[table].permute(0, 2, 1, 3).flatten(0, 1)


def shape_of(
    heads: int,
    kv: int,
    dim: int,
    *,
    window: int | None = None,
    v_dim: int = 0,
    rotary: int | None = None,
) -> AttentionShape:
    return AttentionShape(
        heads=heads,
        kv_heads=kv,
        k_dim=dim,
        v_dim=v_dim or dim,
        window=window,
        group=0,
        storage=0,
        rotary=0,
        rotary_dims=dim if rotary is None else rotary,
    )


@pytest.mark.parametrize(
    ("shape", "block", "softcap", "with_sinks"),
    [
        (shape_of(9, 3, 64), 32, None, False),
        (shape_of(4, 4, 32), 16, None, True),
        (shape_of(8, 1, 16, window=100), 16, 15.0, False),
        (shape_of(4, 2, 256, window=300, rotary=64), 32, None, False),
        (shape_of(6, 2, 48, v_dim=80, rotary=0), 64, 30.0, True),
    ],
)
def test_attention_is_that_of_the_reference(
    shape: AttentionShape, block: int, softcap: float | None, with_sinks: bool
) -> None:
    sinks = random(shape.heads, seed=8) if with_sinks else None
    norms = (random(shape.k_dim, seed=6), random(shape.k_dim, seed=7)) if block == 32 else None
    layer = Attention(shape, block, softcap=softcap, sinks=sinks, norms=norms)
    width = shape.k_dim + shape.v_dim
    rows = random(700, shape.heads * shape.k_dim + shape.kv_heads * width, seed=9)
    table = torch.randperm(200, generator=torch.Generator().manual_seed(1))[
        : -(-700 // block)
    ].tolist()
    got = layer.run(rows, [Slot(0, 700, table)])

    q, k, v = rows.split(
        [shape.heads * shape.k_dim, shape.kv_heads * shape.k_dim, shape.kv_heads * shape.v_dim],
        dim=1,
    )
    q, k = (part.view(700, -1, shape.k_dim) for part in (q, k))
    if norms:
        q, k = (
            rms_norm_reference(part, norm, 1e-6).float()
            for part, norm in zip((q, k), norms, strict=True)
        )
    if shape.rotary_dims:
        cos, sin = layer.rotary[:700, :1], layer.rotary[:700, 1:]
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    memory = layer.memory_of(table)[:700].double()
    keys, values = memory.split([shape.k_dim, shape.v_dim], dim=-1)
    torch.testing.assert_close(keys, k.double(), rtol=1 / 128, atol=1e-2)
    assert torch.equal(values.bfloat16(), v.view(700, -1, shape.v_dim).bfloat16())
    q = (q * 0.2).bfloat16()
    if softcap is None and sinks is None:
        wanted = attention_reference(q, keys, values, 0, shape.window)
    else:
        wanted = _reference(q, keys, values, shape.window, softcap, sinks)
    assert (got.double() - wanted.flatten(1)).norm() / wanted.norm() < 8e-3


def _reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Softmax attention with capped scores and sinks in float64 (see `attention_reference`)."""
    count, heads, _ = q.shape
    keys, values = (
        part.repeat_interleave(heads // keys.shape[1], dim=1) for part in (keys, values)
    )
    scores = torch.einsum("thd,lhd->htl", q.double(), keys)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(count)
    hidden = at > at.unsqueeze(1)
    if window is not None:
        hidden |= at <= at.unsqueeze(1) - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, count, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :count]
    return torch.einsum("htl,lhd->thd", weights, values)


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        (shape_of(9, 3, 64), 32),
        (shape_of(2, 2, 32), 16),
        (shape_of(4, 1, 64, window=70), 32),
        (shape_of(12, 2, 32, window=256), 16),
    ],
)
def test_a_row_of_attention_has_the_bits_it_has_alone(shape: AttentionShape, block: int) -> None:
    """Two sequences: once as whole prompts, then in odd chunks, as verify rows, alone and
    together, with blocks that left the window gone, with other numbers of threads."""
    width = shape.k_dim + shape.v_dim
    rows = random(2, 600, shape.heads * shape.k_dim + shape.kv_heads * width, seed=2)
    tables = [list(range(60)), list(range(60, 120))]
    layer = Attention(shape, block)
    whole = [layer.run(rows[i], [Slot(0, 600, tables[i])]) for i in range(2)]
    filled = layer.storage.clone()

    layer.storage.zero_()
    torch.set_num_threads(3)
    first = 0
    for count in (17, 1, 130, 16, 255, 90, 91):
        part = layer.run(rows[0, first : first + count], [Slot(first, count, tables[0])])
        assert torch.equal(part, whole[0][first : first + count]), (first, count)
        first += count
    assert torch.equal(layer.storage[:60], filled[:60])

    layer.storage.copy_(filled)
    for threads, positions, counts in (
        (1, (300, 511), (1, 1)),
        (2, (594, 254), (6, 5)),
        (3, (10, 580), (16, 2)),
    ):
        torch.set_num_threads(threads)
        slots = []
        for i in range(2):
            oldest = 0 if shape.window is None else max(0, positions[i] - shape.window + 1)
            gone = oldest // block
            slots.append(Slot(positions[i], counts[i], tables[i][gone:], gone))
        fed = [rows[i, positions[i] : positions[i] + counts[i]] for i in range(2)]
        wanted = [whole[i][positions[i] : positions[i] + counts[i]] for i in range(2)]
        together = layer.run(torch.cat(fed), slots)
        assert torch.equal(together, torch.cat(wanted))
        for i in range(2):
            assert torch.equal(layer.run(fed[i], [slots[i]]), wanted[i])

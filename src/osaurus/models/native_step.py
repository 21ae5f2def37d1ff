"""A decoder's whole forward as one native call (kernels/native), for families of the plain shape:
norm, attention, norm, gated MLP, with or without norms after them.

A family describes its layers; `DecoderStep` writes the program and runs batches that carry no
plans. Letters: T rows, L logits rows, C hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from osaurus.kernels.cpu import has_amx
from osaurus.kernels.native.matrix import LANES, NativeMatrix
from osaurus.kernels.native.program import (
    Activation,
    AttentionShape,
    Program,
    ProgramBuilder,
    StepRows,
)
from osaurus.kernels.rope import RotaryTable
from osaurus.models.base import ForwardBatch, LayerMemory
from osaurus.quant.linear import Embedding, Linear, NativeEmbedding, native_matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayer:
    """One block. Norm weights are [C] as they multiply; `after_attention` and `after_mlp` norm
    what is added to the residual stream, `q_norm` and `k_norm` [D] the heads."""

    heads: int
    kv_heads: int
    dim: int
    window: int | None
    rotary: int  # which of the model's tables
    scale: float
    eps: float
    before_attention: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    after_attention: Tensor | None = None
    before_mlp: Tensor
    gate_up: Linear
    activation: Activation
    down: Linear
    after_mlp: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    layer: StepLayer
    qkv: list[NativeMatrix]
    out: list[NativeMatrix]
    gate_up: list[NativeMatrix]
    down: list[NativeMatrix]


@dataclass(frozen=True, slots=True)
class _Written:
    """A program, and how many of its operations leave a batch without logits complete."""

    program: Program
    num_ops: int
    num_ops_without_logits: int


class DecoderStep:
    """Runs the forwards of one model. Made by `decoder_step`."""

    def __init__(
        self,
        layers: Sequence[_Layer],
        embed: NativeMatrix,
        embed_scale: float,
        norm: Tensor,
        eps: float,
        head: NativeMatrix,
        rotary: Sequence[RotaryTable],
    ) -> None:
        self._layers = tuple(layers)
        self._embed, self._embed_scale = embed, embed_scale
        self._norm, self._eps, self._head = norm, eps, head
        self._rotary = tuple(rotary)
        self._programs: dict[tuple[tuple[int, ...], tuple[int, ...]], _Written] = {}

    def can_read(self, memory: Sequence[LayerMemory], *, prefill: bool) -> bool:
        """Whether batches over that memory need no plans."""
        if prefill and has_amx():
            return False  # torch's products of many rows are several times faster there
        return all(
            layer.coded is None
            and layer.storage.dtype == torch.bfloat16
            and layer.storage.is_contiguous()
            and layer.storage.shape[2] % LANES == 0
            for layer in memory
        )

    def run(
        self, batch: ForwardBatch, memory: Sequence[LayerMemory], taps: Sequence[int]
    ) -> tuple[Tensor | None, dict[int, Tensor]]:
        """Logits [L, V] float32 (None when no row asked) and the outputs [T, C] float32 of the
        layers `taps`, ascending. Writes the rows' keys and values into their blocks."""
        groups = tuple(layer.group for layer in memory)
        wanted = tuple(taps)
        written = self._programs.get((groups, wanted))
        if written is None:
            written = self._programs[groups, wanted] = self._write(groups, wanted)
        has_logits = batch.logits_rows.numel() > 0
        is_whole = has_logits or bool(wanted)
        tapped = {tap: torch.empty(batch.num_rows, self._embed.k) for tap in wanted}
        logits = written.program.run(
            StepRows(
                token_ids=batch.token_ids,
                q_start=batch.q_start,
                kv_len=batch.kv_len,
                block_table=batch.block_table,
                first_block=batch.first_block,
                logits_rows=batch.logits_rows,
                embeds=batch.embeds,
            ),
            num_ops=written.num_ops if is_whole else written.num_ops_without_logits,
            block_tokens=memory[0].storage.shape[2],
            storage=[layer.storage.data_ptr() for layer in memory],
            rotary=[table.up_to(batch.last_position) for table in self._rotary],
            taps=list(tapped.values()),
            vocab_size=self._head.n if has_logits else 0,
        )
        return logits, tapped

    def _write(self, groups: Sequence[int], taps: Sequence[int]) -> _Written:
        build = ProgramBuilder()
        size = self._embed.k
        hidden, normed, answer = build.floats(size), build.inputs(size), build.floats(size)
        first = self._layers[0].layer
        inner = sum(matrix.n for matrix in self._layers[0].gate_up) // 2
        heads = build.floats((first.heads + 2 * first.kv_heads) * first.dim)
        queries, attended = (build.inputs(first.heads * first.dim) for _ in range(2))
        gates, gated = build.floats(2 * inner), build.inputs(inner)
        without_logits = 0
        build.embed(self._embed, hidden, self._embed_scale)
        for index, parts in enumerate(self._layers):
            layer = parts.layer
            shape = _shape(layer, groups[index], index, self._rotary)
            build.norm(hidden, normed, layer.before_attention, layer.eps)
            build.linear(normed, heads, parts.qkv)
            build.rope(
                heads,
                queries,
                shape,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=layer.eps,
                scale=layer.scale,
            )
            without_logits = build.num_ops
            build.attend(queries, attended, shape)
            self._add(build, attended, hidden, answer, parts.out, layer.after_attention, layer.eps)
            build.norm(hidden, normed, layer.before_mlp, layer.eps)
            group = max(matrix.group for matrix in parts.down)
            if not build.gated(normed, gated, parts.gate_up, layer.activation, for_group=group):
                build.linear(normed, gates, parts.gate_up)
                build.gate(gates, gated, layer.activation)
            self._add(build, gated, hidden, answer, parts.down, layer.after_mlp, layer.eps)
            if index in taps:
                build.copy(hidden, taps.index(index))
        build.norm(hidden, normed, self._norm, self._eps, logits_rows=True)
        build.head(normed, self._head)
        return _Written(build.build(), build.num_ops, without_logits)

    @staticmethod
    def _add(
        build: ProgramBuilder,
        source: int,
        hidden: int,
        answer: int,
        matrices: Sequence[NativeMatrix],
        norm: Tensor | None,
        eps: float,
    ) -> None:
        """hidden += product, or the norm of it."""
        if norm is None:
            build.linear(source, hidden, matrices, add=True)
        else:
            build.linear(source, answer, matrices)
            build.norm_add(answer, hidden, norm, eps)


def _shape(
    layer: StepLayer, group: int, index: int, rotary: Sequence[RotaryTable]
) -> AttentionShape:
    return AttentionShape(
        heads=layer.heads,
        kv_heads=layer.kv_heads,
        k_dim=layer.dim,
        v_dim=layer.dim,
        window=layer.window,
        group=group,
        storage=index,
        rotary=layer.rotary,
        rotary_dims=rotary[layer.rotary].dims,
    )


def decoder_step(
    layers: Sequence[StepLayer],
    *,
    embed: Embedding,
    embed_scale: float = 1.0,
    norm: Tensor,
    eps: float,
    head: Embedding,
    rotary: Sequence[RotaryTable],
) -> DecoderStep | None:
    """None where native kernels are not in use or do not take one of the layers."""
    if not (isinstance(embed, NativeEmbedding) and isinstance(head, NativeEmbedding)):
        return None
    made: list[_Layer] = []
    for index, layer in enumerate(layers):
        found = [
            native_matrices(part) for part in (layer.qkv, layer.out, layer.gate_up, layer.down)
        ]
        if not _shape(layer, 0, index, rotary).is_supported:
            return None
        qkv, out, gate_up, down = found
        if qkv is None or out is None or gate_up is None or down is None:
            return None
        made.append(_Layer(layer=layer, qkv=qkv, out=out, gate_up=gate_up, down=down))
    widths = {
        (m.layer.heads, m.layer.kv_heads, m.layer.dim, sum(part.n for part in m.gate_up))
        for m in made
    }
    if len(widths) != 1:  # the buffers are shared by all layers
        return None
    return DecoderStep(made, embed.matrix, embed_scale, norm, eps, head.matrix, rotary)

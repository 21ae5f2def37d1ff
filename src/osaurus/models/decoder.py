"""The frame of a decoder: embedding, blocks, last norm, head.

A family's file brings the blocks and says how the frame is set; this one runs the rows through
them. `models/llama.py` stands alone, so that one file shows a whole model.

Letters: T rows, L logits rows, C hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from osaurus.kernels.rope import RotaryTable, inverse_frequencies
from osaurus.models.base import ForwardBatch, ForwardOutput, LayerMemory
from osaurus.models.fields import DecoderConfig
from osaurus.models.layers import RmsNorm, load_head
from osaurus.models.loading import WeightLoader
from osaurus.models.native_step import DecoderStep
from osaurus.quant.linear import Embedding
from osaurus.topology.base import LayerTopology

#: cos and signed sin of the step's rows, one pair for each rotary table of the model.
Angles = Sequence[tuple[Tensor, Tensor]]


class Block(Protocol):
    """One layer. The residual stream [T, C] is float32, products take the compute dtype."""

    @property
    def topology(self) -> LayerTopology:
        """What the layer remembers."""
        ...

    @property
    def nbytes(self) -> int: ...

    def __call__(
        self, hidden: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> Tensor:
        """The layer's output in the form of its input."""
        ...

    def remember(
        self, hidden: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> object:
        """Only what the layer keeps of these rows: its output is not wanted."""
        ...


class DecoderModel:
    """Implements `models.base.Model`.

    `norm` maps [L, C] float32 to the same; `embed_scale` multiplies the embedding;
    `finish` maps logits [L, V] to those the model is defined by; `step`, where there is one,
    runs all of it natively.
    """

    reads_coded_kv = True

    def __init__(
        self,
        loader: WeightLoader,
        *,
        vocab_size: int,
        max_context_tokens: int,
        embed: Embedding,
        blocks: Sequence[Block],
        norm: Callable[[Tensor, torch.dtype], Tensor],
        head: Embedding,
        rotary: Sequence[RotaryTable],
        embed_scale: float = 1.0,
        finish: Callable[[Tensor], Tensor] | None = None,
        step: DecoderStep | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_context_tokens = max_context_tokens
        self.kv_dtype = loader.dtype
        self.device = loader.device
        self._embed, self._head = embed, head
        self._blocks = list(blocks)
        self._norm = norm
        self._rotary = tuple(rotary)
        self._embed_scale = embed_scale
        self._finish = finish
        self._step = step

    @property
    def layers_topology(self) -> tuple[LayerTopology, ...]:
        return tuple(block.topology for block in self._blocks)

    @property
    def nbytes(self) -> int:
        own = self._embed.nbytes + sum(block.nbytes for block in self._blocks)
        return own + (self._head.nbytes if self._head is not self._embed else 0)

    def reads_block_tables(self, kv: Sequence[LayerMemory], *, prefill: bool) -> bool:
        return self._step is not None and self._step.can_read(kv, prefill=prefill)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: Sequence[LayerMemory]) -> ForwardOutput:
        if self._step is not None and not batch.groups:
            return self._forward_natively(self._step, batch, kv)
        if batch.embeds is not None:
            hidden = batch.embeds  # scaled already, by whoever made them
        else:
            hidden = self._embed(batch.token_ids) * self._embed_scale
        angles = [table.at(batch.positions, batch.last_position) for table in self._rotary]
        taps: dict[int, Tensor] = {}
        last = len(self._blocks) - 1
        is_output_read = batch.logits_rows.numel() > 0 or max(batch.taps, default=-1) >= last
        for index, block in enumerate(self._blocks):
            if index == last and not is_output_read:
                # Prefill is after what the layers keep: nobody reads the last output.
                block.remember(hidden, angles, batch, kv[index])
                break
            hidden = block(hidden, angles, batch, kv[index])
            if index in batch.taps:
                taps[index] = hidden
        if last + 1 in batch.taps:
            taps[last + 1] = self._norm(hidden, torch.float32)
        if batch.logits_rows.numel() == 0:
            return ForwardOutput(logits=None, taps=taps)
        rows = hidden.index_select(0, batch.logits_rows)
        logits = self._head.logits(self._norm(rows, torch.float32))
        return ForwardOutput(logits=self._finish(logits) if self._finish else logits, taps=taps)

    def _forward_natively(
        self, step: DecoderStep, batch: ForwardBatch, kv: Sequence[LayerMemory]
    ) -> ForwardOutput:
        last = len(self._blocks) - 1
        wants_normed = last + 1 in batch.taps
        wanted = {tap for tap in batch.taps if tap <= last} | ({last} if wants_normed else set())
        logits, taps = step.run(batch, kv, sorted(wanted))
        if wants_normed:
            taps[last + 1] = self._norm(taps[last], torch.float32)
        taps = {tap: taps[tap] for tap in batch.taps}
        if logits is not None and self._finish is not None:
            logits = self._finish(logits)
        return ForwardOutput(logits=logits, taps=taps)


def load_decoder(
    config: DecoderConfig,
    loader: WeightLoader,
    blocks: Sequence[Block],
    *,
    norm: Callable[[Tensor, torch.dtype], Tensor] | None = None,
    rotary: Sequence[RotaryTable] | None = None,
    finish: Callable[[Tensor], Tensor] | None = None,
    prefix: str = "model",
    head: str = "lm_head",
) -> DecoderModel:
    """The usual frame around a family's blocks: `model.embed_tokens`, `model.norm` (an RMS
    norm unless given), `lm_head`, one rotary table (unless given). `prefix` and `head` are the
    names of model and head where they are others."""
    shape, embed_name = (config.vocab_size, config.hidden_size), f"{prefix}.embed_tokens.weight"
    embed = loader.embedding(embed_name, *shape)
    if norm is None:
        norm = RmsNorm(loader, f"{prefix}.norm", config.hidden_size, config.rms_norm_eps)
    if rotary is None:
        rotary = [rotary_table(config, loader)]
    return DecoderModel(
        loader,
        vocab_size=config.vocab_size,
        max_context_tokens=config.max_position_embeddings,
        embed=embed,
        blocks=blocks,
        norm=norm,
        head=load_head(
            loader, embed, shape, config.tie_word_embeddings, embed_name, f"{head}.weight"
        ),
        rotary=rotary,
        finish=finish,
    )


def rotary_table(config: DecoderConfig, loader: WeightLoader) -> RotaryTable:
    frequencies, factor = inverse_frequencies(
        config.rotary_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings
    )
    return RotaryTable(frequencies, factor, loader.device)

"""Models that turn one text into one vector: an encoder, or a decoder whose last hidden states
are read, and the pooling of those.

Letters: T rows, C hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from osaurus.bundle.embedding import Pooling
from osaurus.errors import BundleError, UnsupportedBundle
from osaurus.kernels.openmp import release_team
from osaurus.kernels.paged_attention import Span, plan_prefill
from osaurus.models import bert
from osaurus.models.base import ForwardBatch, GroupBatch, LayerMemory, Model
from osaurus.models.loading import ComputeMode, ShapeLoader, WeightLoader
from osaurus.models.registry import FAMILIES, build
from osaurus.quant.schemes import Schemes
from osaurus.topology.base import group_layers
from osaurus.types.weights import QuantizeOnLoad

if TYPE_CHECKING:
    from osaurus.bundle.bundle import Bundle
    from osaurus.bundle.weights import StoredTensor, WeightSource

#: Tokens of a block in which a decoder's keys and values lie for the time of one text.
_BLOCK_TOKENS = 32


class TextEncoder(Protocol):
    """Holds weights, never requests; one thread calls it."""

    vocab_size: int
    hidden_size: int
    max_tokens: int  #: the longest text
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes of weights resident."""
        ...

    def encode(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """token_ids [T] int64 of several texts, one behind the other, and the rows of each;
        returns their last hidden states [T, C] float32. A text's are the same in any company."""
        ...


class DecoderEncoder:
    """A decoder of ours as an encoder: one causal forward a text, what its last norm gives.
    Every layer of one form writes its keys and values over those of the layer before, which
    nobody reads again."""

    def __init__(self, model: Model, hidden_size: int) -> None:
        layers = model.layers_topology
        for index, layer in enumerate(layers):
            if layer.arrays or layer.paged is None:
                raise UnsupportedBundle(
                    f"layer {index} is {layer.kind}: embeddings are read off layers of plain "
                    "attention only"
                )
        self._model = model
        self._groups = group_layers(layers)
        self._last = len(layers)
        self._group_of = {
            layer: index for index, group in enumerate(self._groups) for layer in group.layers
        }
        self.vocab_size = model.vocab_size
        self.hidden_size = hidden_size
        self.max_tokens = model.max_context_tokens
        self.device = model.device

    @property
    def nbytes(self) -> int:
        return self._model.nbytes

    def encode(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        return torch.cat([self._encode(ids) for ids in token_ids.split(list(lengths))])

    @torch.inference_mode()
    def _encode(self, token_ids: Tensor) -> Tensor:
        rows, device = token_ids.shape[0], self.device
        blocks = tuple(range(-(-rows // _BLOCK_TOKENS)))
        places = torch.arange(rows, device=device)
        span = Span(start=0, length=rows, first_position=0, blocks=blocks, first_block=0)
        parts, memories = [], []
        for index, group in enumerate(self._groups):
            kind = group.topology
            heads = torch.arange(kind.num_kv_heads, device=device)
            first = places // _BLOCK_TOKENS * kind.num_kv_heads
            written = (first.unsqueeze(1) + heads) * _BLOCK_TOKENS
            written = written + (places % _BLOCK_TOKENS).unsqueeze(1)
            plan = plan_prefill(span, _BLOCK_TOKENS, kind.window, device)
            parts.append(GroupBatch(write_rows=written.view(-1), prefill=plan))
            shape = (len(blocks), kind.num_kv_heads, _BLOCK_TOKENS, kind.k_dim + kind.v_dim)
            storage = torch.zeros(shape, dtype=self._model.kv_dtype, device=device)
            memories.append(LayerMemory(group=index, storage=storage))
        batch = ForwardBatch(
            token_ids=token_ids,
            positions=places,
            last_position=rows - 1,
            num_small=0,
            q_start=(0, rows),
            kv_len=(rows,),
            slot_mapping=(places,) * len(parts),
            block_table=((blocks,),) * len(parts),
            groups=tuple(parts),
            logits_rows=places[:0],
            taps=(self._last,),
        )
        memory = [memories[self._group_of[layer]] for layer in range(self._last)]
        return self._model.forward(batch, memory).taps[self._last].float()


def vector_of(hidden: Tensor, pooling: Pooling, *, is_normalized: bool) -> Tensor:
    """hidden [T, C] float32; returns [C] float32."""
    match pooling:
        case "cls":
            vector = hidden[0]
        case "last":
            vector = hidden[-1]
        case "max":
            vector = hidden.amax(dim=0)
        case "mean":
            vector = hidden.mean(dim=0)
    return F.normalize(vector, dim=0) if is_normalized else vector


def load_encoder(
    bundle: Bundle,
    *,
    compute_mode: ComputeMode,
    device: str = "cpu",
    on_load: QuantizeOnLoad | None = None,
) -> TextEncoder:
    """An encoder in float32 whatever the mode; a decoder in that mode, by its family.

    Raises `UnsupportedBundle` and `IncompleteBundle` as `load_model` does.
    """
    try:
        with closing(bundle.open_weights()) as source:
            if bert.is_encoder(bundle.config.get("model_type")):
                return _build_encoder(bundle.config, source, device)
            return _build_decoder(bundle.config, source, compute_mode, device, on_load)
    except BundleError as error:
        if str(bundle.path) in error.message or bundle.model_id in error.message:
            raise
        raise type(error)(f"{bundle.model_id}: {error.message}") from None
    finally:
        release_team()  # the engine computes on a thread of its own


def _build_encoder(config: Mapping[str, Any], source: WeightSource, device: str) -> TextEncoder:
    check = ShapeLoader(source, "float32", Schemes())
    bert.load(config, check)
    check.finish()
    loader = WeightLoader(source, "float32", device)
    model = bert.load(config, loader)
    loader.finish()
    return model


def _build_decoder(
    config: Mapping[str, Any],
    source: WeightSource,
    mode: ComputeMode,
    device: str,
    on_load: QuantizeOnLoad | None,
) -> TextEncoder:
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise UnsupportedBundle(f"embeddings of model_type {kind!r} are not supported")
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        raise UnsupportedBundle("embeddings of a decoder that also looks ahead are not supported")
    names = source.names()
    if not any(name.startswith("model.") for name in names):
        source = _Prefixed(source)
    if "lm_head.weight" not in names:
        config = {**config, "tie_word_embeddings": True}  # saved without the head: none is needed
    return DecoderEncoder(
        build(config, source, mode, device, on_load=on_load), config["hidden_size"]
    )


class _Prefixed:
    """A checkpoint that was saved without its head, as one with it: every name gains the
    `model.` that it has there. Implements `bundle.weights.WeightSource`."""

    def __init__(self, inner: WeightSource) -> None:
        self._inner = inner

    @property
    def total_bytes(self) -> int:
        return self._inner.total_bytes

    def names(self) -> list[str]:
        return [f"model.{name}" for name in self._inner.names()]

    def get(self, name: str) -> StoredTensor:
        return self._inner.get(name.removeprefix("model."))

    def release(self, name: str) -> None:
        self._inner.release(name.removeprefix("model."))

    def close(self) -> None:
        self._inner.close()

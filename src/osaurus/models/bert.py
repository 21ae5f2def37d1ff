"""Encoders that read a text whole: BERT, RoBERTa, XLM-RoBERTa, DistilBERT, MPNet.

Post-norm blocks of bidirectional attention with learnt positions and a plain MLP (Devlin et al.
2018, arXiv:1810.04805). RoBERTa counts positions from behind its padding id (arXiv:1907.11692),
MPNet adds a learnt bias by distance to every score (arXiv:2004.09297). Everything is float32:
what these models give is compared by small differences, and they are small.

Letters: T rows of all texts of a batch, H heads, D head dim, C hidden, I inner width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from osaurus.errors import UnsupportedBundle
from osaurus.kernels.elementwise import gelu, gelu_tanh, silu
from osaurus.models.fields import refuse, require_counts
from osaurus.models.loading import WeightLoader

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": F.relu,
    "silu": silu,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """A family's spelling: of fields in its config, of tensors within one layer."""

    fields: Mapping[str, str]
    layers: str
    q: str
    k: str
    v: str
    out: str
    attention_norm: str
    up: str
    down: str
    norm: str


_BERT = _Names(
    fields={
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_hidden_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "hidden_act": "hidden_act",
    },
    layers="encoder.layer",
    q="attention.self.query",
    k="attention.self.key",
    v="attention.self.value",
    out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    norm="output.LayerNorm",
)
_MPNET = _Names(
    fields=_BERT.fields,
    layers="encoder.layer",
    q="attention.attn.q",
    k="attention.attn.k",
    v="attention.attn.v",
    out="attention.attn.o",
    attention_norm="attention.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    norm="output.LayerNorm",
)
_DISTILBERT = _Names(
    fields={
        "hidden_size": "dim",
        "intermediate_size": "hidden_dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "hidden_act": "activation",
    },
    layers="transformer.layer",
    q="attention.q_lin",
    k="attention.k_lin",
    v="attention.v_lin",
    out="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    norm="output_layer_norm",
)

#: By `model_type`. The same name, where it stands before them, begins every tensor of a
#: checkpoint that was saved with a head.
_FAMILIES = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "camembert": _BERT,
    "distilbert": _DISTILBERT,
    "mpnet": _MPNET,
}
_PREFIXES = ("bert.", "roberta.", "distilbert.", "mpnet.")
#: Tensors of what stands on top of an encoder: pooling with a dense layer, word prediction.
_HEADS = (
    "pooler.",
    "cls.",
    "lm_head.",
    "vocab_transform.",
    "vocab_layer_norm.",
    "vocab_projector.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Published spellings of BERT's config, whatever the family calls them."""

    names: _Names
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    layer_norm_eps: float
    max_position_embeddings: int
    first_position: int  #: the row of the position table that a text's first token takes
    type_vocab_size: int
    relative_buckets: int
    activation: Callable[[Tensor], Tensor]

    @property
    def max_tokens(self) -> int:
        return self.max_position_embeddings - self.first_position

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> EncoderConfig:
        """Raises `UnsupportedBundle` naming a field that is missing or cannot be served."""
        kind = str(config.get("model_type"))
        names = _FAMILIES.get(kind)
        if names is None:
            raise UnsupportedBundle(f"config.json: model_type {kind!r} is no encoder served here")
        spelled = names.fields
        counts = [name for name in spelled.values() if name != spelled["hidden_act"]]
        require_counts(config, [*counts, "vocab_size", "max_position_embeddings"])
        refuse(config, "position_embedding_type", ["absolute"])
        refuse(config, "is_decoder", [False])
        act = config.get(spelled["hidden_act"], "gelu")
        if act not in _ACTIVATIONS:
            raise UnsupportedBundle(
                f"config.json: {spelled['hidden_act']} {act!r} is not supported"
            )
        hidden, heads = config[spelled["hidden_size"]], config[spelled["num_attention_heads"]]
        if hidden % heads:
            raise UnsupportedBundle(
                f"config.json: {spelled['hidden_size']} {hidden} is no multiple of "
                f"{spelled['num_attention_heads']} {heads}"
            )
        counts_from_padding = kind in ("roberta", "xlm-roberta", "camembert", "mpnet")
        padding = int(config.get("pad_token_id", 1) or 0)
        has_types = names is _BERT
        return cls(
            names=names,
            vocab_size=config["vocab_size"],
            hidden_size=hidden,
            intermediate_size=config[spelled["intermediate_size"]],
            num_hidden_layers=config[spelled["num_hidden_layers"]],
            num_attention_heads=heads,
            layer_norm_eps=float(config.get("layer_norm_eps", 1e-12)),
            max_position_embeddings=config["max_position_embeddings"],
            first_position=padding + 1 if counts_from_padding else 0,
            type_vocab_size=int(config.get("type_vocab_size", 2)) if has_types else 0,
            relative_buckets=int(config.get("relative_attention_num_buckets", 32))
            if names is _MPNET
            else 0,
            activation=_ACTIVATIONS[act],
        )


def is_encoder(model_type: object) -> bool:
    return model_type in _FAMILIES


class BertModel:
    """Implements `models.embedding.TextEncoder`."""

    def __init__(self, config: EncoderConfig, loader: WeightLoader) -> None:
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.max_tokens = config.max_tokens
        self.device = loader.device
        self._first_position = config.first_position
        prefix = next((p for p in _PREFIXES if loader.has(f"{p}{_WORDS}")), "")
        self._words = loader.embedding(f"{prefix}{_WORDS}", config.vocab_size, config.hidden_size)
        positions = f"{prefix}embeddings.position_embeddings.weight"
        shape = (config.max_position_embeddings, config.hidden_size)
        self._positions = loader.tensor(positions, shape)
        if config.type_vocab_size:
            types = f"{prefix}embeddings.token_type_embeddings.weight"
            # Every token is of the first type: there is one text.
            first = loader.tensor(types, (config.type_vocab_size, config.hidden_size))[0]
            self._positions = self._positions + first
        self._norm = _Norm(loader, f"{prefix}embeddings.LayerNorm", config)
        self._blocks = [
            _Block(config, loader, f"{prefix}{config.names.layers}.{i}")
            for i in range(config.num_hidden_layers)
        ]
        self._distances: Tensor | None = None
        if config.relative_buckets:
            self._distances = loader.tensor(
                f"{prefix}encoder.relative_attention_bias.weight",
                (config.relative_buckets, config.num_attention_heads),
            )
        loader.skip(f"{prefix}embeddings.position_ids")
        loader.skip_under(*_HEADS, *(f"{p}pooler." for p in _PREFIXES))

    @property
    def nbytes(self) -> int:
        blocks = sum(block.nbytes for block in self._blocks)
        return self._words.nbytes + self._positions.nbytes + blocks

    @torch.inference_mode()
    def encode(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        texts = _Texts(lengths, self._distances)
        first = self._first_position
        places = torch.cat([torch.arange(first, first + length) for length in lengths])
        hidden = self._words(token_ids) + self._positions[places.to(self.device)]
        hidden = self._norm(hidden)
        for block in self._blocks:
            hidden = block(hidden, texts)
        return hidden


class _Texts:
    """Where the texts of a batch lie among its rows, those of one length together: one
    attention serves them, and none of them is padded."""

    def __init__(self, lengths: Sequence[int], distances: Tensor | None) -> None:
        starts = [0, *accumulate(lengths)]
        self.groups: list[tuple[Tensor, Tensor | None]] = []
        for length in dict.fromkeys(lengths):
            firsts = [s for s, n in zip(starts, lengths, strict=False) if n == length]
            rows = torch.tensor(firsts).unsqueeze(1) + torch.arange(length)
            bias = None if distances is None else distance_bias(distances, length).unsqueeze(0)
            self.groups.append((rows, bias))

    def attend(self, qkv: Tensor) -> Tensor:
        """qkv: [T, 3, H, D]; returns [T, H * D]."""
        out = qkv.new_empty(qkv.shape[0], qkv.shape[2] * qkv.shape[3])
        for rows, bias in self.groups:
            rows = rows.to(qkv.device)
            q, k, v = qkv[rows].permute(2, 0, 3, 1, 4)  # each [texts, H, length, D]
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            out[rows] = mixed.transpose(1, 2).flatten(2)
        return out


_WORDS = "embeddings.word_embeddings.weight"


class _Norm:
    """LayerNorm with weight and bias (arXiv:1607.06450)."""

    def __init__(self, loader: WeightLoader, name: str, config: EncoderConfig) -> None:
        self._weight = loader.vector(f"{name}.weight", config.hidden_size)
        self._bias = loader.vector(f"{name}.bias", config.hidden_size)
        self._eps = config.layer_norm_eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)


class _Block:
    def __init__(self, config: EncoderConfig, loader: WeightLoader, prefix: str) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        names = config.names
        self._heads = config.num_attention_heads
        qkv = [f"{prefix}.{name}" for name in (names.q, names.k, names.v)]
        self._qkv = loader.linear(qkv, [hidden] * 3, hidden)
        self._out = loader.linear([f"{prefix}.{names.out}"], [hidden], hidden)
        self._up = loader.linear([f"{prefix}.{names.up}"], [inner], hidden)
        self._down = loader.linear([f"{prefix}.{names.down}"], [hidden], inner)
        self._attention_norm = _Norm(loader, f"{prefix}.{names.attention_norm}", config)
        self._norm = _Norm(loader, f"{prefix}.{names.norm}", config)
        self._activation = config.activation

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self._qkv, self._out, self._up, self._down))

    def __call__(self, hidden: Tensor, texts: _Texts) -> Tensor:
        """hidden: [T, C] float32; returns the same."""
        rows = hidden.shape[0]
        mixed = texts.attend(self._qkv(hidden, 0).view(rows, 3, self._heads, -1))
        hidden = self._attention_norm(hidden + self._out(mixed, 0))
        return self._norm(hidden + self._down(self._activation(self._up(hidden, 0)), 0))


def distance_bias(table: Tensor, length: int, *, max_distance: int = 128) -> Tensor:
    """[H, n, n]: what each score gains by how far its key lies (Raffel et al. 2019,
    arXiv:1910.10683, section 2.1). Half of the buckets is for keys behind the query; of a half's,
    the first half is for one distance each, the rest grow as logarithms.

    table: [buckets, H] float32.
    """
    half = table.shape[0] // 2
    exact = half // 2
    places = torch.arange(length, device=table.device)
    ahead = places.unsqueeze(0) - places.unsqueeze(1)
    distance = ahead.abs()
    steps = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (steps * (half - exact)).long()).clamp(max=half - 1)
    bucket = torch.where(distance < exact, distance, far) + half * (ahead > 0)
    return table[bucket].permute(2, 0, 1)


def load(config: Mapping[str, Any], loader: WeightLoader) -> BertModel:
    return BertModel(EncoderConfig.from_dict(config), loader)

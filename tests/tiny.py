"""Small random-weight models for tests: built by transformers, loaded by us.

The same weights on both sides make transformers the oracle. Nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from osaurus.bundle.weights import SafetensorsSource
from osaurus.models.loading import ComputeMode
from osaurus.models.registry import build
from osaurus.types.engine import GenerationRequest
from osaurus.types.events import Chunk, Event, Info
from osaurus.types.sampling import SamplingParams

#: Small enough to run in milliseconds, odd enough to catch a transposed or swapped axis.
BASE = dict(
    vocab_size=320,
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
)


def save_tiny(folder: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """Write a random transformers model of a family into `folder`; return it in float32."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **{**BASE, **changes})
    auto: Any = transformers.AutoModelForCausalLM
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        auto = transformers.AutoModelForImageTextToText
    model = auto.from_config(config).float().eval()
    with torch.no_grad():
        # Default initialisation gives nearly uniform logits; spread them so that argmax
        # says something, and give biases and norms values of their own.
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif "embed" not in name:
                parameter.mul_(3.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.2 * torch.randn_like(buffer))
    model.save_pretrained(folder, safe_serialization=True)
    return model


def load_tiny(folder: Path, mode: ComputeMode = "float32", device: str = "cpu") -> Any:
    """The folder's model by our own family of its `model_type`."""
    config = json.loads((folder / "config.json").read_text())
    with closing(SafetensorsSource(folder)) as source:
        return build(config, source, mode, device)


class TokenText:
    """A stand-in tokenizer whose token i is the text `<i>`."""

    def token_bytes(self, token_id: int) -> bytes:
        return f"<{token_id}>".encode()


class Recorder:
    """An output pipeline that passes ids on as text and can halt at a token."""

    def __init__(self, halt_at: int | None = None, fail_at: int | None = None) -> None:
        self.halted = False
        self.stop_string: str | None = None
        self.unclosed_reasoning = False
        self.reasoning_tokens = 0
        self.tool_call_protocol_failure = False
        self.tokens: list[int] = []
        self._halt_at, self._fail_at = halt_at, fail_at

    def push(self, token_id: int, logprob: Any = None) -> list[Event]:
        self.tokens.append(token_id)
        if len(self.tokens) - 1 == self._fail_at:
            raise RuntimeError("parser fault")
        if len(self.tokens) - 1 == self._halt_at:
            self.halted, self.stop_string = True, "halt"
            return []
        return [Chunk(f"<{token_id}>", (logprob,) if logprob else ())]

    def finish(self) -> list[Event]:
        return []


def ask(
    request_id: str,
    prompt: Sequence[int],
    *,
    n: int = 1,
    stop: frozenset[int] = frozenset(),
    make_output: Any = Recorder,
    **params: Any,
) -> GenerationRequest:
    """A greedy request unless `params` say otherwise."""
    settings = {"temperature": 0.0, "max_tokens": 16, **params}
    return GenerationRequest(
        request_id=request_id,
        token_ids=prompt,
        params=SamplingParams(**settings),
        make_output=make_output,
        stop_token_ids=stop,
        n=n,
    )


def tokens_of(events: Sequence[Event]) -> list[int]:
    """The token ids a `Recorder`'s text stands for."""
    text = "".join(event.text for event in events if isinstance(event, Chunk))
    return [int(part) for part in text.strip("<>").split("><")] if text else []


def info_of(events: Sequence[Event]) -> Info:
    infos = [event for event in events if isinstance(event, Info)]
    assert len(infos) == 1, "exactly one Info"
    assert events[-1] is infos[0], "Info is last"
    return infos[0]

#!/usr/bin/env python3
"""How many follow-up answers change when keys and values of the answer before are taken over.

usage: generated_kv.py [MODEL] [--conversations 20] [--mode bfloat16|float32]

Each conversation: a stretch of public-domain text, an answer of 64 greedy tokens, then a second
turn of another stretch and 48 greedy tokens, once with what decoding made and once without.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from osaurus.bench.inprocess import StampedOutput
from osaurus.bundle.bundle import open_bundle
from osaurus.bundle.hub import find_model
from osaurus.engine.core import BatchEngine
from osaurus.models.registry import load_model
from osaurus.types.cache import CacheConfig
from osaurus.types.engine import EngineConfig, GenerationRequest
from osaurus.types.events import Info
from osaurus.types.sampling import SamplingParams

TEXT = Path(__file__).parent / "public_domain.txt"


class Kept(StampedOutput):
    """Keeps the token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []

    def push(self, token_id: int, logprob: object = None) -> list:
        self.tokens.append(token_id)
        return []


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="default")
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--mode", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    listing = find_model(args.model)
    bundle = open_bundle(listing.path, listing.model_id)
    tokenizer = bundle.load_tokenizer()
    engine = BatchEngine(
        load_model(bundle, compute_mode=args.mode),
        EngineConfig(cache=CacheConfig()),
        token_bytes=tokenizer.token_bytes,
    )
    ids = tokenizer.encode(TEXT.read_text(), parse_special=False)

    def answer(prompt: list[int], count: int) -> tuple[list[int], int]:
        output = Kept()
        (stream,) = engine.generate(
            GenerationRequest(
                request_id="r",
                token_ids=prompt,
                params=SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True),
                make_output=lambda: output,
            )
        )
        info = list(stream)[-1]
        if not isinstance(info, Info) or info.error:
            raise SystemExit(f"a request failed: {info}")
        return output.tokens, info.cached_prompt_tokens

    differ = 0
    for number in range(args.conversations):
        at = number * 83
        prompt = ids[at : at + 75]
        first, _ = answer(prompt, 64)
        second = prompt + first + ids[at + 75 : at + 90]
        warm, cached = answer(second, 48)
        if cached < len(prompt):
            raise SystemExit(f"nothing of the answer was taken over: {cached} tokens")
        engine.clear_cache()
        cold, cached = answer(second, 48)
        if cached:
            raise SystemExit("the second reading was not cold")
        differ += warm != cold
    engine.shutdown()
    sys.stdout.write(f"{args.mode}: {differ} of {args.conversations} follow-up answers differ\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What a grammar costs: time per token with and without masks, at one batch size.

usage: python benchmarks/structured_output.py [--model default] [--batch 8] [--tokens 128]
       [--rounds 7] [--json FILE]

Every request of a round runs at the same time and writes the same number of tokens, greedy.
Rounds of all kinds are interleaved, and the figures are medians over rounds: what else the
machine does falls on all kinds alike. Also printed: how long the vocabulary takes to build, once
for a loaded model, and a grammar to compile, once a request.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from osaurus.bundle.bundle import open_bundle
from osaurus.bundle.hub import find_model
from osaurus.engine.core import BatchEngine
from osaurus.grammar.matcher import GrammarConstraint, compile_grammar
from osaurus.grammar.schema import checked_schema
from osaurus.grammar.text import GrammarText, regex_literal
from osaurus.grammar.vocabulary import GrammarVocabulary
from osaurus.models.registry import load_model
from osaurus.parsing.output import OutputPipeline
from osaurus.types.engine import EngineConfig, GenerationRequest
from osaurus.types.events import Info
from osaurus.types.sampling import SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["author", "editor", "reader"]},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["street", "zip"],
        },
    },
    "required": ["name", "age", "role", "address"],
}
#: None of these can end before the requests do.
PEOPLE = {"type": "array", "items": PERSON, "minItems": 200}
OBJECT = {"type": "array", "items": {"type": "object"}, "minItems": 200}
MASKLESS = "free"


def grammars(vocabulary: GrammarVocabulary) -> dict[str, Callable[[], GrammarConstraint]]:
    def of_schema(schema: Any) -> Callable[[], GrammarConstraint]:
        def build() -> GrammarConstraint:
            text = GrammarText(vocabulary)
            start = text.json(checked_schema(schema))
            return compile_grammar(text.finished(start), vocabulary)

        return build

    def of_regex(pattern: str) -> Callable[[], GrammarConstraint]:
        def build() -> GrammarConstraint:
            text = GrammarText(vocabulary)
            start = text.terminal(regex_literal(pattern))
            return compile_grammar(text.finished(start), vocabulary)

        return build

    return {
        "schema": of_schema(PEOPLE),
        "any objects": of_schema(OBJECT),
        "expression": of_regex(r"([a-z]{1,12} )+"),
    }


class Bench:
    def __init__(self, model: str, batch: int, tokens: int) -> None:
        listing = find_model(model)
        bundle = open_bundle(listing.path, listing.model_id)
        self.tokenizer = bundle.load_tokenizer()
        self.batch, self.tokens = batch, tokens
        self.engine = BatchEngine(
            load_model(bundle, compute_mode="bfloat16"),
            EngineConfig(max_batch_size=batch),
            token_bytes=self.tokenizer.token_bytes,
        )
        ends = {i for i in (self.tokenizer.eos_token_id,) if i is not None}
        self.vocabulary = GrammarVocabulary(self.tokenizer, ends)

    def run(self, label: str, make: Callable[[], GrammarConstraint] | None) -> float:
        """Milliseconds a step of the batch."""
        streams = []
        # Compiled before: it is no part of a step.
        firsts = [make() if make is not None else None for _ in range(self.batch)]
        for i in range(self.batch):
            prompt = self.tokenizer.encode(f"Person {i} of the list, as data: ", add_bos=True)
            first = firsts[i]
            streams += self.engine.generate(
                GenerationRequest(
                    request_id=f"{label}-{i}-{time.monotonic_ns()}",
                    token_ids=prompt,
                    params=SamplingParams(temperature=0, max_tokens=self.tokens, ignore_eos=True),
                    make_output=lambda: OutputPipeline(self.tokenizer),
                    make_constraint=None if first is None else first.fork,
                )
            )
        infos = [event for stream in streams for event in stream if isinstance(event, Info)]
        cut = [info for info in infos if info.generated_tokens != self.tokens]
        if cut:
            raise SystemExit(f"{label}: an answer ended early: {cut[0]}")
        return 1000 * statistics.median(info.generate_time_s for info in infos) / (self.tokens - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a grammar costs a token.")
    parser.add_argument("--model", default="default")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    bench = Bench(arguments.model, arguments.batch, arguments.tokens)
    begin = time.perf_counter()
    bench.vocabulary.tokenizer()
    built_s = time.perf_counter() - begin
    kinds: dict[str, Any] = {MASKLESS: None, **grammars(bench.vocabulary)}
    compiled_ms: dict[str, float] = {}
    for label, make in kinds.items():
        if make is not None:
            begin = time.perf_counter()
            make()
            compiled_ms[label] = 1000 * (time.perf_counter() - begin)
    bench.run("warm-up", None)
    found: dict[str, list[float]] = {label: [] for label in kinds}
    for _ in range(arguments.rounds):
        for label, make in kinds.items():
            found[label].append(bench.run(label, make))
    bench.engine.shutdown()
    free = statistics.median(found[MASKLESS])
    print(
        f"vocabulary built in {built_s:.2f} s; batch {arguments.batch}, {arguments.tokens} tokens"
    )
    print("kind          ms/step  over free  paired  compile ms")
    rows = []
    for label, times in found.items():
        middle = statistics.median(times)
        # Each round against its own free run: load of the machine cancels out.
        paired = statistics.median(
            mine / base for mine, base in zip(times, found[MASKLESS], strict=True)
        )
        row = {
            "kind": label,
            "ms_per_step": middle,
            "overhead": middle / free - 1,
            "paired_overhead": paired - 1,
            "compile_ms": compiled_ms.get(label, 0.0),
        }
        rows.append(row)
        print(
            f"{label:12s} {middle:8.2f} {100 * row['overhead']:9.1f}% "
            f"{100 * row['paired_overhead']:6.1f}% {row['compile_ms']:10.1f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"vocabulary_s": built_s, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()

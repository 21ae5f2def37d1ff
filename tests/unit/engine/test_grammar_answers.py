"""Claims, on a small random model whose tokens are bytes: answers end where their grammar ends,
a grammar belongs to one request (F29), and everything else a request may ask for goes with it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from api.scripted_engine import ByteTokenizer
from osaurus.engine.core import BatchEngine
from osaurus.grammar.matcher import GrammarConstraint, compile_grammar
from osaurus.grammar.text import GrammarText
from osaurus.grammar.vocabulary import GrammarVocabulary
from osaurus.types.engine import EngineConfig, GenerationRequest
from tiny import Recorder, TokenText, ask, info_of, load_tiny, save_tiny, tokens_of

TOKENIZER = ByteTokenizer(others=('{"', '":', "true", "false", "ab"))
END = TOKENIZER.added_tokens["<|im_end|>"]
VOCABULARY = GrammarVocabulary(TOKENIZER, [END])
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
PROMPT = list(range(3, 60))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "llama")
    return load_tiny(path)


def _engine(model: Any, **config: Any) -> BatchEngine:
    settings = {"kv_block_tokens": 16, "prefill_chunk_tokens": 32, **config}
    return BatchEngine(
        model,
        EngineConfig(**settings),
        token_bytes=TokenText().token_bytes,
        start=False,
    )


def json_grammar() -> GrammarConstraint:
    text = GrammarText(VOCABULARY)
    return compile_grammar(text.finished(text.json(SCHEMA)), VOCABULARY)


def lark_grammar(expression: str) -> GrammarConstraint:
    return compile_grammar(GrammarText(VOCABULARY).finished(expression), VOCABULARY)


def constrained(
    request_id: str, grammar: GrammarConstraint | None = None, **params: Any
) -> GenerationRequest:
    request = ask(request_id, PROMPT, **{"max_tokens": 60, "stop": frozenset({END}), **params})
    first = grammar or json_grammar()
    return dataclasses.replace(request, make_constraint=first.fork)


def _run(engine: BatchEngine, *streams: Any) -> list[list[Any]]:
    for _ in range(3000):
        if all(stream._mailbox.completed for stream in streams):
            break
        engine.step()
        engine.check()
    return [list(stream) for stream in streams]


def _text(events: list[Any]) -> str:
    return b"".join(map(TOKENIZER.token_bytes, tokens_of(events))).decode()


def _alone(model: Any, request: GenerationRequest) -> list[list[int]]:
    engine = _engine(model)
    found = [tokens_of(events) for events in _run(engine, *engine.generate(request))]
    engine.shutdown()
    return found


def _fits(text: str) -> bool:
    value = json.loads(text)
    return value.keys() == {"a", "b"} and isinstance(value["b"], bool) and value["a"] <= 99


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_an_answer_ends_as_soon_as_nothing_can_follow(model: Any, temperature: float) -> None:
    engine = _engine(model)
    request = constrained("r", temperature=temperature, seed=3)
    (events,) = _run(engine, *engine.generate(request))
    info = info_of(events)
    assert _fits(_text(events))
    assert info.stop_reason == "stop"
    assert info.generated_tokens == len(tokens_of(events)), "no token after the last brace"
    engine.shutdown()


def test_f29_a_grammar_belongs_to_one_request(model: Any) -> None:
    def requests(round_: int) -> list[GenerationRequest]:
        free = ask(f"free{round_}", PROMPT[: 20 + round_], max_tokens=6 + 4 * round_)
        other = {"logit_bias": {70: 9.0}, "frequency_penalty": 1.0, "max_tokens": 5 + round_}
        return [
            constrained(f"one{round_}", temperature=1.0, seed=round_),
            free,
            constrained(f"two{round_}", temperature=1.2, seed=round_ + 50, min_tokens=5),
            constrained(f"three{round_}"),
            ask(f"other{round_}", PROMPT, **other),
        ]

    for round_ in range(5):
        alone = [_alone(model, request)[0] for request in requests(round_)]
        engine = _engine(model, max_batch_size=4)
        streams = [engine.generate(request)[0] for request in requests(round_)]
        together = _run(engine, *streams)
        assert [tokens_of(events) for events in together] == alone, f"round {round_}"
        for place in (0, 2, 3):
            assert _fits(_text(together[place]))
        engine.shutdown()


def test_choices_are_followed_each_for_itself(model: Any) -> None:
    grammar = lark_grammar('"ab" | /[c-z]{3}/')
    found = _alone(model, constrained("n", grammar, n=5, temperature=2.0, seed=1))
    texts = [b"".join(map(TOKENIZER.token_bytes, ids)).decode() for ids in found]
    assert all(re.fullmatch(r"ab|[c-z]{3}", text) for text in texts)
    assert len(set(texts)) > 1


def test_a_length_cut_is_said_as_one(model: Any) -> None:
    engine = _engine(model)
    (events,) = _run(engine, *engine.generate(constrained("r", max_tokens=3)))
    assert info_of(events).stop_reason == "length"
    assert '{"a":'.startswith(_text(events)) or _text(events).startswith('{"a":')
    engine.shutdown()


def test_the_end_token_comes_only_where_the_grammar_accepts(model: Any) -> None:
    grammar = lark_grammar("/[0-9]{4,6}/")
    for seed in range(8):
        bias = {"logit_bias": {END: 100.0}, "temperature": 1.0, "seed": seed}
        (ids,) = _alone(model, constrained("r", grammar, **bias))
        assert len(b"".join(map(TOKENIZER.token_bytes, ids))) == 4, "ended as early as it may"
        (ids,) = _alone(model, constrained("r", grammar, ignore_eos=True, **bias))
        assert len(b"".join(map(TOKENIZER.token_bytes, ids))) == 6, "went on as far as it may"
        late = {**bias, "min_tokens": 50}
        (ids,) = _alone(model, constrained("r", grammar, **late))
        assert len(b"".join(map(TOKENIZER.token_bytes, ids))) == 6, "ended when it had to"


def test_a_grammar_survives_that_its_request_makes_room_for_others(model: Any) -> None:
    requests = [constrained(f"r{i}", temperature=1.0, seed=i) for i in range(4)]
    alone = [_alone(model, request)[0] for request in requests]
    engine = _engine(model, kv_max_blocks=14)
    streams = [engine.generate(request)[0] for request in requests]
    for _ in range(12):
        engine.step()
    engine.scheduler.preempt(engine.scheduler.active[-1])
    together = _run(engine, *streams)
    assert engine.scheduler.preemptions > 0
    assert [tokens_of(events) for events in together] == alone
    engine.shutdown()


def test_a_stop_string_still_ends_an_answer(model: Any) -> None:
    request = dataclasses.replace(constrained("r"), make_output=lambda: Recorder(halt_at=2))
    engine = _engine(model)
    (events,) = _run(engine, *engine.generate(request))
    info = info_of(events)
    assert (info.stop_reason, info.stop_string) == ("stop", "halt")
    engine.shutdown()


class _Failing:
    """A grammar that meets a limit of its parser behind some tokens."""

    def __init__(self, after: int) -> None:
        self._inner = json_grammar()
        self.end_token_ids = self._inner.end_token_ids
        self._left = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def masks(self, drafts: Any) -> Any:
        if self._left == 0:
            raise ValueError("the lexer ran out of fuel")
        self._left -= 1
        return self._inner.masks(drafts)


def test_a_grammar_that_fails_ends_its_request_with_an_error_and_no_other(model: Any) -> None:
    (alone,) = _alone(model, constrained("good"))
    engine = _engine(model)
    bad = dataclasses.replace(constrained("bad"), make_constraint=lambda: _Failing(3))
    streams = [engine.generate(bad)[0], engine.generate(constrained("good"))[0]]
    failed, good = _run(engine, *streams)
    info = info_of(failed)
    assert info.stop_reason == "cancelled"
    assert "out of fuel" in (info.error or "")
    assert tokens_of(good) == alone
    engine.shutdown()

"""Writing grammars in llguidance's notation: rules, terminals, JSON, texts with control tokens.

An expression is a string of that notation; rules get names by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from osaurus.grammar.schema import schema_text
from osaurus.grammar.vocabulary import GrammarVocabulary, quoted


def regex_literal(pattern: str) -> str:
    r"""An expression as the notation spells it; `\d` and `\w` are ASCII, as in JSON Schema."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern, 'dw')}/"


def without(stops: Sequence[str]) -> str:
    """The terminal of any text that holds none of these."""
    if not stops:
        return "/(?s:.*)/"
    held = "|".join(map(_escaped, stops))
    return f"(/(?s:.*)/ & ~/(?s:.*)({held})(?s:.*)/)"


def _escaped(text: str) -> str:
    """`text` inside an expression of the notation."""
    return "".join(
        char if char.isalnum() or ord(char) > 127 else f"\\x{ord(char):02x}" for char in text
    )


class GrammarText:
    """Collects rules; `finished` is the grammar."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.vocabulary = vocabulary
        self._lines: list[str] = []

    def rule(self, expression: str) -> str:
        """A rule of its own for an expression; its name."""
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}: {expression}")
        return name

    def terminal(self, expression: str) -> str:
        """A stretch of text that one expression describes; its name."""
        name = f"T{len(self._lines)}"
        self._lines.append(f"{name}: {expression}")
        return name

    def json(self, schema: Mapping[str, Any] | bool) -> str:
        """JSON of a checked schema."""
        return self.rule(f"%json {schema_text(schema)}")

    def literal(self, text: str) -> str:
        return self.vocabulary.literal(text)

    def text_until(self, ends: Sequence[str], *, held: Sequence[str] = ()) -> str:
        """Any text up to and with the first of `ends`, without any of `held` in it."""
        vocabulary = self.vocabulary
        body = without([*ends, *held])
        control = [end for end in ends if vocabulary.control_id(end) is not None]
        plain = [end for end in ends if end not in control]
        options: list[str] = []
        if control:
            one_of = " | ".join(map(vocabulary.literal, control))
            options.append(f"{self.terminal(body)} ({one_of})")
        if plain:
            one_of = " | ".join(map(quoted, plain))
            options.append(self.terminal(f"{body} ({one_of})"))
        return self.rule(" | ".join(options))

    def finished(self, start: str, parts: Sequence[Mapping[str, Any]] = ()) -> str:
        """The grammar from an expression. `parts` are further grammars by name, which the
        expression may hold as `@name`."""
        import json

        lark = "\n".join(["%llguidance {}", f"start: {start}", *self._lines, ""])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *parts]}, ensure_ascii=False)

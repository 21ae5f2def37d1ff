"""Where in a schema the fault lies that the parser found in the whole of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from osaurus.grammar.matcher import GrammarError, compile_grammar
from osaurus.grammar.schema import part_of, schema_text
from osaurus.grammar.schema_walk import Node, children
from osaurus.grammar.vocabulary import GrammarVocabulary

#: Schemas tried on the way down.
_MAX_TRIES = 200


def faulty_place(schema: Mapping[str, Any], vocabulary: GrammarVocabulary) -> tuple[str, str]:
    """The innermost schema that fails by itself, as a JSON pointer, and the parser's words;
    `("#", "")` when none does."""
    place, words = Node("#", schema, 0), _fault_of(schema, vocabulary)
    tries = 0
    while words and tries < _MAX_TRIES:
        for child in children(place):
            tries += 1
            steps = [_plain(step) for step in child.pointer.split("/")[1:]]
            if isinstance(child.value, Mapping) and (
                found := _fault_of(part_of(schema, *steps), vocabulary)
            ):
                place, words = child, found
                break
        else:
            break
    return place.pointer, words


def _plain(step: str) -> str:
    return step.replace("~1", "/").replace("~0", "~")


def _fault_of(schema: Mapping[str, Any], vocabulary: GrammarVocabulary) -> str:
    from llguidance import LLMatcher

    try:
        compile_grammar(LLMatcher.grammar_from_json_schema(schema_text(schema)), vocabulary)
    except GrammarError as error:
        return str(error).partition("\n")[0][:300]
    except ValueError as error:
        return str(error)[:300]
    return ""

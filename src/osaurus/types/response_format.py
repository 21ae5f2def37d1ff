"""What shape an answer must have, as a value, and how the fields of each protocol become one.

Every protocol turns its field into a `ResponseFormat` here and puts it on
`ChatRequest.response_format`; None there is free text. Examples:

    OpenAI chat     response_format_of(body.response_format, "response_format")
    Open Responses  response_format_of(body.text.format, "text.format")
    Ollama          response_format_of(body.format, "format", takes_schema=True)
    vLLM's fields   structured_outputs_of(body.structured_outputs, guided={"guided_json": ...})

These check the shape of the field alone. `chat/` checks before generation that a schema,
expression or grammar can be enforced, and refuses it by its place otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from osaurus.errors import InvalidField

MAX_CHOICES = 1024
MAX_CHOICES_BYTES = 1 << 16
MAX_PATTERN_BYTES = 1 << 14
MAX_GRAMMAR_BYTES = 1 << 17

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonObjectFormat:
    """Any JSON object. `where` is the request's field, for error messages; in all of these."""

    where: str = "response_format"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonSchemaFormat:
    """JSON that the schema accepts. It is enforced whatever `strict` says; `where` names the
    field that holds the schema itself."""

    schema: Mapping[str, Any] | bool
    name: str = ""
    strict: bool = True
    where: str = "response_format.json_schema.schema"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegexFormat:
    """Text that the expression matches from its first to its last character."""

    pattern: str
    where: str = "structured_outputs.regex"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFormat:
    """One of these texts."""

    choices: tuple[str, ...]
    where: str = "structured_outputs.choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class LarkFormat:
    """Text of a context-free grammar in Lark's notation, whose first rule is `start`."""

    grammar: str
    where: str = "structured_outputs.grammar"


ResponseFormat = JsonObjectFormat | JsonSchemaFormat | RegexFormat | ChoiceFormat | LarkFormat


def response_format_of(
    value: Any, where: str, *, takes_schema: bool = False
) -> ResponseFormat | None:
    """A protocol's format field as a value; None is free text.

    Takes `{"type": "text" | "json_object" | "json_schema", ...}`, the schema under
    `json_schema` (OpenAI chat) or beside `type` (Open Responses). With `takes_schema`, as
    Ollama has it, also `"json"`, `""` and a bare schema. Raises `InvalidField` for `where` or
    a field below it.
    """
    if value is None:
        return None
    if takes_schema and not (isinstance(value, Mapping) and _is_tagged(value)):
        return _bare(value, where)
    if not isinstance(value, Mapping):
        raise InvalidField(where, f"must be an object with a type, got {type(value).__name__}")
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return JsonObjectFormat(where=where)
        case "json_schema":
            return _named_schema(value, where)
        case other:
            raise InvalidField(
                f"{where}.type",
                f"must be text, json_object or json_schema, got {str(other)[:40]!r}",
            )


def _is_tagged(value: Mapping[str, Any]) -> bool:
    """Whether this is OpenAI's object, given where a bare schema may stand too."""
    return value.get("type") in ("text", "json_object", "json_schema")


def _bare(value: Any, where: str) -> ResponseFormat | None:
    if value == "":
        return None
    if value == "json":
        return JsonObjectFormat(where=where)
    if isinstance(value, Mapping):
        return JsonSchemaFormat(schema=value, where=where)
    shown = repr(value[:40]) if isinstance(value, str) else type(value).__name__
    raise InvalidField(where, f"must be 'json' or a JSON schema, got {shown}")


def _named_schema(value: Mapping[str, Any], where: str) -> JsonSchemaFormat:
    if "json_schema" in value:
        value, where = value["json_schema"], f"{where}.json_schema"
        if not isinstance(value, Mapping):
            raise InvalidField(where, "must be an object with name and schema")
    name = value.get("name", "")
    if name is None:
        name = ""
    if not isinstance(name, str) or (name and not _NAME.fullmatch(name)):
        raise InvalidField(f"{where}.name", "must be 1 to 64 of the characters A-Z a-z 0-9 _ -")
    strict = value.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidField(f"{where}.strict", "must be true or false")
    return JsonSchemaFormat(
        schema=_schema(value.get("schema"), f"{where}.schema"),
        name=name,
        strict=strict is not False,
        where=f"{where}.schema",
    )


def _schema(schema: Any, where: str) -> Mapping[str, Any] | bool:
    if schema is None:
        raise InvalidField(where, "is required")
    if not isinstance(schema, (Mapping, bool)):
        raise InvalidField(where, f"must be a JSON schema, got {type(schema).__name__}")
    return schema


def structured_outputs_of(
    value: Any, *, guided: Mapping[str, Any] | None = None, where: str = "structured_outputs"
) -> ResponseFormat | None:
    """vLLM's fields as a value: `structured_outputs` with one of `json`, `regex`, `choice`,
    `grammar`, `json_object`, or its older `guided_json`, `guided_regex`, `guided_choice` and
    `guided_grammar`, given by name in `guided`. None when none is set.

    Raises `InvalidField` when two are set, or one is malformed.
    """
    if value is not None and not isinstance(value, Mapping):
        raise InvalidField(where, f"must be an object, got {type(value).__name__}")
    found = [
        (kind, (value or {})[kind], f"{where}.{kind}")
        for kind in _STRUCTURES
        if (value or {}).get(kind) is not None
    ]
    found += [
        (name.removeprefix("guided_"), each, name)
        for name, each in (guided or {}).items()
        if each is not None
    ]
    if value is not None and (unknown := value.keys() - _STRUCTURES.keys() - _HINTS):
        name = str(min(map(str, unknown)))[:40]
        raise InvalidField(
            f"{where}.{name}", f"is not supported; use one of {', '.join(_STRUCTURES)}"
        )
    if len(found) > 1:
        raise InvalidField(found[1][2], f"cannot be combined with {found[0][2]}")
    return _STRUCTURES[found[0][0]](found[0][1], found[0][2]) if found else None


def the_one_format(*formats: ResponseFormat | None) -> ResponseFormat | None:
    """What a request with several such fields asks for; two are a contradiction."""
    given = [each for each in formats if each is not None]
    if len(given) > 1:
        raise InvalidField(given[1].where, f"cannot be combined with {given[0].where}")
    return given[0] if given else None


def _json(value: Any, where: str) -> ResponseFormat:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidField(where, f"is no JSON: {error}") from error
    return JsonSchemaFormat(schema=_schema(value, where), where=where)


def _json_object(value: Any, where: str) -> ResponseFormat | None:
    if not isinstance(value, bool):
        raise InvalidField(where, "must be true or false")
    return JsonObjectFormat(where=where) if value else None


def _regex(value: Any, where: str) -> ResponseFormat:
    return RegexFormat(pattern=_text(value, where, MAX_PATTERN_BYTES), where=where)


def _grammar(value: Any, where: str) -> ResponseFormat:
    return LarkFormat(grammar=_text(value, where, MAX_GRAMMAR_BYTES), where=where)


def _choice(value: Any, where: str) -> ResponseFormat:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or not value:
        raise InvalidField(where, "must be a list of at least one text")
    if len(value) > MAX_CHOICES:
        raise InvalidField(where, f"may hold at most {MAX_CHOICES} texts, got {len(value)}")
    texts = tuple(_text(each, f"{where}[{i}]", MAX_CHOICES_BYTES) for i, each in enumerate(value))
    if sum(map(len, texts)) > MAX_CHOICES_BYTES:
        raise InvalidField(where, f"may hold at most {MAX_CHOICES_BYTES} characters in all")
    return ChoiceFormat(choices=texts, where=where)


def _text(value: Any, where: str, limit: int) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidField(where, "must be a text that is not empty")
    if len(value.encode(errors="surrogatepass")) > limit:
        raise InvalidField(where, f"may hold at most {limit} bytes")
    return value


_STRUCTURES = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
}
#: vLLM's wishes about how a constraint is carried out, which change no answer here.
_HINTS = frozenset({"disable_fallback", "backend"})

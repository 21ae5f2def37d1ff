"""Which tool format and which reasoning envelope a bundle uses, and how that is known.

Pure functions over what a bundle says about itself. Order of authority, for tools and reasoning
apart: the user's override, the bundle's stamp, `model_type`, the chat template, the
tokenizer's added tokens. Exceptions are written where they apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from osaurus.errors import InvalidField
from osaurus.parsing.build import HARMONY
from osaurus.parsing.formats import TOOL_FORMATS
from osaurus.parsing.reasoning import REASONING_FORMATS

Origin = Literal["override", "stamp", "model_type", "template", "tokenizer", "none"]

#: What an override or a stamp may say for "no format at all".
_NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleFacts:
    """What selection looks at; any of it may be missing.

    `text_model_type` is the inner `text_config.model_type` of a multimodal wrapper.
    `added_tokens` are the texts that the tokenizer maps to one id each.
    """

    model_type: str = ""
    text_model_type: str = ""
    vocab_size: int = 0
    rope_type: str = ""
    template: str = ""
    added_tokens: frozenset[str] = frozenset()
    tool_stamp: str | None = None
    reasoning_stamp: str | None = None
    think_in_template: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatChoice:
    """Names for `build_machine`, each with the step that gave it, as `osaurus show` tells them.

    `opens_by_default` is whether responses usually start inside a block: the start state only
    where the prompt's tail cannot be seen. `notes` are lines for the log.
    """

    tool_format: str | None
    tool_origin: Origin
    reasoning: str | None
    reasoning_origin: Origin
    opens_by_default: bool = False
    notes: tuple[str, ...] = ()


#: Other names under which stamps and overrides know the formats.
_TOOL_ALIASES: Mapping[str, str] = {
    "qwen": "xml_function",
    "qwen3": "xml_function",
    "qwen3_coder": "xml_function",
    "qwen3_coder_xml": "xml_function",
    "qwen3_xml": "xml_function",
    "mimo": "xml_function",
    "seed_oss": "xml_function",
    "glm45": "glm4",
    "glm47": "glm4",
    "poolside_v1": "glm4",
    "hermes": "json",
    "hy_v3": "hunyuan",
    "hunyuan_a13b": "hunyuan",
    "tencent": "hunyuan",
    "kimi": "kimi_k2",
    "minimax": "minimax_m2",
    "functiongemma": "gemma",
    "llama3_json": "llama3",
    "llama4_pythonic": "pythonic",
    "zaya": "zaya_xml",
    "step3p5": "step",
    "stepfun": "step",
    "gpt_oss": HARMONY,
    "openai": HARMONY,
}
_REASONING_ALIASES: Mapping[str, str] = {
    "qwen3": "think",
    "deepseek_r1": "think",
    "deepseek_v3": "think",
    "glm45": "think",
    "kimi_k2": "think",
    "minimax_m2": "think",
    "nemotron_v3": "think",
    "step3p5": "think",
    "zaya": "think",
    "lfm2": "think",
    "hy_v3": "hunyuan",
    "hy3": "hunyuan",
    "seed_oss": "seed",
    "mistral": "bracket",
    "magistral": "bracket",
    "gemma4": "channel",
    "gpt_oss": HARMONY,
    "openai_gptoss": HARMONY,
    "granite": "sentence",
}

#: Compact `model_type` prefix -> tool format; the longest prefix wins. Empty: this prefix must
#: not be caught by a shorter one, other evidence decides.
_TOOLS_BY_TYPE: Mapping[str, str] = {
    "lfm2": "lfm2",
    "glm4": "glm4",
    "glm5": "glm4",
    "glmmoe": "glm4",
    "laguna": "glm4",
    "gptoss": HARMONY,
    "gemma4": "gemma4",
    "diffusiongemma": "gemma4",
    "minimax": "minimax_m2",
    "minimaxm3": "",
    "mimov2": "xml_function",
    "seedoss": "xml_function",
    "nemotron": "nemotron",
    "qwen2": "json",
    "qwen35": "xml_function",
    "qwen36": "xml_function",
    "qwen3next": "xml_function",
    "qwen3vl": "xml_function",
    "step3p5": "step",
    "step3p7": "step",
    "stepfun": "step",
    "mistral3": "mistral",
    "ministral3": "mistral",
    "mistral4": "mistral",
    "pixtral": "mistral",
    "kimi": "kimi_k2",
    "kimik3": "",
    "deepseekv4": "dsml",
    "deepseekv32": "dsml",
    "zaya": "zaya_xml",
    "zyphra": "zaya_xml",
    "hy3": "hunyuan",
    "hyv3": "hunyuan",
    "hunyuan": "hunyuan",
    "granite": "granite",
    "granitemoehybrid": "json",
}
_REASONING_BY_TYPE: Mapping[str, str] = {
    "qwen3": "think",
    "deepseek": "think",
    "glm4moe": "think",
    "glm5": "think",
    "glmmoe": "think",
    "minimax": "think",
    "kimi": "think",
    "nemotronh": "think",
    "holo": "think",
    "bailing": "think",
    "ling": "think",
    "laguna": "think",
    "zaya": "think",
    "zaya1vl": "",
    "mimo": "think",
    "step3p5": "think",
    "step3p7": "think",
    "stepfun": "think",
    "seedoss": "seed",
    "hy3": "hunyuan",
    "hyv3": "hunyuan",
    "hunyuan": "hunyuan",
    "gemma4": "channel",
    "diffusiongemma": "channel",
    "gptoss": HARMONY,
}
#: Families whose prompts end inside a think block as a rule.
_OPEN_TYPES = ("minimax", "step3p5", "step3p7", "stepfun", "nemotronh", "qwen36", "glm5")

#: Text in a chat template -> tool format; the rarest first, all texts of a row must occur.
_TOOLS_BY_TEMPLATE: tuple[tuple[tuple[str, ...], str], ...] = (
    (("｜DSML｜",), "dsml"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<|tool_call>",), "gemma4"),
    (("<tool_call|>",), "gemma4"),
    (("<start_function_call>",), "gemma"),
    (("<zyphra_tool_call>",), "zaya_xml"),
    (("<tool_sep",), "hunyuan"),
    (("<arg_key>",), "glm4"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_list_start|>",), "lfm2"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|channel|>", "<|message|>"), HARMONY),
    (("[TOOL_CALLS]",), "mistral"),
    (("<longcat_tool_call>",), "longcat"),
    (("<TOOLCALL>",), "nemotron_v2"),
    (("<function=", "<parameter="), "xml_function"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "json"),
    (("<function_calls>",), "pythonic"),
    (("<|python_start|>",), "pythonic"),
    (("<|python_tag|>",), "llama3"),
    (("ipython",), "llama3"),
)
#: Where both tags occur, in the template or as added tokens, the model knows the envelope.
_THINKING_TAGS = (
    ("<think>", "</think>", "think"),
    ("<seed:think>", "</seed:think>", "seed"),
    ("[THINK]", "[/THINK]", "bracket"),
)
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"


def choose_formats(
    facts: BundleFacts, *, tool_override: str | None = None, reasoning_override: str | None = None
) -> FormatChoice:
    """The formats of a bundle. Raises `InvalidField` for an override that names nothing known."""
    notes: list[str] = []
    tool_format, tool_origin = _choose_tools(facts, tool_override, notes)
    reasoning, reasoning_origin = _choose_reasoning(facts, reasoning_override, notes)
    if HARMONY in (tool_format, reasoning):
        # Its rails and calls come in one framing: neither works without the other.
        tool_format = reasoning = HARMONY
    return FormatChoice(
        tool_format=tool_format,
        tool_origin=tool_origin,
        reasoning=reasoning,
        reasoning_origin=reasoning_origin,
        opens_by_default=reasoning is not None and _has_type(facts, *_OPEN_TYPES),
        notes=tuple(notes),
    )


def check_overrides(*, tool_override: str | None, reasoning_override: str | None) -> None:
    """Raises `InvalidField` for a setting that names no known format."""
    choose_formats(
        BundleFacts(), tool_override=tool_override, reasoning_override=reasoning_override
    )


def format_in_template(template: str) -> str | None:
    """The tool format that a chat template's text shows."""
    for texts, name in _TOOLS_BY_TEMPLATE:
        if all(text in template for text in texts):
            if name == "deepseek_v31":
                behind = template.partition(_DEEPSEEK_SEPARATOR)[2]
                return "deepseek_v3" if "```json" in behind else name
            return name
    return None


def _choose_tools(
    facts: BundleFacts, override: str | None, notes: list[str]
) -> tuple[str | None, Origin]:
    if override is not None:
        return _named(override, "tools.toolParserOverride", TOOL_FORMATS, _TOOL_ALIASES), "override"
    if _has_type(facts, "gptoss"):
        # Its bundles are stamped with GLM's parser.
        return HARMONY, "model_type"
    shown = format_in_template(facts.template)
    stamped = _by_stamp(facts, shown, notes)
    if stamped is not None:
        return stamped
    if _has_type(facts, "bailing", "ling"):
        return (shown, "template") if shown in ("json", "glm4") else ("glm4", "model_type")
    if _has_type(facts, "nemotron") and shown == "nemotron_v2":
        return shown, "template"
    if _has_type(facts, "granite") and shown == "xml_function":
        return shown, "template"  # the types of 3.x and 4.0 went on to 4.2
    if _has_type(facts, "llama", "qwen2") and shown not in (None, "llama3"):
        # Distillates and fine-tunes keep these types and write their own format.
        return shown, "template"
    named = _by_type(facts, _TOOLS_BY_TYPE)
    if named:
        return named, "model_type"
    if _has_type(facts, "llama") and not _has_type(facts, "llama4"):
        if facts.vocab_size >= 128_000 or facts.rope_type == "llama3":
            return "llama3", "model_type"
    elif shown is not None:
        return shown, "template"
    for texts, name in _TOOLS_BY_TEMPLATE:
        if name != "llama3" and all(text in facts.added_tokens for text in texts):
            return name, "tokenizer"
    return None, "none"


def _by_stamp(
    facts: BundleFacts, shown: str | None, notes: list[str]
) -> tuple[str | None, Origin] | None:
    stamp = facts.tool_stamp
    if not stamp or not stamp.strip():
        return None
    if _compact(stamp) == "deepseek":
        # Says nothing about the body: it is on Ling's bundles as well as on DeepSeek's.
        if shown in ("deepseek_v3", "deepseek_v31", "dsml") and not _has_type(
            facts, "bailing", "ling"
        ):
            return shown, "template"
        return None
    name = _known(stamp, TOOL_FORMATS, _TOOL_ALIASES)
    if name is None:
        notes.append(f"the bundle's tool parser {stamp.strip()!r} is not known; looking further")
        return None
    if _compact(stamp) in ("qwen", "qwen3") and shown == "json":
        return shown, "template"
    return (None if name == _NONE else name), "stamp"


def _choose_reasoning(
    facts: BundleFacts, override: str | None, notes: list[str]
) -> tuple[str | None, Origin]:
    if override is not None:
        setting = "tools.reasoningParserOverride"
        known = _named(override, setting, REASONING_FORMATS, _REASONING_ALIASES)
        return known, "override"
    if _has_type(facts, "gptoss"):
        return HARMONY, "model_type"
    if _has_type(facts, "zaya1vl"):
        return None, "model_type"
    stamp = facts.reasoning_stamp
    if stamp and stamp.strip():
        name = _known(stamp, REASONING_FORMATS, _REASONING_ALIASES)
        if name is None:
            notes.append(
                f"the bundle's reasoning parser {stamp.strip()!r} is not known; looking further"
            )
        elif _has_type(facts, "hy3", "hyv3") and facts.think_in_template is False:
            notes.append("the bundle's reasoning stamp is ignored: its template has no thinking")
        else:
            return (None if name == _NONE else name), "stamp"
    named = _by_type(facts, _REASONING_BY_TYPE)
    if named is not None:
        return named or None, "model_type"
    for opener, closer, name in _THINKING_TAGS:
        if opener in facts.template and closer in facts.template:
            return name, "template"
    if format_in_template(facts.template) == HARMONY:
        return HARMONY, "template"
    if _has_type(facts, "granite") and "thought process:" in facts.template:
        return "sentence", "template"
    for opener, closer, name in _THINKING_TAGS:
        if {opener, closer} <= facts.added_tokens:
            return name, "tokenizer"
    return None, "none"


def _has_type(facts: BundleFacts, *prefixes: str) -> bool:
    types = (_compact(facts.model_type), _compact(facts.text_model_type))
    return any(each.startswith(prefixes) for each in types if each)


def _by_type(facts: BundleFacts, table: Mapping[str, str]) -> str | None:
    for model_type in (facts.model_type, facts.text_model_type):
        compact = _compact(model_type)
        fitting = [prefix for prefix in table if compact.startswith(prefix)]
        if fitting:
            return table[max(fitting, key=len)]
    return None


def _compact(name: str) -> str:
    return _plain(name).replace("_", "")


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_").replace(".", "_")


def _known(name: str, formats: Mapping[str, object], aliases: Mapping[str, str]) -> str | None:
    """The format that `name` means, as written and then without underscores."""
    table = {**{each: each for each in (*formats, HARMONY, _NONE)}, **aliases}
    return table.get(_plain(name)) or {_compact(key): value for key, value in table.items()}.get(
        _compact(name)
    )


def _named(
    name: str, setting: str, formats: Mapping[str, object], aliases: Mapping[str, str]
) -> str | None:
    known = _known(name, formats, aliases)
    if known is None:
        names = ", ".join(sorted({*formats, HARMONY, _NONE}))
        raise InvalidField(setting, f"{name!r} is not known; one of {names}")
    return None if known == _NONE else known

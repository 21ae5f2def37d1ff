"""Each bundle's formats, and the step that gave them."""

from __future__ import annotations

from typing import Any

import pytest

from osaurus.errors import InvalidField
from osaurus.parsing.build import build_machine
from osaurus.parsing.selection import BundleFacts, choose_formats, format_in_template

HERMES = '<tools></tools> {"name": … } <tool_call>\n{"name"'
THINK = "<think>…</think>"
XML = HERMES + "<function=x><parameter=y>"
LLAMA4 = "{% if message.role == 'ipython' %}<|python_start|>…<|python_end|>"


@pytest.mark.parametrize(
    ("facts", "tools", "origin"),
    [
        ({"model_type": "lfm2_moe"}, "lfm2", "model_type"),
        ({"model_type": "glm4_moe"}, "glm4", "model_type"),
        ({"model_type": "glm_moe_dsa"}, "glm4", "model_type"),
        ({"model_type": "laguna"}, "glm4", "model_type"),
        ({"model_type": "bailing_moe", "template": HERMES}, "json", "template"),
        ({"model_type": "bailing_hybrid", "template": "<arg_key>"}, "glm4", "template"),
        ({"model_type": "bailing_moe"}, "glm4", "model_type"),
        ({"model_type": "bailing_moe", "tool_stamp": "deepseek", "template": HERMES}, "json",
         "template"),
        ({"model_type": "gpt_oss"}, "harmony", "model_type"),
        ({"model_type": "gpt_oss", "tool_stamp": "glm47"}, "harmony", "model_type"),
        ({"model_type": "gemma4"}, "gemma4", "model_type"),
        ({"model_type": "gemma4", "text_model_type": "gemma4_text"}, "gemma4", "model_type"),
        ({"model_type": "minimax_m2"}, "minimax_m2", "model_type"),
        ({"model_type": "minimax_m3", "template": "<x>"}, None, "none"),
        ({"model_type": "mimo_v2_flash"}, "xml_function", "model_type"),
        ({"model_type": "nemotron_h"}, "nemotron", "model_type"),
        ({"model_type": "nemotron_h", "template": "<TOOLCALL>["}, "nemotron_v2", "template"),
        ({"model_type": "qwen2"}, "json", "model_type"),
        ({"model_type": "qwen2_5_vl"}, "json", "model_type"),
        ({"model_type": "qwen2", "template": "<｜tool▁calls▁begin｜>…<｜tool▁sep｜>…```json"},
         "deepseek_v3", "template"),
        ({"model_type": "qwen3", "template": HERMES}, "json", "template"),
        ({"model_type": "qwen3_moe", "template": HERMES + "<function=x><parameter=y>"},
         "xml_function", "template"),
        ({"model_type": "qwen3", "tool_stamp": "qwen", "template": HERMES}, "json", "template"),
        ({"model_type": "qwen3", "tool_stamp": "qwen"}, "xml_function", "stamp"),
        ({"model_type": "qwen3_5_moe"}, "xml_function", "model_type"),
        ({"model_type": "qwen3_next"}, "xml_function", "model_type"),
        ({"model_type": "wrapper", "text_model_type": "qwen3_vl_text"}, "xml_function",
         "model_type"),
        ({"model_type": "step3p5"}, "step", "model_type"),
        ({"model_type": "mistral3"}, "mistral", "model_type"),
        ({"model_type": "mistral", "template": "[TOOL_CALLS]"}, "mistral", "template"),
        ({"model_type": "kimi_k2"}, "kimi_k2", "model_type"),
        ({"model_type": "kimi_k3"}, None, "none"),
        ({"model_type": "deepseek_v32"}, "dsml", "model_type"),
        ({"model_type": "deepseek_v4"}, "dsml", "model_type"),
        ({"model_type": "deepseek_v3", "template": "<｜tool▁calls▁begin｜><｜tool▁sep｜>"},
         "deepseek_v31", "template"),
        ({"tool_stamp": "deepseek", "template": "｜DSML｜"}, "dsml", "template"),
        ({"model_type": "zaya"}, "zaya_xml", "model_type"),
        ({"model_type": "zaya1_vl"}, "zaya_xml", "model_type"),
        ({"model_type": "hunyuan_v1_moe"}, "hunyuan", "model_type"),
        ({"model_type": "hy_v3"}, "hunyuan", "model_type"),
        ({"model_type": "granite"}, "granite", "model_type"),
        ({"model_type": "granitemoehybrid"}, "json", "model_type"),
        ({"model_type": "llama", "vocab_size": 128256}, "llama3", "model_type"),
        ({"model_type": "llama", "rope_type": "llama3"}, "llama3", "model_type"),
        ({"model_type": "llama", "vocab_size": 32000, "template": "ipython"}, None, "none"),
        ({"model_type": "llama", "vocab_size": 128256, "template": HERMES}, "json", "template"),
        ({"model_type": "llama", "vocab_size": 49152}, None, "none"),
        ({"model_type": "gemma3"}, None, "none"),
        ({"model_type": "gemma3n"}, None, "none"),
        ({"model_type": "gemma3", "added_tokens": frozenset({"<start_function_call>"})}, "gemma",
         "tokenizer"),
        ({"model_type": "odd", "added_tokens": frozenset({"<|tool_call_start|>"})}, "lfm2",
         "tokenizer"),
        ({"model_type": "odd", "tool_stamp": "Hermes "}, "json", "stamp"),
        ({"model_type": "odd", "tool_stamp": "kimi-k2"}, "kimi_k2", "stamp"),
        ({"model_type": "odd", "tool_stamp": "MiniMax.M2"}, "minimax_m2", "stamp"),
        ({"model_type": "lfm2", "tool_stamp": "whatever"}, "lfm2", "model_type"),
        ({"model_type": "lfm2", "tool_stamp": "none"}, None, "stamp"),
        ({}, None, "none"),
        ({"model_type": "llama4", "vocab_size": 202_048, "template": LLAMA4}, "pythonic",
         "template"),
        ({"model_type": "llama4", "added_tokens": {"<|python_start|>", "<|python_end|>"}},
         "pythonic", "tokenizer"),
        ({"model_type": "olmo3", "template": "<functions></functions> <function_calls>"},
         "pythonic", "template"),
        ({"model_type": "olmo3", "added_tokens": {"<function_calls>"}}, "pythonic", "tokenizer"),
        ({"model_type": "granitemoehybrid", "template": "<tool_call>"}, "json", "model_type"),
        ({"model_type": "granitemoehybrid", "template": XML}, "xml_function", "template"),
        ({"model_type": "granite", "template": XML}, "xml_function", "template"),
        ({"model_type": "qwen2", "template": XML}, "xml_function", "template"),
        ({"model_type": "llama", "vocab_size": 128_256, "template": XML}, "xml_function",
         "template"),
        ({"model_type": "llama", "vocab_size": 128_256, "template": "ipython"}, "llama3",
         "model_type"),
    ],
)  # fmt: skip
def test_tool_formats(facts: dict[str, Any], tools: str | None, origin: str) -> None:
    choice = choose_formats(BundleFacts(**facts))
    assert (choice.tool_format, choice.tool_origin) == (tools, origin)
    build_machine(choice.tool_format, choice.reasoning)


@pytest.mark.parametrize(
    ("facts", "reasoning", "origin"),
    [
        ({"model_type": "qwen3"}, "think", "model_type"),
        ({"model_type": "qwen2"}, None, "none"),
        ({"model_type": "qwen2", "template": THINK}, "think", "template"),
        ({"model_type": "deepseek_v3"}, "think", "model_type"),
        ({"model_type": "glm4_moe"}, "think", "model_type"),
        ({"model_type": "glm4"}, None, "none"),
        ({"model_type": "minimax_m2"}, "think", "model_type"),
        ({"model_type": "nemotron_h"}, "think", "model_type"),
        ({"model_type": "zaya"}, "think", "model_type"),
        ({"model_type": "zaya1_vl", "template": THINK}, None, "model_type"),
        ({"model_type": "hy_v3"}, "hunyuan", "model_type"),
        ({"model_type": "hy_v3", "reasoning_stamp": "qwen3", "think_in_template": False},
         "hunyuan", "model_type"),
        ({"model_type": "gemma4"}, "channel", "model_type"),
        ({"model_type": "gemma3"}, None, "none"),
        ({"model_type": "gpt_oss"}, "harmony", "model_type"),
        ({"model_type": "lfm2"}, None, "none"),
        ({"model_type": "lfm2", "template": THINK}, "think", "template"),
        ({"model_type": "lfm2", "reasoning_stamp": "think", "think_in_template": False}, "think",
         "stamp"),
        ({"model_type": "mistral3", "template": "[THINK]…[/THINK]"}, "bracket", "template"),
        ({"model_type": "mistral3"}, None, "none"),
        ({"model_type": "granite", "template": "Here is my thought process:"}, "sentence",
         "template"),
        ({"model_type": "llama", "template": "<think> only"}, None, "none"),
        ({"model_type": "phi3"}, None, "none"),
        ({"model_type": "odd", "reasoning_stamp": "magistral"}, "bracket", "stamp"),
        ({"model_type": "qwen3", "reasoning_stamp": "odd"}, "think", "model_type"),
        ({"model_type": "granitemoehybrid", "template": XML + THINK}, "think", "template"),
        ({"model_type": "mistral3", "added_tokens": {"[THINK]", "[/THINK]"}}, "bracket",
         "tokenizer"),
        ({"model_type": "qwen2", "template": "split('</think>')",
          "added_tokens": {"<think>", "</think>"}}, "think", "tokenizer"),
        ({"model_type": "qwen2", "added_tokens": {"</think>"}}, None, "none"),
    ],
)  # fmt: skip
def test_reasoning_formats(facts: dict[str, Any], reasoning: str | None, origin: str) -> None:
    choice = choose_formats(BundleFacts(**facts))
    assert (choice.reasoning, choice.reasoning_origin) == (reasoning, origin)


def test_an_override_wins_and_an_unknown_one_lists_the_known() -> None:
    facts = BundleFacts(model_type="qwen3_5", tool_stamp="hermes")
    choice = choose_formats(facts, tool_override="GLM47", reasoning_override="none")
    assert (choice.tool_format, choice.tool_origin) == ("glm4", "override")
    assert (choice.reasoning, choice.reasoning_origin) == (None, "override")
    with pytest.raises(InvalidField, match=r"toolParserOverride.*kimi_k2.*xml_function"):
        choose_formats(facts, tool_override="nonsense")
    with pytest.raises(InvalidField, match=r"reasoningParserOverride.*think"):
        choose_formats(facts, reasoning_override="nonsense")


def test_an_unknown_stamp_is_one_line_for_the_log() -> None:
    choice = choose_formats(BundleFacts(model_type="lfm2", tool_stamp="odd"))
    assert len(choice.notes) == 1
    assert "'odd'" in choice.notes[0]
    assert choose_formats(BundleFacts(model_type="lfm2", tool_stamp="lfm2")).notes == ()


def test_families_that_always_prefill_say_so() -> None:
    assert choose_formats(BundleFacts(model_type="minimax_m2")).opens_by_default
    assert not choose_formats(BundleFacts(model_type="qwen3")).opens_by_default
    assert not choose_formats(BundleFacts(model_type="lfm2")).opens_by_default


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("｜DSML｜ <tool_call>", "dsml"),
        ("<minimax:tool_call> <tool_call>", "minimax_m2"),
        ("<|tool_call>", "gemma4"),
        ("<tool_call|>", "gemma4"),
        ("<start_function_call>", "gemma"),
        ("<zyphra_tool_call> <function=x><parameter=y>", "zaya_xml"),
        ("<tool_sep> <arg_key> <tool_call>", "hunyuan"),
        ("<arg_key> <tool_call>", "glm4"),
        ("<|tool_list_start|>", "lfm2"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<|channel|> <|message|>", "harmony"),
        ("<|channel|>", None),
        ("[TOOL_CALLS]", "mistral"),
        ("<longcat_tool_call>", "longcat"),
        ("<|tool_call|>", "granite"),
        ("<tool_call>", "json"),
        ("<function_calls> ipython", "pythonic"),
        ("<|python_start|> ipython", "pythonic"),
        ("<|python_tag|>", "llama3"),
        ("{{ messages }}", None),
    ],
)
def test_the_rarest_text_in_a_template_decides(template: str, name: str | None) -> None:
    assert format_in_template(template) == name


@pytest.mark.parametrize(
    ("token", "name"),
    [
        ("<minimax:tool_call>", "minimax_m2"),
        ("<|tool_call>", "gemma4"),
        ("<start_function_call>", "gemma"),
        ("<zyphra_tool_call>", "zaya_xml"),
        ("<arg_key>", "glm4"),
        ("<|tool_call_start|>", "lfm2"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("[TOOL_CALLS]", "mistral"),
        ("<longcat_tool_call>", "longcat"),
        ("<TOOLCALL>", "nemotron_v2"),
        ("<|tool_call|>", "granite"),
        ("<tool_call>", "json"),
        ("<|python_start|>", "pythonic"),
        ("<function_calls>", "pythonic"),
    ],
)
def test_without_other_evidence_an_added_token_decides(token: str, name: str) -> None:
    choice = choose_formats(BundleFacts(model_type="odd", added_tokens=frozenset({"<a>", token})))
    assert (choice.tool_format, choice.tool_origin) == (name, "tokenizer")


@pytest.mark.parametrize("without", range(5))
def test_each_piece_of_evidence_outranks_those_behind_it(without: int) -> None:
    """Override, stamp, `model_type`, template, tokenizer: with the first ones gone, the next."""
    known: dict[str, Any] = {
        "tool_stamp": "kimi_k2",
        "model_type": "lfm2",
        "template": "[TOOL_CALLS]",
        "added_tokens": frozenset({"<|tool_call>"}),
    }
    override = "glm4"
    for name in ("override", *known)[:without]:
        override = None if name == "override" else override
        known.pop(name, None)
    choice = choose_formats(BundleFacts(**known), tool_override=override)
    expected = [
        ("glm4", "override"),
        ("kimi_k2", "stamp"),
        ("lfm2", "model_type"),
        ("mistral", "template"),
        ("gemma4", "tokenizer"),
    ]
    assert (choice.tool_format, choice.tool_origin) == expected[without]

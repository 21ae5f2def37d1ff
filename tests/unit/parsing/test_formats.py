"""What single formats promise beyond the golden cases."""

from __future__ import annotations

from typing import Any

import pytest

from osaurus.parsing.build import build_machine
from osaurus.parsing.formats import TOOL_FORMATS
from osaurus.parsing.reasoning import REASONING_FORMATS
from osaurus.types.chat import Tool
from unit.parsing.transcripts import read

F = Tool(
    name="f",
    parameters={
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "b": {"type": "integer"},
            "o": {"type": "object", "properties": {"n": {"type": "integer"}}},
        },
        "required": ["a"],
        "additionalProperties": False,
    },
)


def calls(family: str, text: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    return read(family, text, [F]).calls


def test_every_format_and_envelope_builds() -> None:
    for tool_format in [*TOOL_FORMATS, None]:
        for reasoning in [*REASONING_FORMATS, None]:
            machine = build_machine(tool_format, reasoning)
            assert (machine is None) is (tool_format is None and reasoning is None)
    for names in (("harmony", None), (None, "harmony"), ("harmony", "harmony")):
        assert build_machine(*names) is not None
    with pytest.raises(KeyError):
        build_machine("nonsense", None)


# -- JSON


def test_a_call_nested_under_function_and_objects_in_a_row_are_read() -> None:
    nested = '{"type": "function", "function": {"name": "f", "parameters": {"a": "x"}}}'
    assert calls("json", f"<tool_call>{nested}\n{nested}</tool_call>") == (("f", {"a": "x"}),) * 2


@pytest.mark.parametrize("arguments", ['""', "null", "{}", '"{}"'])
def test_missing_and_empty_arguments_are_an_empty_object(arguments: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert calls("json", text) == (("f", {}),)
    assert calls("json", '<tool_call>{"name": "f"}</tool_call>') == (("f", {}),)


@pytest.mark.parametrize(
    "text",
    ['Say: {"name": "f", "arguments": {}}', '{"name": "g", "arguments": {}}', '{"name": "f"}',
     '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', "[]", "{}", "[1]", "{",
     '{"name": "f", "arguments": {}, "result": 1}', '{"name": "f", "arguments": [1]}',
     '{"name": "f", "arguments": {"a": "x"}'],
)  # fmt: skip
def test_bare_json_that_is_no_call_is_the_answer(text: str) -> None:
    outcome = read("bare_json", text, [F])
    assert (outcome.content, outcome.calls, outcome.failed) == (text, (), False)


def test_bare_calls_may_begin_any_line_and_text_may_follow() -> None:
    text = 'Sure.\n  {"name": "f", "arguments": {"a": "x"}}\n{"name": "F", "parameters": {}}\nok'
    outcome = read("bare_json", text, [F])
    assert outcome.calls == (("f", {"a": "x"}), ("f", {}))
    assert outcome.content == "Sure.\n  \nok"


# -- Llama, Python


def test_llama_separates_calls_with_semicolons_also_without_its_tag() -> None:
    one = '{"name": "f", "parameters": {"a": "x"}}'
    assert len(calls("llama3", f"{one}; {one}")) == 2
    assert len(calls("llama3", f"<|python_tag|>{one} ;\n{one}")) == 2


def test_code_behind_the_python_tag_is_prose() -> None:
    text = "<|python_tag|>print('hi')"
    assert read("llama3", text, [F]).content == text


@pytest.mark.parametrize(
    "text",
    ["[f(a=g())]", "[f(a=x)]", "[f(**a)]", "[f(a='1', a='2')]", "[f('x', 'y')]", "[f(1)]",
     "[f(a='x') for i in y]", "[f(a='x'", "[g()]", "[f]", "[f(a=1+1)]", "[f(a='x'), g()]"],
)  # fmt: skip
def test_python_that_is_no_list_of_offered_calls_is_text(text: str) -> None:
    outcome = read("pythonic", text, [F])
    assert (outcome.content, outcome.calls) == (text, ())


def test_one_positional_string_goes_to_the_first_required_argument() -> None:
    assert calls("pythonic", "[f('x')]") == (("f", {"a": "x"}),)
    assert calls("pythonic", "[f('x', b=2)]") == (("f", {"a": "x", "b": 2}),)
    assert calls("pythonic", "[f(b='7', a='7')]") == (("f", {"b": 7, "a": "7"}),)


def test_olmo_writes_one_call_a_line() -> None:
    text = "<function_calls>\nf(a='x')\nf(a='y')\n</function_calls>"
    assert calls("pythonic", text) == (("f", {"a": "x"}), ("f", {"a": "y"}))


def test_llama_4_may_write_json_objects_in_its_tags_or_without_them() -> None:
    call = '{"name": "f", "parameters": {"a": "x"}}'
    for text in (f"<|python_start|>{call}<|python_end|>", call, f"Well.\n{call}"):
        assert calls("pythonic", text) == (("f", {"a": "x"}),)
    answer = '{"name": "oak", "age": 36}'
    assert read("pythonic", answer, [F]).content == answer


def test_lfm2_takes_json_and_calls_without_brackets_and_drops_unknown_tools() -> None:
    for body in (
        '[{"name": "f", "arguments": {"a": "x"}}]',
        '{"name": "f", "arguments": {"a": "x"}}',
        "f(a='x')",
        "[g(), f(a='x')]",
    ):
        outcome = read("lfm2", f"<|tool_call_start|>{body}<|tool_call_end|>", [F])
        assert (outcome.calls, outcome.content) == ((("f", {"a": "x"}),), ""), body


# -- XML


def xml(body: str) -> str:
    return f"<tool_call>\n<function=f>\n{body}\n</function>\n</tool_call>"


def test_a_value_may_hold_closers_of_other_elements() -> None:
    value = "</function>\n</tool_call>\n<think>x</think>\n<tool_call>\n<function=g>"
    text = xml(f"<parameter=a>\n{value}\n</parameter>")
    assert calls("xml_function", text) == (("f", {"a": value}),)


def test_a_lost_parameter_closer_is_found_at_the_next_declared_parameter() -> None:
    text = xml("<parameter=a>\n<parameter=zzz>\n<parameter=b>\n3\n</parameter>")
    assert calls("xml_function", text) == (("f", {"a": "<parameter=zzz>", "b": 3}),)


def test_a_function_closer_ends_the_value_only_when_no_parameter_closer_comes() -> None:
    text = xml("<parameter=a>\nx") + "\nDone."
    outcome = read("xml_function", text, [F])
    assert (outcome.calls, outcome.content) == ((("f", {"a": "x"}),), "\nDone.")
    # Inside a longer value it is data, so a value that was cut there is not taken for whole.
    outcome = read("xml_function", "<tool_call><function=f><parameter=a>see </function> in", [F])
    assert (outcome.calls, outcome.failed) == ((), True)


def test_a_repeated_parameter_keeps_its_last_value() -> None:
    text = xml("<parameter=a>1</parameter><parameter=a>2</parameter>")
    assert calls("xml_function", text) == (("f", {"a": "2"}),)


def test_a_function_without_wrapper_that_is_not_offered_is_text_with_its_closers() -> None:
    text = "Use <function=g>\n<parameter=a>\n1\n</parameter>\n</function> here."
    for tools in ([F], []):
        assert read("xml_function", text, tools).content == text


def test_zaya_names_functions_in_elements_too() -> None:
    text = (
        "<zyphra_tool_call><function>f</function><parameter><name>a</name><value>x</value>"
        "</parameter><parameter=b>4</parameter></zyphra_tool_call>"
    )
    assert calls("zaya_xml", text) == (("f", {"a": "x", "b": 4}),)


# -- DSML


def dsml(body: str, wrapper: str = "tool_calls", blank: str = "") -> str:
    return f"<｜DSML｜{blank}{wrapper}>{body}</｜DSML｜{blank}{wrapper}>"


def invoke(*parameters: str, name: str = "f", blank: str = "") -> str:
    inner = "".join(
        f"<｜DSML｜{blank}parameter {each}</｜DSML｜{blank}parameter>" for each in parameters
    )
    return f'<｜DSML｜{blank}invoke name="{name}">{inner}</｜DSML｜{blank}invoke>'


A = 'name="a" string="true">x'


@pytest.mark.parametrize(
    ("wrapper", "blank"),
    [("tool_calls", ""), ("function_calls", ""), ("calls", " "), ("toolcalls", ""), ("tool", "")],
)
def test_dsml_is_read_in_every_wrapper(wrapper: str, blank: str) -> None:
    assert calls("dsml", dsml(invoke(A, blank=blank), wrapper, blank)) == (("f", {"a": "x"}),)
    assert calls("nemotron", dsml(invoke(A, blank=blank), wrapper, blank)) == (("f", {"a": "x"}),)


@pytest.mark.parametrize(
    "body",
    [
        invoke(A, A),
        invoke(A) + invoke(),
        invoke(A) + invoke(A, name="g"),
        invoke(A, 'name="b" string="true">3'),
        invoke(A, 'name="b" string="false">3.5'),
        invoke(A, 'name="o" string="false">{"n": "1"}'),
        invoke(A, 'name="o" string="false">{"n": 1, "n": 2}'),
        invoke(A, 'name="zzz" string="false">1'),
        invoke(A, 'name="b" string="maybe">1'),
        invoke(A, "name='b' string=\"false\">1"),
        invoke(A, 'string="false" name="b">1'),
        invoke(A) + "text",
        invoke(A) + "<｜DSML｜invoke name=f>",
    ],
)
def test_one_fault_rejects_the_whole_dsml_envelope(body: str) -> None:
    outcome = read("dsml", f"Go. {dsml(body)} Done.", [F])
    assert (outcome.content, outcome.calls, outcome.failed) == ("Go.  Done.", (), True)


def test_dsml_without_its_outer_closer_is_no_call() -> None:
    outcome = read("dsml", dsml(invoke(A)).removesuffix("</｜DSML｜tool_calls>"), [F])
    assert (outcome.calls, outcome.failed) == ((), True)


# -- others


def test_glm_ignores_noise_between_tags_and_types_undeclared_arguments_loosely() -> None:
    text = (
        "<tool_call>f\\n\n<arg_key>a</arg_key>\\n<arg_value> x </arg_value>\n\\n"
        "<arg_key>z</arg_key><arg_value>[1, True]</arg_value></tool_call>"
    )
    assert calls("glm4", text) == (("f", {"a": "x", "z": [1, True]}),)
    cut = text.removesuffix("</tool_call>")
    assert read("glm4", cut, [F]).failed


def test_hunyuan_strips_the_answer_tags_and_reads_the_json_array() -> None:
    text = (
        "<think>\nhm\n</think>\n<answer>\nOk.\n</answer>"
        '<tool_calls>[{"name": "f", "arguments": {"a": "x"}}]</tool_calls>'
    )
    outcome = read("hunyuan", text, [F])
    assert (outcome.content.strip(), outcome.calls) == ("Ok.", (("f", {"a": "x"}),))
    mixed = "<tool_calls><tool_call>f<tool_sep:opensource></tool_call></tool_calls>"
    assert read("hunyuan", mixed, [F]).calls == ()


def test_deepseek_reads_both_layouts_under_either_name_and_bad_calls_apart() -> None:
    v3 = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "x"}\n```<｜tool▁call▁end｜>'
    v31 = '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "x"}<｜tool▁call▁end｜>'
    bad = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{a}<｜tool▁call▁end｜>"
    for family in ("deepseek_v3", "deepseek_v31"):
        assert calls(family, v3 + v31) == (("f", {"a": "x"}),) * 2
        outcome = read(family, f"<｜tool▁calls▁begin｜>{bad}{v3}<｜tool▁calls▁end｜>", [F])
        assert (outcome.calls, outcome.failed) == ((("f", {"a": "x"}),), True)


def test_mistral_reads_every_layout() -> None:
    one = {"a": "x"}
    for text in (
        '[TOOL_CALLS]f{"a": "x"}',
        '[TOOL_CALLS] f [ARGS] {"a": "x"}',
        '[TOOL_CALLS]{"name": "f", "arguments": {"a": "x"}}',
        '[TOOL_CALLS] [{"no": "name"}, {"name": "f", "arguments": {"a": "x"}}]',
        '[{"name": "f", "arguments": {"a": "x"}}]',
    ):
        assert calls("mistral", text) == (("f", one),), text
    prose = "The [TOOL_CALLS] marker is not [ARGS] and the [TOOL_CALLS] [x] is none."
    assert read("mistral", prose, [F]).content == prose
    text = 'Ok.\n[{"name": "f", "arguments": {}}]'
    assert read("mistral", text, [F]).content == text


def test_gemma_escapes_may_stand_around_every_value() -> None:
    text = (
        "<start_function_call>call:f{a:<escape>7<escape>,b:<escape>7<escape>,"
        "o:{n:<escape>1<escape>}}<end_function_call>"
    )
    assert calls("gemma", text) == (("f", {"a": "7", "b": 7, "o": {"n": 1}}),)


# -- harmony


def message(header: str, body: str, end: str = "<|end|>") -> str:
    return f"{header}<|message|>{body}{end}"


def test_harmony_rails_follow_the_headers() -> None:
    text = "<|start|>assistant".join(
        [
            message("<|channel|>analysis", "think "),
            message("<|channel|>analysis to=browser.search", "built-in ", "<|call|>"),
            message("<|channel|>commentary", "Preamble. "),
            message(" to=functions.f<|channel|>commentary json", '{"a": "x"}', "<|call|>"),
            message("<|channel|>final", "Answer <|odd|> <b>.", ""),
        ]
    )
    outcome = read("harmony", text, [F])
    assert outcome.reasoning == "think built-in "
    assert outcome.content == "Preamble. Answer <|odd|> <b>."
    assert outcome.calls == (("f", {"a": "x"}),)
    assert not outcome.unclosed


@pytest.mark.parametrize(
    "text",
    ["<|channel|>commentary to=functions.f<|message|>", "<|channel|>comm", "<|channel|>final<|mess",
     '<|channel|>commentary to=functions.f<|message|>{"a": "x', "<|start|>assistant<|channel|>"],
)  # fmt: skip
def test_a_cut_harmony_message_shows_no_protocol(text: str) -> None:
    outcome = read("harmony", text, [F])
    assert (outcome.content, outcome.reasoning, outcome.calls) == ("", "", ())


def test_a_broken_harmony_call_does_not_take_the_next_message_along() -> None:
    text = message("<|channel|>commentary to=functions.f", "{bad", "<|call|>") + message(
        "<|start|>assistant<|channel|>final", "Sorry.", ""
    )
    outcome = read("harmony", text, [F])
    assert (outcome.content, outcome.failed) == ("Sorry.", True)


def test_blanks_before_half_a_harmony_marker_keep_their_place() -> None:
    """`separate` checks that the pieces join to the text, in order."""
    outcome = read("harmony", "\n<|con", [F], thinking=True)
    assert (outcome.reasoning, outcome.content) == ("", "")


def test_text_without_any_harmony_header_is_content() -> None:
    assert read("harmony", "Hello there.", [F]).content == "Hello there."

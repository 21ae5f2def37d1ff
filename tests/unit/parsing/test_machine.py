"""The rules common to all formats: prose or call or broken, rails, blanks, orphans, holding."""

from __future__ import annotations

import pytest

from osaurus.parsing.machine import Machine
from osaurus.parsing.pieces import Rail
from osaurus.types.chat import Tool
from unit.parsing.transcripts import every, machine_for, read, separate

F = Tool(
    name="f",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
        "required": ["a"],
    },
)
CALL = '<tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call>'
GIVEN = (("f", {"a": "x"}),)


def released(family: str, text: str) -> str:
    """What has left the machine, on any rail, before the stream ends."""
    machine = machine_for(family, [F])
    return "".join(piece.text for piece in machine.push(text))


# -- openers


@pytest.mark.parametrize(
    "text",
    ["Write <tool_call> to call.", "<tool_call>{...}</tool_call>", "a <tool_call></tool_call> b",
     "<tool_call>[1, 2]</tool_call>", "<tool_call>" + " " * 300 + '{"name": "f"}'],
)  # fmt: skip
def test_an_opener_without_a_legal_body_is_prose_and_so_is_its_closer(text: str) -> None:
    outcome = read("json", text, [F])
    assert (outcome.content, outcome.calls, outcome.failed) == (text, (), False)


def test_only_the_closer_that_pairs_with_a_prose_opener_is_kept() -> None:
    text = "<tool_call> and </tool_call> and </tool_call>."
    assert read("json", text, [F]).content == "<tool_call> and </tool_call> and ."


def test_a_false_start_does_not_hide_the_marker_inside_it() -> None:
    assert read("json", "<" + CALL, [F]).calls == GIVEN
    assert read("json", "<tool_call>" + CALL, [F]).calls == GIVEN
    assert read("json", "<tool_" + CALL, [F]).content == "<tool_"


def test_a_lone_bracket_is_held_no_longer_than_it_may_be_a_marker() -> None:
    assert released("json", "a <") == "a "
    assert released("json", "a <t") == "a "
    assert released("json", "a <tx") == "a <tx"
    assert released("json", "a <tool_call> x") == "a <tool_call> x"
    assert released("bare_json", '{"city"') == '{"city"'
    assert released("bare_json", '{"name": "other"') == '{"name": "other"'
    assert released("bare_json", '{"name": "f", "x"') == '{"name": "f", "x"'


# -- broken envelopes


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('A <tool_call>{"name": "f", oops}</tool_call> B', "A  B"),
        ('A <tool_call>{"name": "f", oops} C', "A "),
        ('A <tool_call>{"name": "f", "arguments": [1]}</tool_call> B', "A  B"),
        ('A <tool_call>{"arguments": {}}</tool_call> B', "A  B"),
        ('A <tool_call>{"name": ""}</tool_call> B', "A  B"),
        ('A <tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "A "),
        ('A <tool_call>{"name": "f", "arguments": {"a": "x', "A "),
        ("A <tool_call>", "A "),
        ("A <tool_call>\n{", "A "),
    ],
)
def test_a_broken_envelope_shows_nothing_calls_nothing_and_is_reported(
    text: str, content: str
) -> None:
    outcome = read("json", text, [F])
    assert (outcome.content, outcome.calls, outcome.failed) == (content, (), True)


def test_a_failure_says_what_broke_without_quoting_it() -> None:
    machine = machine_for("json", [F])
    assert isinstance(machine, Machine)
    machine.push('<tool_call>{"name": "F", "arguments": {"a": "secret')
    machine.finish()
    (failure,) = machine.failures
    assert (failure.format, failure.name) == ("json", "f")
    assert failure.length == len('<tool_call>{"name": "F", "arguments": {"a": "secret')
    assert "secret" not in repr(failure)


def test_whole_calls_before_the_broken_one_stand() -> None:
    one = '{"name": "f", "arguments": {"a": "x"}}'
    outcome = read("json", f'<tool_call>[{one}, {{"name": "f", "argu', [F])
    assert (outcome.calls, outcome.failed) == (GIVEN, True)
    bad, good = (
        f"<|tool_call_begin|>functions.f:{n}<|tool_call_argument_begin|>{body}<|tool_call_end|>"
        for n, body in enumerate(("{bad}", '{"a": "x"}'))
    )
    section = f"<|tool_calls_section_begin|>{bad}{good}<|tool_calls_section_end|>Done."
    outcome = read("kimi_k2", section, [F])
    assert (outcome.calls, outcome.content, outcome.failed) == (GIVEN, "Done.", True)


def test_without_offered_tools_a_broken_call_is_no_failure() -> None:
    outcome = read("json", 'A <tool_call>{"name": "f", "argu', ())
    assert (outcome.content, outcome.failed) == ("A ", False)


# -- text around envelopes


def test_blanks_that_touch_a_call_are_no_content_and_all_others_are() -> None:
    assert read("json", f"\n\n{CALL}\n{CALL}\n", [F]).content == ""
    assert read("json", f" a \n{CALL}\n b \n", [F]).content == " a \n\n b \n"
    assert read("json", " \n ", [F]).content == " \n "
    assert read("json", f"<think>t</think>\n\n{CALL}", [F]).content == ""
    assert read("json", "<think>t</think>\n\nhi", [F]).content == "\n\nhi"


def test_endless_blanks_are_not_held_for_ever() -> None:
    assert len(released("json", CALL + "\n" * 5000)) >= 5000


def test_an_orphan_closer_goes_and_other_tags_stay() -> None:
    text = "Done.</parameter></function></tool_call> And </div></tool_calls>."
    assert read("xml_function", text, [F]).content == "Done. And </div></tool_calls>."
    assert read("xml_function", text, ()).content == "Done. And </div></tool_calls>."
    assert read("json", "x</function>", [F]).content == "x</function>"


@pytest.mark.parametrize(
    ("tail", "shown"),
    [("<tool_c", ""), ("</tool", ""), ("<too", "<too"), ("<thin", "<thin"), ("</think", "</think")],
)
def test_half_a_marker_at_the_end(tail: str, shown: str) -> None:
    assert read("json", "Hi " + tail, [F]).content == "Hi " + shown


# -- reasoning


def test_nothing_nests_and_stray_tags_are_consumed() -> None:
    outcome = read("json", "<think>a <think> b</think> c </think> d", [F])
    assert (outcome.reasoning, outcome.content) == ("a  b", " c  d")


def test_a_block_of_blanks_is_no_reasoning() -> None:
    machine = machine_for("json", [F])
    pieces = [*machine.push("<think>\n"), *machine.push("\n</think>ok"), *machine.finish()]
    assert all(piece.rail is not Rail.REASONING for piece in pieces)


def test_a_call_inside_an_open_block_is_taken_and_the_block_stays_open() -> None:
    outcome = read("json", f"need it {CALL} now", [F], thinking=True)
    assert (outcome.reasoning, outcome.calls, outcome.unclosed) == ("need it  now", GIVEN, True)


@pytest.mark.parametrize(
    "inside",
    ['<tool_call>{"name": "g", "arguments": {}}</tool_call>', '<tool_call>{"name": "f"',
     '<tool_call>{"name": "f", "arguments": {"a": "x"}}', "<tool_call>", "<tool_call>{bad}",
     '<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>', '{"name": "f", "arguments": {}}',
     "a</tool_call>b"],
)  # fmt: skip
def test_less_than_a_whole_offered_envelope_inside_a_block_is_thinking(inside: str) -> None:
    outcome = read("json", f"{inside}</think>ok", [F], thinking=True)
    assert (outcome.reasoning, outcome.content) == (inside, "ok")
    assert (outcome.calls, outcome.failed) == ((), False)


def test_the_first_closer_ends_the_block_also_inside_a_string() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "</think>"}}</tool_call>'
    outcome = read("json", text, [F], thinking=True)
    assert outcome.reasoning == '<tool_call>{"name": "f", "arguments": {"a": "'
    assert outcome.calls == ()


def test_without_offered_tools_thinking_is_left_alone() -> None:
    assert read("json", f"see {CALL}</think>ok", (), thinking=True).reasoning == f"see {CALL}"


def test_think_tags_in_a_family_without_reasoning_are_text() -> None:
    assert read("llama3", "a <think>b</think>", [F]).content == "a <think>b</think>"


def test_both_spellings_of_hunyuan_are_known_and_the_longer_wins() -> None:
    for opener, closer in (("<think>", "</think:opensource>"), ("<think:opensource>", "</think>")):
        for size in (1, 4, 99):
            outcome = separate(machine_for("hunyuan", [F]), every(f"{opener}a{closer}b", size))
            assert (outcome.reasoning, outcome.content) == ("a", "b")


@pytest.mark.parametrize("name", ["thought", "analysis", ""])
def test_a_channel_s_name_line_is_no_thought(name: str) -> None:
    text = f"<|channel>{name}\nhm<channel|>ok"
    outcome = read("gemma4", text, [F])
    assert (outcome.reasoning, outcome.content) == ("hm", "ok")
    assert read("gemma4", f"<|channel>{name}", [F]).reasoning == ""
    assert read("gemma4", "<|channel>no name line<channel|>", [F]).reasoning == "no name line"


def test_granite_sentences_count_only_at_the_start() -> None:
    sentence = "Here's my thought process: hm. Here's my response: ok"
    outcome = read("granite", f"\n{sentence}", [F])
    assert (outcome.reasoning, outcome.content) == (" hm. ", " ok")
    assert read("granite", f"I say: {sentence}", [F]).content == f"I say: {sentence}"
    assert read("granite", "Here's my thought pro", [F]).content == "Here's my thought pro"


# -- names


def test_names_are_trimmed_matched_by_case_and_otherwise_forwarded() -> None:
    def named(name: str) -> str:
        text = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
        return read("json", text, [F]).calls[0][0]

    assert named(" F ") == "f"
    assert named("unknown-tool") == "unknown-tool"


def test_kimi_ids_are_kept_and_mistral_s_are_nine_characters() -> None:
    def ids(family: str, text: str) -> list[str | None]:
        machine = machine_for(family, [F])
        pieces = [*machine.push(text), *machine.finish()]
        return [call.call_id for piece in pieces for call in piece.calls]

    kimi = "<|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert ids("kimi_k2", kimi) == ["functions.f:7"]
    assert ids("mistral", "[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{}") == ["a1b2c3d4e"]
    (generated,) = ids("mistral", "[TOOL_CALLS]f[CALL_ID]no[ARGS]{}")
    assert generated is not None
    assert len(generated) == 9
    assert generated.isalnum()
    (usual,) = ids("json", CALL)
    assert usual is not None
    assert usual.startswith("call_")
    assert len(usual) == 29


# -- fences


@pytest.mark.parametrize("fence", ["```", "````", "~~~"])
def test_markup_in_a_fence_is_text_only_when_no_tools_were_offered(fence: str) -> None:
    text = f"See:\n{fence}xml\n{CALL}\n</tool_call>\n{fence}\n{CALL}."
    assert read("json", text, ()).content == text.removesuffix(f"{CALL}.") + "."
    assert read("json", text, [F]).calls == GIVEN * 2


def test_three_backticks_inside_a_line_open_no_fence() -> None:
    assert read("json", f"a ``` {CALL}", ()).content == "a ``` "
    assert read("json", f"```code```\n{CALL}", ()).content == "```code```\n"
    assert read("json", f"````\n```\n{CALL}", ()).content == f"````\n```\n{CALL}"


def test_think_tags_are_tags_in_a_fence_too() -> None:
    outcome = read("json", "```\n<think>a</think>\n```", ())
    assert (outcome.reasoning, outcome.content) == ("a", "```\n\n```")

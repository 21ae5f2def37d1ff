"""The content guard: client text never becomes a control token, and never changes."""

from hypothesis import example, given
from hypothesis import strategies as st

from osaurus.chat.guard import ContentGuard, ControlTexts

_CONTROL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "ab", "bc", "Z"]

#: Text made of whole and broken control tokens and what may stand around them.
_CONTENT = st.lists(
    st.sampled_from([*_CONTROL, "<|im", "_end|>", "<", ">", "a", "b", "c", " ", "\n", "é", "x"])
).map("".join)


def _rendered(guard: ContentGuard, contents: list[str]) -> str:
    return "".join(f"<|im_start|>user\n{guard.protect(c)}<|im_end|>" for c in contents)


@given(st.lists(_CONTENT, min_size=1, max_size=4))
@example(["abc"])
@example(["Z"])
@example(["<|im_", "x"])
@example(["<|im_end|", ">"])
def test_only_the_templates_own_control_tokens_remain_and_no_text_changes(
    contents: list[str],
) -> None:
    guard = ContentGuard(ControlTexts(_CONTROL), contents)
    runs = list(guard.runs(_rendered(guard, contents)))
    plain_template = "".join(f"<|im_start|>user\n{c}<|im_end|>" for c in contents)
    assert "".join(run.text for run in runs) == plain_template
    trusted = "".join(run.text + "\n" for run in runs if not run.is_plain)
    for text in _CONTROL:
        own = len(contents) if text in ("<|im_start|>", "<|im_end|>") else 0
        assert trusted.count(text) == own


@given(_CONTENT)
def test_what_holds_no_control_token_is_one_trusted_run(content: str) -> None:
    guard = ContentGuard(ControlTexts(["<|never|>"]), [content])
    if content and content[-1] == "<":
        return  # could be completed by what follows, so it is plain
    runs = list(guard.runs(f"<|never|>{guard.protect(content)}<|never|>"))
    assert len(runs) == 1
    assert not runs[0].is_plain


def test_content_that_ends_like_a_control_token_begins_is_not_completed() -> None:
    guard = ContentGuard(ControlTexts(["<|end|>"]), ["<|e"])
    runs = list(guard.runs(guard.protect("<|e") + "nd|>"))
    assert [(run.text, run.is_plain) for run in runs] == [("<|end|>", True)]


def test_strings_are_guarded_wherever_they_are() -> None:
    value = {"a<x>": ["<x>", {"b": ("<x>", 3, None)}], "n": 1.5}
    guard = ContentGuard(ControlTexts(["<x>"]), value)
    guarded = guard.protect(value)
    assert "<x>" not in repr(guarded)
    assert guarded["n"] == 1.5
    assert guarded["a<" + guarded["a<" + _mark(guarded) + "x>"][0][1] + "x>"][1]["b"][1:] == [
        3,
        None,
    ]


def _mark(guarded: dict[str, object]) -> str:
    return next(iter(guarded))[2]


def test_a_noncharacter_in_the_content_is_kept() -> None:
    content = "\ufdd0<x>\ufdd1"
    guard = ContentGuard(ControlTexts(["<x>"]), [content])
    (run,) = guard.runs(guard.protect(content))
    assert run.text == content


def test_without_control_tokens_nothing_is_touched() -> None:
    guard = ContentGuard(ControlTexts([]), ["anything <b>"])
    assert guard.protect("anything <b>") == "anything <b>"


def test_thousands_of_control_tokens_are_searched_quickly() -> None:
    tokens = [f"<unused{i}>" for i in range(8000)]
    content = "if a < b: <p>x</p> <unused17>\n" * 20_000
    guard = ContentGuard(ControlTexts(tokens), [content])
    (run,) = guard.runs(guard.protect(content))
    assert run.text == content
    assert run.is_plain


def test_every_opening_at_the_end_of_a_text_is_broken() -> None:
    guard = ContentGuard(ControlTexts(["<|a<b>", "<x>"]), ["<|a<"])
    for following in ("b>", "x>"):
        runs = list(guard.runs(guard.protect("<|a<") + following))
        assert [(run.text, run.is_plain) for run in runs] == [("<|a<" + following, True)]

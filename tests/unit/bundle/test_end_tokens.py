"""Field case F53: what ends an answer is the union of what every file says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from osaurus.bundle.bundle import Bundle, open_bundle
from osaurus.bundle.end_tokens import END_TOKEN_TEXTS, declared_ids
from unit.bundle.made import byte_level_tokenizer, gguf_metadata, write_folder, write_gguf

QUIET = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


def bundle_with(
    folder: Path,
    *,
    config: Any = None,
    generation: Any = None,
    added: tuple[str | AddedToken, ...] = ("<a>", "<b>", "<c>", "<d>"),
    template: str = QUIET,
    **tokenizer_config: Any,
) -> Bundle:
    """Ids 265, 266, ... are the added tokens in their order."""
    settings = {"chat_template": template, "eos_token": None, **tokenizer_config}
    write_folder(
        folder,
        config={"eos_token_id": config},
        tokenizer_config=settings,
        backend=byte_level_tokenizer(added),
    )
    if generation is not None:
        text = json.dumps({"eos_token_id": generation})
        (folder / "generation_config.json").write_text(text)
    return open_bundle(folder)


@pytest.mark.parametrize(
    ("config", "generation", "eos_token", "ends"),
    [
        (256, [258, 256], "<b>", {256, 258, 266}),
        (256, None, None, {256}),
        (None, [258, 256], None, {256, 258}),
        (None, None, "<b>", {266}),
        ([5, 6], 7, "<b>", {5, 6, 7, 266}),
        (None, None, None, set()),
    ],
)
def test_f53_the_stop_set_is_the_union_of_what_the_files_name(
    tmp_path: Path, config: Any, generation: Any, eos_token: str | None, ends: set[int]
) -> None:
    bundle = bundle_with(tmp_path, config=config, generation=generation, eos_token=eos_token)
    assert bundle.eos_token_ids == ends


def test_f53_a_turn_end_known_to_the_template_only_is_found(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<a>{{ m.role }}: {{ m.content }} "
        "{% if m.role == 'assistant' %}<d>{% else %}<b>{% endif %}\n{% endfor %}"
    )
    assert bundle_with(tmp_path, template=template).eos_token_ids == {268}


def test_f53_null_missing_and_foreign_entries_are_skipped() -> None:
    assert declared_ids(None, [None, 3, "x", True, -1, 2.0], "7", {}, 4) == {3, 4}


@pytest.mark.parametrize("text", END_TOKEN_TEXTS)
def test_a_known_end_token_counts_although_no_file_declares_it(tmp_path: Path, text: str) -> None:
    assert bundle_with(tmp_path, config=3, added=("<a>", text)).eos_token_ids == {3, 266}


def test_a_nested_text_config_is_read_too(tmp_path: Path) -> None:
    write_folder(
        tmp_path,
        config={"eos_token_id": None, "text_config": {"eos_token_id": [9]}},
        tokenizer_config={"eos_token": None, "chat_template": QUIET},
        backend=byte_level_tokenizer(["<a>"]),
    )
    assert open_bundle(tmp_path).eos_token_ids == {9}


def test_the_unknown_token_ends_an_answer(tmp_path: Path) -> None:
    assert bundle_with(tmp_path, unk_token="<c>").eos_token_ids == {267}


HARMONY = ("<|channel|>", "<|message|>", "<|return|>", "<|end|>")


@pytest.mark.parametrize(
    ("declared", "ends"), [(267, {267}), (268, {268}), (None, {268}), ([267, 268], {267, 268})]
)
def test_a_channel_separator_ends_an_answer_only_where_the_bundle_says_so(
    tmp_path: Path, declared: Any, ends: set[int]
) -> None:
    assert bundle_with(tmp_path, config=declared, added=HARMONY).eos_token_ids == ends


def test_a_template_that_refuses_the_probe_costs_nothing_but_its_hint(tmp_path: Path) -> None:
    template = "{{ raise_exception('system message first') }}"
    assert bundle_with(tmp_path, config=3, template=template).eos_token_ids == {3}


def test_the_default_model_stops_at_its_turn_end_and_its_text_end(
    default_model_bundle: Bundle,
) -> None:
    assert default_model_bundle.eos_token_ids == {0, 2}


def test_a_gguf_reads_its_ends_from_metadata_vocabulary_and_template(tmp_path: Path) -> None:
    metadata = gguf_metadata(eos_token_id=None, bos_token_id=None)
    bundle = open_bundle(write_gguf(tmp_path / "x.gguf", metadata))
    assert bundle.eos_token_ids == {0, 2}


def test_an_end_that_the_vocabulary_has_no_id_for_becomes_a_stop_text(tmp_path: Path) -> None:
    bundle = bundle_with(tmp_path, config=3, eos_token="<nowhere>")
    assert bundle.eos_token_ids == {3}
    assert bundle.stop_strings == ("<nowhere>",)


def test_configured_stop_strings_are_kept_and_built_in_ones_are_not_added(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    bundle_with(folder, generation=3)
    text = json.dumps({"stop_strings": ["User:", "", 5, "User:"]})
    (folder / "generation_config.json").write_text(text)
    assert open_bundle(folder).stop_strings == ("User:",)


def test_an_end_of_sentence_that_only_the_template_knows_stops_as_text(tmp_path: Path) -> None:
    template = QUIET + "{# <｜end▁of▁sentence｜> #}"
    assert bundle_with(tmp_path, template=template).stop_strings == (
        "<｜end▁of▁sentence｜>",
        "<｜end▁of▁sentence>",
        "<｜end▁of▁sent",
    )

"""Claim: two caches share a key exactly when everything that shapes keys and values is equal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osaurus.cache.key import (
    ROOT,
    ModelKey,
    block_digest,
    framed_digest,
    generated_digest,
    namespace_of,
    policy_salt,
)
from osaurus.cache.sequence import CachedSequence
from osaurus.types.cache import CacheHints, KVMode

KEY = ModelKey(identity="a/b@1", dtype="bfloat16", topology="t", block_tokens=32)
POLICY = policy_salt(KVMode("none"), None)


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_bytes_of_one_field_never_pose_as_anothers(a: list[bytes], b: list[bytes]) -> None:
    assert (framed_digest("d", *a) == framed_digest("d", *b)) == (a == b)


def test_an_absent_field_is_not_an_empty_one() -> None:
    assert framed_digest("d", None) != framed_digest("d", b"")


@pytest.mark.parametrize(
    "other",
    [
        replace(KEY, identity="a/b@2"),
        replace(KEY, dtype="float32"),
        replace(KEY, topology="u"),
        replace(KEY, block_tokens=16),
        replace(KEY, overrides=("moe_topk=4",)),
    ],
)
def test_every_part_of_the_model_key_counts(other: ModelKey) -> None:
    assert namespace_of(other, CacheHints(), POLICY) != namespace_of(KEY, CacheHints(), POLICY)


def test_every_salt_counts() -> None:
    spaces = {
        namespace_of(KEY, hints, policy)
        for hints in (
            CacheHints(),
            CacheHints(scope_salt="reasoning=on"),
            CacheHints(media_salt=b""),
            CacheHints(media_salt=b"\0" * 32),
        )
        for policy in (POLICY, policy_salt(KVMode("turbo", 3, 3), None), policy_salt(KVMode(), 64))
    }
    assert len(spaces) == 12


def test_overrides_have_no_order() -> None:
    assert str(replace(KEY, overrides=("a", "b"))) == str(replace(KEY, overrides=("b", "a")))


def test_a_block_is_keyed_by_everything_before_it() -> None:
    space = namespace_of(KEY, CacheHints(), POLICY)
    first = block_digest(space, ROOT, [1, 2])
    assert block_digest(space, first, [3, 4]) != block_digest(space, ROOT, [3, 4])
    assert block_digest(space, ROOT, [1, 2]) == first
    assert generated_digest(first) != first


def _sequence(tokens: list[int], prompt: int) -> CachedSequence:
    sequence = CachedSequence(
        namespace=bytes(32), serial=1, block_tokens=4, prompt_tokens=prompt, exact_until=prompt - 1
    )
    sequence.extend(tokens)
    return sequence


@given(st.lists(st.integers(0, 2**31), max_size=40), st.integers(0, 40))
def test_chains_agree_exactly_as_far_as_the_tokens_do(tokens: list[int], cut: int) -> None:
    other = tokens[:cut] + [token + 1 for token in tokens[cut:]]
    same = min(cut, len(tokens)) // 4
    one, two = _sequence(tokens, len(tokens) + 1), _sequence(other, len(tokens) + 1)
    assert len(one.digests) == len(tokens) // 4
    assert one.digests[:same] == two.digests[:same]
    assert set(one.digests[same:]).isdisjoint(two.digests[same:])


def test_a_block_that_decoding_reached_has_the_other_key() -> None:
    """Prompt of 9 tokens: 8 are prefilled, so blocks 0 and 1 are exact and 2 is not."""
    sequence = _sequence(list(range(12)), 9)
    assert [sequence.own_key(i) == sequence.exact_key(i) for i in range(3)] == [True, True, False]
    assert [sequence.is_answer(i) for i in range(3)] == [False, False, True]

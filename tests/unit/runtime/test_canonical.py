"""Canonical JSON: one spelling for equal values, refusal for what has none."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osaurus.runtime.canonical import canonical_json

_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(_VALUES)
def test_canonical_text_reads_back_as_the_same_value(value: object) -> None:
    assert json.loads(canonical_json(value)) == value


def test_the_order_of_keys_does_not_matter() -> None:
    assert canonical_json({"b": [1, 2.5], "a": {"d": None, "c": "é"}}) == (
        '{"a":{"c":"é","d":null},"b":[1,2.5]}'
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, [-math.inf], {"a": math.nan}])
def test_numbers_that_json_lacks_are_refused(value: object) -> None:
    with pytest.raises(ValueError):
        canonical_json(value)


@pytest.mark.parametrize("value", [{1: "a"}, {"a": [{None: 1}]}, {"a": object()}])
def test_keys_and_values_that_json_lacks_are_refused(value: object) -> None:
    with pytest.raises(TypeError):
        canonical_json(value)

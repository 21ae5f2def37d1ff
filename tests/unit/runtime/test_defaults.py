"""A bundle's sampling values: taken when right, left out with a warning when not."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from osaurus.runtime.defaults import bundle_sampling, sampling_defaults


def test_the_bundles_values_are_taken_by_name() -> None:
    config = {"temperature": 0.7, "top_p": 0.8, "top_k": 20.0, "repetition_penalty": 1.05}
    assert sampling_defaults(config, "m") == config


def test_a_bundle_that_does_not_sample_is_greedy() -> None:
    assert sampling_defaults({"do_sample": False, "temperature": 0.7}, "m")["temperature"] == 0
    assert "temperature" not in sampling_defaults({"do_sample": True}, "m")


@pytest.mark.parametrize("bad", [{"temperature": "hot"}, {"top_p": 3}, {"top_k": 1.5}])
def test_a_wrong_value_is_left_out_with_a_warning(
    bad: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert sampling_defaults({**bad, "min_p": 0.1}, "m") == {"min_p": 0.1}
    assert next(iter(bad)) in caplog.text


def test_length_limits_of_a_bundle_are_not_sampling() -> None:
    assert sampling_defaults({"max_new_tokens": 32, "max_length": 20}, "m") == {}


def test_the_makers_own_values_win_and_the_files_fill_the_gaps(tmp_path: Path) -> None:
    bundle = SimpleNamespace(
        model_id="m", path=tmp_path, generation_config={"temperature": 0.7, "top_k": 20}
    )
    assert bundle_sampling(bundle) == {"temperature": 0.7, "top_k": 20}
    own = {"chat": {"sampling_defaults": {"temperature": 1.0, "top_p": 0.95, "min_p": 9}}}
    (tmp_path / "jang_config.json").write_text(json.dumps(own))
    assert bundle_sampling(bundle) == {"temperature": 1.0, "top_p": 0.95, "top_k": 20}
    for wrong in ({"chat": 1}, {"chat": {"sampling_defaults": []}}):
        (tmp_path / "jang_config.json").write_text(json.dumps(wrong))
        assert bundle_sampling(bundle) == {"temperature": 0.7, "top_k": 20}

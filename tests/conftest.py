"""Fixtures that many rooms share: the real default model, found as the product finds it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from osaurus.bundle.bundle import Bundle, open_bundle
from osaurus.bundle.hub import find_model
from osaurus.engine.core import BatchEngine
from osaurus.errors import ModelNotFound
from osaurus.models.base import Model
from osaurus.models.registry import load_model
from osaurus.types.engine import EngineConfig


@pytest.fixture(scope="session")
def default_bundle() -> Bundle:
    try:
        listing = find_model("default")
    except ModelNotFound as error:
        pytest.fail(f"{error.message}; these tests need it: osaurus pull default")
    return open_bundle(listing.path, listing.model_id)


@pytest.fixture(scope="session")
def default_model(default_bundle: Bundle) -> Model:
    """The shipped mode: packed weights, bfloat16 activations."""
    return load_model(default_bundle, compute_mode="bfloat16")


@pytest.fixture(scope="session")
def default_model_float32(default_bundle: Bundle) -> Model:
    return load_model(default_bundle, compute_mode="float32")


@pytest.fixture
def default_engine(default_model: Model, default_bundle: Bundle) -> Iterator[BatchEngine]:
    """A fresh engine over the shared weights; leaves no block held behind."""
    engine = BatchEngine(
        default_model, EngineConfig(), token_bytes=default_bundle.load_tokenizer().token_bytes
    )
    yield engine
    engine.shutdown()
    engine.check()
    assert engine.pool.used_bytes == 0

"""The real default model, found as the product finds it, for the tests of this room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from osaurus.bundle.bundle import Bundle, open_bundle
from osaurus.bundle.hub import ModelListing, find_model
from osaurus.errors import ModelNotFound

GOLDEN = Path(__file__).parents[2] / "golden" / "bundle"


@pytest.fixture(scope="session")
def default_listing() -> ModelListing:
    try:
        return find_model("default")
    except ModelNotFound as error:
        pytest.fail(f"{error.message}; these tests need it: osaurus pull default")


@pytest.fixture(scope="session")
def default_model_path(default_listing: ModelListing) -> Path:
    return default_listing.path


@pytest.fixture(scope="session")
def default_model_bundle(default_listing: ModelListing) -> Bundle:
    return open_bundle(default_listing.path, default_listing.model_id)


@pytest.fixture(scope="session")
def golden() -> Any:
    """Reads expected ids that other programs computed; each file says which."""

    def read(name: str) -> Any:
        return json.loads((GOLDEN / name).read_text())

    return read

"""What the settings come to for a model that is not loaded: its meta for the rows, its memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from osaurus.bundle.bundle import open_bundle
from osaurus.bundle.hub import find_model
from osaurus.runtime.configure import load_options
from osaurus.runtime.defaults import bundle_sampling
from osaurus.runtime.load import resolve_device
from osaurus.runtime.memory import LoadPlan
from osaurus.runtime.plan import plan_of
from osaurus.settings.load import Settings
from osaurus.settings.render import ModelMeta
from osaurus.settings.store import SettingsStore


def meta_of(name: str, settings: Settings) -> ModelMeta:
    """Raises `ModelNotFound` or what is wrong with the bundle."""
    listing = find_model(name)
    bundle = open_bundle(listing.path, listing.model_id)
    options = load_options(settings)
    plan = plan_of(bundle, options, resolve_device(options.device))
    return ModelMeta(
        model_id=bundle.model_id,
        has_pool=has_pool(bundle.config),
        sampling=bundle_sampling(bundle),
        memory=plan.summary,
        capacity=options.engine.max_batch_size,
    )


def memory_plan(bundle: Any) -> LoadPlan:
    """Of a bundle with the settings of this machine."""
    options = load_options(SettingsStore().load())
    return plan_of(bundle, options, resolve_device(options.device))


def has_pool(config: Mapping[str, Any]) -> bool:
    """Whether layers keep compressed pools, as DeepSeek V4's do."""
    return bool(config.get("compress_ratios")) or config.get("model_type") == "deepseek_v4"

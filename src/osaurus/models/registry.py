"""From a bundle to its network: a family's own or transformers'."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from osaurus.errors import BundleError
from osaurus.kernels.openmp import one_thread, release_team
from osaurus.models.base import Model
from osaurus.models.families import FAMILIES
from osaurus.models.loading import ComputeMode, ShapeLoader, WeightLoader
from osaurus.quant.schemes import read_schemes
from osaurus.types.weights import QuantizeOnLoad

if TYPE_CHECKING:
    from osaurus.bundle.bundle import Bundle
    from osaurus.bundle.weights import WeightSource

#: Below it the kernels of a load are so short that a team gains nothing, and takes ten times as
#: long as one thread when another program uses its cores.
_SMALL_BUNDLE_BYTES = 512 << 20


def load_model(
    bundle: Bundle,
    *,
    compute_mode: ComputeMode,
    device: str = "cpu",
    on_load: QuantizeOnLoad | None = None,
) -> Model:
    """Read a bundle's weights into its family's network.

    Raises `UnsupportedBundle` for a model_type that neither a family nor transformers serves
    and `IncompleteBundle` for missing tensors; nothing of the bundle stays mapped afterwards.
    """
    is_small = bundle.size_bytes < _SMALL_BUNDLE_BYTES
    try:
        with (
            one_thread() if is_small else nullcontext(),
            closing(bundle.open_weights()) as source,
        ):
            return build(bundle.config, source, compute_mode, device, on_load=on_load)
    except BundleError as error:
        if str(bundle.path) in error.message or bundle.model_id in error.message:
            raise
        raise type(error)(f"{bundle.model_id}: {error.message}") from None
    finally:
        release_team()  # the engine computes on a thread of its own


def build(
    config: Mapping[str, Any],
    source: WeightSource,
    mode: ComputeMode,
    device: str = "cpu",
    *,
    on_load: QuantizeOnLoad | None = None,
) -> Model:
    """The network of a config: that of its family in `FAMILIES`, else transformers' own.

    A family's names, shapes and types of all tensors are checked before the first is read.
    """
    model_type = str(config.get("model_type", ""))
    if model_type not in FAMILIES:
        route = import_module("osaurus.models.transformers_route")
        routed: Model = route.build(config, source, mode, device, on_load=on_load)
        return routed
    family = import_module(f"osaurus.models.{FAMILIES[model_type]}")
    schemes = read_schemes(config)
    check = ShapeLoader(source, mode, schemes)
    family.load(config, check)
    check.finish()
    loader = WeightLoader(source, mode, device, schemes=schemes, on_load=on_load)
    model: Model = family.load(config, loader)
    loader.finish()
    return model

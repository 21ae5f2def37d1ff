"""Any causal LM that transformers defines, for what has no family of its own here.

The only module that imports transformers, and only when such a model is loaded. In: a config
and its weights. Out: a `Model`. Nothing is known of any architecture: what a layer remembers
is learnt by a probe, and what the route computes is compared with the model's own forward
before it serves anybody.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from osaurus.errors import BundleError, UnsupportedBundle
from osaurus.models.loading import ComputeMode, WeightLoader
from osaurus.models.stored import as_parts
from osaurus.models.transformers_attention import (
    Probe,
    attention_function,
    during,
    mask_function,
)
from osaurus.models.transformers_check import own_forward
from osaurus.models.transformers_experts import experts_function
from osaurus.models.transformers_model import (
    Learnt,
    NetworkCall,
    RowsModel,
    TransformersModel,
)
from osaurus.models.transformers_own_cache import OwnCaches, learn_own_cache
from osaurus.models.transformers_single import SingleSlotModel
from osaurus.models.transformers_stacks import Rename, Renamed
from osaurus.models.transformers_state import learn_states, shorten_scans
from osaurus.models.transformers_weights import WeightMap, check_loaded, freeze, install
from osaurus.quant.schemes import read_schemes
from osaurus.topology.base import AttentionTopology, LayerTopology
from osaurus.topology.composite import CompositeTopology, NoMemory
from osaurus.types.weights import QuantizeOnLoad

if TYPE_CHECKING:
    from osaurus.bundle.weights import WeightSource

_log = logging.getLogger(__name__)

#: Names in transformers' registries. The second one also has masks made, to learn from them.
_NAME, _PROBE_NAME = "osaurus", "osaurus_probe"
#: The form of attention that every architecture has and that leaves nothing out.
_EAGER = "eager"
#: The context of a model whose config states none: state alone has no limit.
_UNSTATED_CONTEXT = 32768
_NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"


def build(
    config: Mapping[str, Any],
    source: WeightSource,
    mode: ComputeMode,
    device: str = "cpu",
    *,
    on_load: QuantizeOnLoad | None = None,
) -> TransformersModel:
    """The model of a config whose `model_type` transformers knows.

    Raises `UnsupportedBundle` for one that it does not know, that needs code from its
    repository, or whose layers keep what the route cannot.
    """
    transformers = _import(config)
    with _quiet(transformers):
        has_head = any(name.endswith("lm_head.weight") for name in source.names())
        cls, parsed = _class_of(transformers, config, has_head)
        network, nbytes = _load(cls, parsed, config, source, mode, device, on_load)
        _register(transformers)
        common = {
            "max_context_tokens": _context(network.config),
            "kv_dtype": torch.float32 if mode == "float32" else torch.bfloat16,
            "nbytes": nbytes,
        }
        return _served(transformers, NetworkCall(network), common)


def class_name(config: Mapping[str, Any]) -> str:
    """The class that would serve a config. Raises `UnsupportedBundle` where there is none."""
    return str(_class_of(_import(config), config, has_head=True)[0].__name__)


def _served(transformers: Any, call: NetworkCall, common: dict[str, Any]) -> TransformersModel:
    """The first form in which the model says what its own forward says."""
    name = type(call.network).__name__
    _use(call.network, _EAGER)
    with _named(name):
        expected = own_forward(call)
    try:
        with _named(name):
            model = _rows_model(transformers, call, common)
            expected.check(model)
        return model
    except UnsupportedBundle as first:
        try:
            with _named(name):
                single = _single_slot_model(transformers, call, common)
                expected.check(single)
            _log.info("%s; it runs with its own cache, one slot a forward", first.message)
            return single
        except UnsupportedBundle as second:
            raise UnsupportedBundle(
                f"{first.message}; with its own cache: {second.message.removeprefix(f'{name}: ')}"
            ) from None


def _rows_model(transformers: Any, call: NetworkCall, common: dict[str, Any]) -> RowsModel:
    _use(call.network, _PROBE_NAME)
    new_cache = _rows_cache(transformers, call.network.config)
    learnt = _learn(call, new_cache)
    _use(call.network, _NAME)
    return RowsModel(call, learnt, new_cache, **common)


def _single_slot_model(
    transformers: Any, call: NetworkCall, common: dict[str, Any]
) -> SingleSlotModel:
    _use(call.network, _EAGER)
    config = call.network.config

    def new_cache() -> Any:
        return transformers.DynamicCache(config=config)

    cache, fed = new_cache(), 0

    def feed(count: int) -> None:
        nonlocal fed
        places = torch.arange(fed, fed + count, device=call.network.device).unsqueeze(0)
        call(
            {"input_ids": places % common["max_context_tokens"] % 251, "position_ids": places},
            cache,
        )
        fed += count

    with torch.inference_mode():
        layers = learn_own_cache(cache, feed)
    return SingleSlotModel(call, OwnCaches(layers, new_cache), **common)


@contextmanager
def _named(name: str) -> Generator[None]:
    """Whatever a network's code raises becomes one line that names its class."""
    try:
        yield
    except BundleError as error:
        raise type(error)(f"{name}: {error.message}") from None
    except Exception as error:
        raise UnsupportedBundle(f"{name}: its code cannot run this way: {_line(error)}") from error


def _import(config: Mapping[str, Any]) -> Any:
    model_type = config.get("model_type")
    try:
        import transformers
    except ImportError:
        raise UnsupportedBundle(
            f"model_type {model_type!r} has no family here, and transformers, which may define it, "
            "is not installed: pip install 'osaurus[transformers]'"
        ) from None
    return transformers


def _class_of(transformers: Any, config: Mapping[str, Any], has_head: bool) -> tuple[Any, Any]:
    """The class of the text model and its config. `has_head`: a head is stored."""
    model_type = str(config.get("model_type", ""))
    where = f"transformers {transformers.__version__}"
    known = transformers.CONFIG_MAPPING
    if model_type not in known:
        if config.get("auto_map"):
            raise UnsupportedBundle(
                f"model_type {model_type!r} needs Python code from its repository (auto_map in "
                f"config.json), and code of a bundle is never run; {where} does not define it"
            )
        raise UnsupportedBundle(
            f"model_type {model_type!r} is not served: neither a family here nor {where} defines it"
        )
    plain = {
        name: _plain(value)
        for name, value in config.items()
        if name not in ("auto_map", "quantization", "quantization_config", "torch_dtype", "dtype")
    }
    try:
        parsed = known[model_type].from_dict(plain)
    except Exception as error:  # noqa: BLE001 - its message says which field it is
        raise UnsupportedBundle(f"config.json: {_line(error)}") from None
    text = parsed.get_text_config(decoder=True)
    # Some families that also see are defined whole only; images are not served, text is.
    tables = (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )
    for table in tables:
        for candidate in (text, parsed):
            if type(candidate) in table:
                if candidate is not parsed and getattr(parsed, "tie_word_embeddings", False):
                    # What the whole says of its head holds for its text model.
                    candidate.tie_word_embeddings = not has_head
                return table[type(candidate)], candidate
    raise UnsupportedBundle(f"model_type {model_type!r} is no causal language model in {where}")


def _plain(value: Any) -> Any:
    """A value; transformers writes numbers that JSON lacks as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list) else value


def _load(
    cls: Any,
    parsed: Any,
    config: Mapping[str, Any],
    source: WeightSource,
    mode: ComputeMode,
    device: str,
    on_load: QuantizeOnLoad | None,
) -> tuple[Any, int]:
    """The network with its weights on the device, and their bytes."""
    schemes = read_schemes(config)
    source = as_parts(source, schemes)
    loader = WeightLoader(source, mode, device, schemes=schemes, on_load=on_load)
    kept = list(cls._keep_in_fp32_modules_strict or ())
    try:
        with torch.device("meta"):
            skeleton = cls(parsed)
        weights = WeightMap(
            skeleton, source, loader, schemes, keeps_float32=kept, rename=_rename(skeleton)
        )
        network, info = cls.from_pretrained(
            None,
            config=parsed,
            state_dict=weights.state(loader.dtype),
            dtype=loader.dtype,
            attn_implementation=_EAGER,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except BundleError:
        raise
    except Exception as error:
        raise UnsupportedBundle(f"{cls.__name__} cannot be built: {_line(error)}") from error
    check_loaded(info)
    taken = install(network, weights, on_load, loader.dtype, loader.device)
    shorten_scans(network)
    loader.finish()
    return network.eval(), taken + freeze(network)


def _rename(skeleton: Any) -> Rename:
    """What transformers makes of stored names as it loads this model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        Concatenate,
        MergeModulelist,
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(skeleton)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state = skeleton.state_dict()
    merged: dict[str, tuple[str, ...]] = {}
    for converter in converters:
        kinds = [(type(op), getattr(op, "dim", None)) for op in converter.operations]
        stacks = [(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]
        if kinds in stacks:
            patterns = tuple(converter.source_patterns)
            merged.update(dict.fromkeys(patterns, patterns))

    def rename(name: str) -> Renamed:
        target, pattern = rename_source_key(
            name, renamings, converters, skeleton.base_model_prefix, state
        )
        return Renamed(target, pattern, merged.get(pattern or "", ()))

    return rename


def _learn(call: NetworkCall, new_cache: Any) -> Learnt:
    """Run one token through the network and look what it asks for and keeps."""
    probe, cache = Probe(), new_cache()
    token = torch.zeros(1, 1, dtype=torch.int64, device=call.network.device)
    with torch.inference_mode(), during(probe):
        call({"input_ids": token + 1, "position_ids": token}, cache)
    if cache.foreign:
        raise UnsupportedBundle(f"a {cache.foreign} has no place in blocks")
    if cache.updates and not probe.calls:
        raise UnsupportedBundle("its attention does not use the interface that blocks need")
    states = learn_states(cache)
    paged: dict[int, AttentionTopology] = {}
    layers: list[int] = []
    count = max(len(cache.layers), call.network.config.get_text_config().num_hidden_layers)
    for one in probe.calls:
        if one.shared is not None:
            layers.append(layers[one.shared])
            continue
        layer = one.layer if one.layer is not None else len(layers)
        if layer in paged or layer >= count:
            layer = count = count + 1  # a second attention in one layer has an entry of its own
            layer -= 1
        layers.append(layer)
        paged[layer] = AttentionTopology(
            num_kv_heads=one.kv_heads, k_dim=one.k_dim, v_dim=one.v_dim, window=one.window
        )
    kept = {form.layer: form.topology for form in states}
    topology: list[LayerTopology] = []
    for layer in range(count):
        parts = [part for part in (paged.get(layer), kept.get(layer)) if part is not None]
        whole = CompositeTopology(kind="hybrid", children=tuple(parts)) if len(parts) > 1 else None
        topology.append(whole or (parts[0] if parts else NoMemory()))
    return Learnt(
        calls=tuple(probe.calls),
        call_layers=tuple(layers),
        states=states,
        topology=tuple(topology),
    )


def _rows_cache(transformers: Any, config: Any) -> Any:
    """Makes caches of the model's own kind whose attention layers hand their rows on: what they
    would keep lies in blocks."""

    class RowsCache(transformers.DynamicCache):
        seen = 0  # tokens before this forward's
        updates = 0
        foreign = ""

        def __init__(self) -> None:
            super().__init__(config=config)
            own = [type(layer) for layer in self.layers]
            elsewhere = [kind for kind in own if not kind.__module__.startswith(_CACHE_MODULE)]
            self.foreign = elsewhere[0].__name__ if elsewhere else ""

        def update(
            self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[Any, Any]:
            self.updates += 1
            return key_states, value_states

        def update_indexer(self, *args: Any, **kwargs: Any) -> Any:
            raise UnsupportedBundle("an indexer's keys have no place in blocks")

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return self.seen

        def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
            return self.seen + query_length, 0

    return RowsCache


_CACHE_MODULE = "transformers.cache_utils"


def _context(config: Any) -> int:
    text = config.get_text_config()
    stated = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    limit = int(stated or _UNSTATED_CONTEXT)
    for rope in _rope_settings(getattr(text, "rope_parameters", None) or {}):
        # These choose their frequencies by the longest row of a forward, so that one request
        # would change another's: they stay where the choice is always the same.
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") in ("longrope", "dynamic"):
            limit = min(limit, int(original or limit))
    return limit


def _rope_settings(rope: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested or [rope]


def _register(transformers: Any) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for name in (_NAME, _PROBE_NAME):
        transformers.AttentionInterface.register(name, attention_function)
    transformers.AttentionMaskInterface.register(_PROBE_NAME, mask_function)
    ALL_EXPERTS_FUNCTIONS.register(_NAME, experts_function)


def _use(network: Any, attention: str) -> None:
    """Choose the attention of all of the network's parts, and our experts."""
    for module in network.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = attention
            config._experts_implementation = _NAME


def _line(error: BaseException) -> str:
    """An error as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


@contextmanager
def _quiet(transformers: Any) -> Generator[None]:
    """Without transformers' warnings and progress bars: what they would say is checked here.
    And without the threads of its loader."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    # One tensor after another: its threads would read all of them before merging any.
    threads = os.environ.get(_NO_THREADS)
    os.environ[_NO_THREADS] = "1"
    try:
        yield
    finally:
        if threads is None:
            del os.environ[_NO_THREADS]
        else:
            os.environ[_NO_THREADS] = threads
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()

"""From a listing on disk to a running engine: the one place that introduces bundle, model and
engine to each other.

Everything that imports torch is imported when a model is loaded, so that a server starts and
lists models without it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osaurus.errors import InsufficientResources, ModelNotFound, OsaurusError
from osaurus.kernels.malloc import use_one_arena
from osaurus.runtime.conventions import Conventions, read_conventions
from osaurus.runtime.defaults import bundle_sampling
from osaurus.runtime.embedder import load_embedder, options_for_embedding
from osaurus.runtime.gate import DeviceGate
from osaurus.runtime.imports import import_engine
from osaurus.runtime.lost_device import telling_a_lost_device
from osaurus.runtime.machine import device_memory, host_memory
from osaurus.runtime.memory import Limits, LoadPlan
from osaurus.runtime.model import (
    Listing,
    LoadedModel,
    ModelContainer,
    PromptModel,
    UnloadedModel,
)
from osaurus.runtime.plan import check_memory, plan_of
from osaurus.runtime.weights import LoadedWeights
from osaurus.settings.aliases import aliased
from osaurus.settings.paths import kv_cache_dir
from osaurus.types.engine import Engine, EngineConfig
from osaurus.types.weights import QuantizeOnLoad

if TYPE_CHECKING:
    from osaurus.bundle.bundle import Bundle
    from osaurus.models.loading import ComputeMode

logger = logging.getLogger(__name__)

#: There on Linux when an NVIDIA driver is loaded.
_DRIVER = Path("/proc/driver/nvidia/version")

#: For a model whose files do not say how long its context is; it bounds the work of counting.
_UNKNOWN_CONTEXT = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How models are loaded. `device` "auto" takes a CUDA device when there is one.

    With `disk_cache` reusable prefixes of all models are kept in one directory, so that one
    share of the disk bounds them together: `engine.cache.disk_dir` where that is set, else the
    user's (`settings/paths.py`). Without it none are kept on disk.

    `quantize` turns matrices that a bundle stores in plain numbers into 8- or 4-bit ones;
    what is stored quantized stays as it is. `tool_format` and `reasoning_format` stand in for
    what a bundle says of its output, `chat_template` (its text) for the template it has.
    `limits` decide whether a model that may not fit is loaded. `served_name` is a further
    name of `default_model`, `aliases` (`settings/aliases.py`) are names of any. With
    `fits_batch` a model that takes more memory a request runs fewer of them.
    """

    compute_mode: ComputeMode = "bfloat16"
    quantize: QuantizeOnLoad | None = None
    device: str = "auto"
    engine: EngineConfig = field(default_factory=EngineConfig)
    disk_cache: bool = True
    tool_format: str | None = None
    reasoning_format: str | None = None
    limits: Limits = field(default_factory=Limits)
    served_name: str | None = None
    aliases: tuple[str, ...] = ()
    chat_template: str | None = None
    default_model: str = "default"
    fits_batch: bool = False

    def resolved_engine(self) -> EngineConfig:
        """`engine` with the directory it shall use. Touches no disk."""
        cache = self.engine.cache
        directory: Path | None = None
        if self.disk_cache:
            directory = kv_cache_dir().path if cache.disk_dir is None else cache.disk_dir
        return replace(self.engine, cache=replace(cache, disk_dir=directory))


class BundleSource:
    """Models from this machine's disk, built under one gate a device.

    `allow_paths` lets every caller name a model by its path: for a server that nobody but
    its own process can be expected to call. A model that the operator named by its path is
    known by its id from then on. New `options` hold for the loads that follow.
    """

    def __init__(self, options: LoadOptions | None = None, *, allow_paths: bool = False) -> None:
        use_one_arena()  # before threads load and compute: what they free shall go back
        self.options = options or LoadOptions()
        self._allow_paths = allow_paths
        self._by_path: dict[str, str] = {}  # id of a model outside of the roots -> its path
        self._gates: dict[str, DeviceGate] = {}
        self._taken: dict[str, int] = {}  # bytes by model, from its load until it is freed
        self._last_plan: LoadPlan | None = None
        self._last_read: tuple[Any, PromptModel] | None = None

    @property
    def max_batch_size(self) -> int:
        return self.options.engine.max_batch_size

    @property
    def last_plan(self) -> LoadPlan | None:
        """Of the load that was tried last."""
        return self._last_plan

    def find(self, name: str, *, allow_paths: bool = True) -> Listing:
        allow_paths = allow_paths or self._allow_paths
        wanted, served = name.strip().lower(), self.options.served_name
        if not wanted or (served is not None and wanted == served.lower()):
            name, allow_paths = self.options.default_model, True  # the operator's own word
        try:
            return self._find(name, allow_paths=allow_paths)
        except ModelNotFound:
            model = aliased(name, self.options.aliases)
            if model is None:
                raise
            return self._find(model, allow_paths=True)  # the operator's own word too

    def _find(self, name: str, *, allow_paths: bool) -> Listing:
        """What was only to be had by its path is remembered by its id."""
        from osaurus.bundle.hub import find_model

        try:
            return find_model(name, allow_paths=False)
        except ModelNotFound:
            known = self._by_path.get(name.strip().lower())
            if known is None and not allow_paths:
                raise
            listing = find_model(known or name)
        self._by_path[listing.model_id.lower()] = str(listing.path)
        return listing

    def catalog(self) -> Sequence[Listing]:
        from osaurus.bundle.hub import find_model, list_models

        found = {one.model_id.lower(): one for one in list_models()}
        for model_id, path in self._by_path.items():
            if model_id not in found and Path(path).exists():
                found[model_id] = find_model(path)
        return [one for one in found.values() if one.available]

    def memory_bytes(self) -> int:
        memory = device_memory(resolve_device(self.options.device)) or host_memory()
        return memory.physical_bytes

    def gate(self, device: str) -> DeviceGate:
        """The one gate of a device, for whoever computes on it beside the engines."""
        return self._gates.setdefault(device, DeviceGate())

    def read(self, listing: Listing) -> PromptModel:
        """What was read last is kept: who counts tokens does so often."""
        from osaurus.bundle.describe import context_of

        options = self.options
        key = (
            listing.path,
            listing.modified,
            (options.tool_format, options.reasoning_format, options.chat_template),
        )
        known = self._last_read
        if known is None or known[0] != key:
            bundle = _opened(listing, options)
            context = context_of(bundle.config) or options.engine.max_context_tokens
            model = UnloadedModel(
                model_id=listing.model_id,
                tokenizer=bundle.load_tokenizer(),
                template=bundle.load_template(),
                conventions=_conventions_of(bundle, options),
                context_tokens=context or _UNKNOWN_CONTEXT,
            )
            known = self._last_read = (key, model)
        return known[1]

    def footprint(self, listing: Listing) -> int:
        options = self.options
        try:
            bundle = _opened(listing, options)
            if bundle.embedding_spec is not None:
                options = options_for_embedding(options, bundle)
            plan = plan_of(bundle, options, resolve_device(options.device))
        except (OsaurusError, OSError, ValueError):
            return listing.size_bytes
        return max(listing.size_bytes, plan.working_set.total_bytes)

    def load(self, listing: Listing) -> ModelContainer:
        device = resolve_device(self.options.device)
        with telling_a_lost_device(device):
            container = self._load(listing, device)

        def make_engine(max_batch_size: int) -> Engine:
            with telling_a_lost_device(device):
                return container.make_engine(max_batch_size)

        return replace(container, make_engine=make_engine)

    def _load(self, listing: Listing, device: str) -> ModelContainer:
        import_engine()
        import torch

        from osaurus.bundle.fingerprint import model_identity
        from osaurus.bundle.manifest import check_manifest
        from osaurus.bundle.renderer import prepare_child
        from osaurus.kernels.cpu_topology import choose_threads
        from osaurus.models.registry import load_model
        from osaurus.topology.summary import resumes_at_snapshots

        options = self.options
        torch.set_num_threads(choose_threads(options.engine.threads).threads)
        bundle = _opened(listing, options)
        if is_embedder := bundle.embedding_spec is not None:
            options = options_for_embedding(options, bundle)
        others = sum(size for name, size in self._taken.items() if name != listing.model_id)
        plan = self._last_plan = check_memory(bundle, options, device, others_bytes=others)
        if not plan.allowed:
            raise InsufficientResources(plan.blocking[0])
        if is_embedder:
            container = load_embedder(bundle, options, device, self.gate(device))
            return self._counted(container, plan)
        if bundle.chat_template is not None:
            prepare_child()  # it comes up while the model is read
        tokenizer = bundle.load_tokenizer()
        conventions = _conventions_of(bundle, options)
        for note in conventions.formats.notes:
            logger.warning("%s: %s", listing.model_id, note)
        gate = self.gate(device)
        with gate.hold(f"load:{listing.model_id}"):
            model = load_model(
                bundle,
                compute_mode=options.compute_mode,
                device=device,
                on_load=options.quantize,
            )
        weights = LoadedWeights(
            model,
            name=listing.model_id,
            identity=_identity(model_identity(bundle), options.quantize),
            token_bytes=tokenizer.token_bytes,
            config=replace(
                options.resolved_engine(), allocator_cache_bytes=plan.allocator_cache_bytes
            ),
            gate=gate,
        )
        sampling = bundle_sampling(bundle)
        folder = bundle.path if bundle.path.is_dir() else bundle.path.parent
        needs_boundary = resumes_at_snapshots(model.layers_topology)
        del model  # the weights alone hold it, and let it go

        def face(engine: Engine) -> LoadedModel:
            return LoadedModel(
                model_id=listing.model_id,
                engine=engine,
                tokenizer=tokenizer,
                template=bundle.load_template(),
                eos_token_ids=frozenset(bundle.eos_token_ids),
                sampling_defaults=sampling,
                size_bytes=bundle.size_bytes,
                conventions=conventions,
                stop_texts=bundle.stop_strings,
                needs_stable_boundary=needs_boundary,
                admit=partial(check_manifest, folder),
                device=device,
            )

        container = ModelContainer(
            model_id=listing.model_id,
            size_bytes=bundle.size_bytes,
            make_engine=weights.make_engine,
            max_batch_size=plan.max_requests if options.fits_batch else None,
            face=face,
            free=weights.free,
        )
        return self._counted(container, plan)

    def _counted(self, container: ModelContainer, plan: LoadPlan) -> ModelContainer:
        """What the model takes counts at other loads, from now until it is freed."""
        model_id = container.model_id
        self._taken[model_id] = plan.working_set.total_bytes

        def free() -> None:
            self._taken.pop(model_id, None)
            container.free()

        taken = plan.working_set.total_bytes
        return replace(container, free=free, working_set_bytes=taken)


def _opened(listing: Listing, options: LoadOptions) -> Bundle:
    from osaurus.bundle.bundle import open_bundle

    bundle = open_bundle(listing.path, listing.model_id)
    if options.chat_template is None:
        return bundle
    templates = {"default": options.chat_template}
    return replace(bundle, chat_template=options.chat_template, chat_templates=templates)


def _conventions_of(bundle: Bundle, options: LoadOptions) -> Conventions:
    return read_conventions(
        bundle, tool_override=options.tool_format, reasoning_override=options.reasoning_format
    )


def _identity(of_bundle: str, quantize: QuantizeOnLoad | None) -> str:
    """What a model's stored keys and values are known by: other weights compute other ones."""
    return f"{of_bundle}+{quantize}" if quantize else of_bundle


def resolve_device(name: str) -> str:
    """The device that `auto` means here. Imports torch only where there is an NVIDIA driver."""
    if name != "auto":
        return name
    if not _DRIVER.exists():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"

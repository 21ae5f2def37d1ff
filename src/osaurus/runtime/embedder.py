"""An embedding model in memory: its encoder, the engine on it, and what chat sees of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from osaurus.bundle.embedding import ENCODERS
from osaurus.bundle.manifest import check_manifest
from osaurus.errors import EngineShutdown
from osaurus.runtime.gate import DeviceGate
from osaurus.runtime.model import LoadedModel, ModelContainer
from osaurus.runtime.weights import give_back
from osaurus.types.engine import Engine

if TYPE_CHECKING:
    from osaurus.bundle.bundle import Bundle
    from osaurus.engine.embedding import EmbeddingEngine
    from osaurus.models.embedding import TextEncoder
    from osaurus.runtime.load import LoadOptions

#: Who holds the device for a turn of texts, whichever model they are for.
OWNER = "embedding"

_ONE_TEXT_BYTES = 64 << 20


def load_embedder(
    bundle: Bundle, options: LoadOptions, device: str, gate: DeviceGate
) -> ModelContainer:
    """Blocks; made on threads. Raises what is wrong with the bundle."""
    from osaurus.engine.embedding import EmbeddingEngine
    from osaurus.models.embedding import load_encoder

    spec = bundle.embedding_spec
    assert spec is not None  # whoever calls has asked
    tokenizer = bundle.load_tokenizer()
    frame = tokenizer.frame
    with gate.hold(f"load:{bundle.model_id}"):
        held: list[TextEncoder] = [
            load_encoder(
                bundle, compute_mode=options.compute_mode, device=device, on_load=options.quantize
            )
        ]

    def make_engine(max_batch_size: int) -> EmbeddingEngine:
        if not held:
            raise EngineShutdown(f"{bundle.model_id} was unloaded")
        engine = EmbeddingEngine(
            held[0],
            spec,
            frame=frame,
            seat=gate.seat(OWNER),
            name=bundle.model_id,
            threads=options.engine.threads,
        )
        engine.update_max_batch_size(max_batch_size)
        return engine

    def face(engine: Engine) -> LoadedModel:
        from osaurus.engine.embedding import EmbeddingEngine

        return LoadedModel(
            model_id=bundle.model_id,
            engine=engine,
            tokenizer=tokenizer,
            template=None,
            size_bytes=bundle.size_bytes,
            admit=partial(check_manifest, bundle.path),
            embedder=engine if isinstance(engine, EmbeddingEngine) else None,
        )

    return ModelContainer(
        model_id=bundle.model_id,
        size_bytes=bundle.size_bytes,
        make_engine=make_engine,
        face=face,
        is_embedder=True,
        free=partial(give_back, gate, bundle.model_id, held.clear),
    )


def options_for_embedding(options: LoadOptions, bundle: Bundle) -> LoadOptions:
    """What the memory of such a model is judged by: one text's keys and values at a time, and
    float32 in an encoder."""
    engine = replace(options.engine, max_batch_size=1, kv_budget_bytes=_ONE_TEXT_BYTES)
    if bundle.config["model_type"] in ENCODERS:
        return replace(options, engine=engine, compute_mode="float32", quantize=None)
    return replace(options, engine=engine)

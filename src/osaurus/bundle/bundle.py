"""One model on disk: what it is, what ends its answers, and how to get at its parts.

In: a path to a folder or a `.gguf` file. Out: a `Bundle`, which exists only for a model that is
whole and of a known form. Opening reads headers and small files; the tokenizer is built and
torch is imported when first asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from osaurus.bundle.config import (
    TOKENIZER_FILES,
    chat_templates,
    missing_tokenizer_file,
    read_config,
    read_generation_config,
    read_tokenizer_config,
)
from osaurus.bundle.embedding import EmbeddingSpec, read_embedding_spec
from osaurus.bundle.end_tokens import (
    declared_ids,
    end_token_ids,
    stop_texts,
    turn_end_of_template,
)
from osaurus.bundle.fingerprint import fingerprint
from osaurus.bundle.gguf_config import (
    config_from_gguf,
    generation_config_from_gguf,
    gguf_architecture,
)
from osaurus.bundle.gguf_files import GgufSet, gguf_set_of, gguf_sets, open_gguf_set
from osaurus.bundle.gguf_names import hf_name, missing_tensors
from osaurus.bundle.gguf_reader import GgufFile, is_gguf
from osaurus.bundle.labels import gguf_label, safetensors_label
from osaurus.bundle.manifest import check_manifest
from osaurus.bundle.safetensors_reader import INDEX_NAME, WeightPlan, plan_weights
from osaurus.errors import IncompleteBundle, TemplateError, UnsupportedBundle
from osaurus.types.weights import TensorFacts

if TYPE_CHECKING:
    from osaurus.bundle.template import ChatTemplate
    from osaurus.bundle.tokenizer import Tokenizer
    from osaurus.bundle.weights import WeightSource

_log = logging.getLogger(__name__)

Format = Literal["gguf", "safetensors"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Bundle:
    """A whole model. `config` has the published Hugging Face spelling for either format.

    `path` is the folder, or the first `.gguf` file. `chat_templates` holds named templates;
    `chat_template` is the default one. `size_bytes` counts the weights as stored.
    """

    model_id: str
    path: Path
    format: Format
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    chat_template: str | None
    chat_templates: Mapping[str, str]
    size_bytes: int
    quantization: str
    fingerprint: str
    _gguf: tuple[GgufFile, ...] = field(default=(), repr=False)
    _plan: WeightPlan | None = field(default=None, repr=False)
    _declared_ends: frozenset[int] = field(default=frozenset(), repr=False)

    def load_tokenizer(self) -> Tokenizer:
        """The one tokenizer of this bundle, built on the first call and then shared."""
        return self._tokenizer

    def load_template(self) -> ChatTemplate | None:
        """The default chat template (and the one for tools, where the bundle has such) with the
        tokenizer's special texts, or None."""
        return self._template

    def tensor_facts(self) -> list[TensorFacts]:
        """Of everything stored, under the names that `open_weights` has; one that no table
        names keeps its own."""
        if self._plan is not None:
            return [
                TensorFacts(
                    name=name, shape=at.shape, encoding=at.dtype, num_bytes=at.end - at.begin
                )
                for name, at in self._plan.tensors.items()
            ]
        return [
            TensorFacts(
                name=self._own_name(name),
                shape=tuple(reversed(tensor.dims)),
                encoding=tensor.type.name,
                num_bytes=tensor.num_bytes,
            )
            for file in self._gguf
            for name, tensor in file.tensors.items()
        ]

    def _own_name(self, name: str) -> str:
        try:
            return hf_name(gguf_architecture(self._gguf[0]), name) or name
        except (KeyError, ValueError):
            return name

    def open_weights(self) -> WeightSource:
        """A fresh source over the same files. Imports torch."""
        from osaurus.bundle.weights import GgufSource, SafetensorsSource

        if self._gguf:
            return GgufSource(self._gguf)
        return SafetensorsSource(self.path, self._plan)

    @cached_property
    def embedding_spec(self) -> EmbeddingSpec | None:
        """Set for a model that makes vectors of texts. Raises `UnsupportedBundle` for a way of
        making them that is not served."""
        return None if self._gguf else read_embedding_spec(self.path, self.config)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends an answer, from every file and the template."""
        tokenizer = self.load_tokenizer()
        return end_token_ids(tokenizer, self._declared_ends, self._turn_end())

    @cached_property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end an answer, for ends that the vocabulary has no id for."""
        configured = self.generation_config.get("stop_strings")
        return stop_texts(self.load_tokenizer(), configured, self.chat_template)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if self._gguf:
            from osaurus.bundle.gguf_tokenizer import tokenizer_from_gguf

            return tokenizer_from_gguf(self._gguf[0])
        from osaurus.bundle.tokenizer_files import tokenizer_from_folder

        return tokenizer_from_folder(self.path)

    @cached_property
    def _template(self) -> ChatTemplate | None:
        if self.chat_template is None:
            return None
        from osaurus.bundle.template import ChatTemplate

        return ChatTemplate(
            self.chat_template,
            tool_use=self.chat_templates.get("tool_use"),
            special_tokens=self.load_tokenizer().special_tokens,
        )

    def _turn_end(self) -> int | None:
        template = self.load_template()
        if template is None:
            return None
        try:
            return turn_end_of_template(
                lambda messages: template.render(messages, add_generation_prompt=False),
                self.load_tokenizer().added_tokens,
            )
        except TemplateError as error:
            _log.info("%s: the turn's end was not read off the template: %s", self.model_id, error)
            return None


def open_bundle(path: str | Path, model_id: str | None = None) -> Bundle:
    """Open a folder or a `.gguf` file.

    Raises `IncompleteBundle` (naming the file that is missing or cut) or `UnsupportedBundle`.
    A folder with several GGUFs opens as the preferred one.
    """
    path = Path(path)
    if path.is_file():
        one = gguf_set_of(path)
        return _open_gguf(one, model_id or one.name)
    if not path.is_dir():
        raise IncompleteBundle(f"{path}: there is no such file or folder")
    check_manifest(path)
    if not (path / "config.json").is_file() and (sets := gguf_sets(path)):
        return _open_gguf(sets[0], model_id or path.name)
    return _open_folder(path, model_id or path.name)


def _open_gguf(one: GgufSet, model_id: str) -> Bundle:
    if one.path.is_file() and one.path.suffix.lower() != ".gguf" and not is_gguf(one.path):
        raise UnsupportedBundle(f"{one.path}: neither a model folder nor a GGUF file")
    check_manifest(one.path.parent)
    files = open_gguf_set(one)
    first = files[0]
    config = config_from_gguf(first)
    names = [name for file in files for name in file.tensors]
    lacking = missing_tensors(gguf_architecture(first), config["num_hidden_layers"], names)
    if lacking:
        raise IncompleteBundle(
            f"{first.path}: {len(lacking)} tensors are missing, the first is {lacking[0]!r}; this "
            "looks like an unfinished conversion"
        )
    templates = _gguf_templates(first)
    ends = [first.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    return Bundle(
        model_id=model_id,
        path=first.path,
        format="gguf",
        config=config,
        generation_config=generation_config_from_gguf(first),
        chat_template=templates.get("default"),
        chat_templates=templates,
        size_bytes=sum(t.num_bytes for file in files for t in file.tensors.values()),
        quantization=gguf_label(one, first),
        fingerprint=fingerprint(config, read_whole=[], weights=[file.path for file in files]),
        _gguf=files,
        _declared_ends=frozenset(declared_ids(*ends)),
    )


def _gguf_templates(file: GgufFile) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in file.metadata.items():
        if isinstance(value, str) and key.startswith("tokenizer.chat_template"):
            found[key.removeprefix("tokenizer.chat_template").lstrip(".") or "default"] = value
    return found


def _open_folder(folder: Path, model_id: str) -> Bundle:
    config = read_config(folder)
    if (missing := missing_tokenizer_file(folder)) is not None:
        raise IncompleteBundle(
            f"{folder / missing}: the tokenizer is missing; this looks like an unfinished "
            "download, fetch it again"
        )
    plan = plan_weights(folder)
    generation = read_generation_config(folder)
    templates = chat_templates(folder, read_tokenizer_config(folder))
    text_config = config.get("text_config")
    nested = text_config.get("eos_token_id") if isinstance(text_config, dict) else None
    ends = declared_ids(config.get("eos_token_id"), nested, generation.get("eos_token_id"))
    small = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return Bundle(
        model_id=model_id,
        path=folder,
        format="safetensors",
        config=config,
        generation_config=generation,
        chat_template=templates.get("default"),
        chat_templates=templates,
        size_bytes=plan.total_bytes,
        quantization=safetensors_label(config, plan),
        fingerprint=fingerprint(
            {**config, "chat_templates": templates},
            read_whole=small,
            weights=filter(Path.is_file, (*plan.files, folder / INDEX_NAME)),
        ),
        _plan=plan,
        _declared_ends=frozenset(ends),
    )

"""What is known of the models that are resident, beside their weights. Plain tables."""

from __future__ import annotations

from osaurus.runtime.model import Listing, LoadedModel
from osaurus.types.runtime import ModelUse, ResidencyPolicy, UseSource

#: Names remembered for resident models, so that a request need not search the disk.
_MAX_NAMES = 256


class Residents:
    def __init__(self) -> None:
        self.faces: dict[str, LoadedModel] = {}  #: each model with its present engine
        self.listings: dict[str, Listing] = {}
        self.owners: dict[str, UseSource] = {}  #: who used it last
        self.policies: dict[str, ResidencyPolicy] = {}  #: instead of the settings' one
        self.by_hand: set[str] = set()  #: asked for by hand, and not unloaded by hand since
        self.asleep: set[str] = set()  #: unloaded because nobody used them
        self.current: str | None = None  #: used last of all
        self._names: dict[str, str] = {}  # names that led to a model -> its id

    def id_of(self, name: str) -> str:
        """The id that `name` once led to, else `name` itself."""
        return self._names.get(name, name)

    def forget_names(self) -> None:
        """What names mean may have changed; ids still lead to their models."""
        self._names.clear()

    def note_use(self, model_id: str, name: str, use: ModelUse) -> None:
        self.current = model_id
        if len(self._names) < _MAX_NAMES:
            self._names[name] = model_id
        if not use.preserves_owner or model_id not in self.owners:
            self.owners[model_id] = use.source

    def forget(self, model_id: str) -> None:
        for table in (self.faces, self.listings, self.owners, self.policies):
            table.pop(model_id, None)
        self._names = {name: known for name, known in self._names.items() if known != model_id}
        if self.current == model_id:
            self.current = None

    def clear(self) -> None:
        for table in (self.faces, self.listings, self.owners, self.policies, self._names):
            table.clear()
        self.by_hand.clear()
        self.asleep.clear()
        self.current = None

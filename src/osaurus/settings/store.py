"""The settings of this process: one file, watched, with the process's own layers above it.

Safe from any thread. A file that becomes wrong while a server runs changes nothing: the last
values that were right hold, and a notice says what is wrong.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from osaurus.errors import OsaurusError
from osaurus.settings.files import Document, read_document, stamp, write_document
from osaurus.settings.load import Flag, Settings, resolve
from osaurus.settings.migrate import first_document, migrate, read_legacy
from osaurus.settings.paths import Environment, config_dir, server_settings, user_home
from osaurus.settings.rules import check_together

logger = logging.getLogger(__name__)


class SettingsStore:
    """`flags` are this process's command line. The lock guards the document and what it
    became; no I/O but that of the file happens under it."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        environment: Environment | None = None,
        flags: Mapping[str, Flag] | None = None,
        legacy: Mapping[str, Any] | None = None,
    ) -> None:
        self._environment = os.environ if environment is None else environment
        self.path = path or server_settings(self._environment).path
        self._flags = dict(flags or {})
        self._legacy = legacy
        self._lock = threading.Lock()
        self._document: Document = {}
        self._stamp: tuple[int, int, int] | None = None
        self._settings: Settings | None = None
        self._problem = ""
        self._override: Document | None = None

    def load(self, *, checks: bool = True) -> Settings:
        """Read the file now. Raises `InvalidField` for what is wrong in any layer; without
        `checks` not for settings that contradict each other, so that they can be mended."""
        with self._lock:
            self._settings = self._read(checks=checks)
            self._problem = ""
            return self._settings

    def snapshot(self) -> Settings:
        """The values that hold now; the file is read again only when it has changed."""
        with self._lock:
            if self._settings is None:
                self._settings = self._read()
            elif stamp(self.path) != self._stamp:
                try:
                    self._settings = self._read()
                    self._problem = ""
                except OsaurusError as error:
                    self._stamp = stamp(self.path)  # said once, not at every request
                    self._problem = error.message
                    logger.warning("the changed settings are not used: %s", error.message)
            return self._settings

    @property
    def problem(self) -> str:
        """Why the file as it is now is not used; empty when it is."""
        return self._problem

    @property
    def document(self) -> Document:
        """The file's content, or what a new one would say."""
        self.snapshot()
        return self._document

    def save(self, document: Mapping[str, Any]) -> Settings:
        """Check it and replace the file. Raises `InvalidField` and writes nothing when it is
        wrong, `SettingsFileError` when it cannot be written."""
        with self._lock:
            settings = self._resolve(document)
            check_together(settings)
            write_document(self.path, document)
            self._document, self._stamp = dict(document), stamp(self.path)
            self._settings, self._problem = settings, ""
            return settings

    def create(self) -> None:
        """Write the first file where there is none, so that it can be seen and edited. A place
        that cannot be written is no reason not to serve."""
        if stamp(self.path) is not None:
            return
        try:
            self.save(self.document)
        except OsaurusError as error:
            logger.warning("no settings file was made: %s", error.message)

    def override_in_memory(self, document: Mapping[str, Any] | None) -> Settings:
        """Values for this process above all others, None for none; never written. Raises
        `InvalidField`, and then changes nothing."""
        self.snapshot()
        with self._lock:
            given = None if document is None else dict(document)
            settings = self._resolve(self._document, override=given)
            check_together(settings)
            self._override, self._settings = given, settings
            return settings

    @property
    def is_overridden(self) -> bool:
        return self._override is not None

    def _read(self, *, checks: bool = True) -> Settings:
        """Under the lock."""
        self._stamp = stamp(self.path)
        document, notice = read_document(self.path)
        notices = [notice] if notice else []
        is_new = document is None
        if document is None:
            document = first_document(None if notice else self._read_legacy())
        else:
            document, steps = migrate(document)
            if steps:
                notices += [f"{self.path}: {step}" for step in steps]
                write_document(self.path, document)
                self._stamp = stamp(self.path)
        settings = self._resolve(document, is_new=is_new, override=self._override)
        if checks:
            check_together(settings)
        self._document = document
        return Settings(resolved=settings.resolved, notices=(*notices, *settings.notices))

    def _read_legacy(self) -> Mapping[str, Any]:
        if self._legacy is not None:
            return self._legacy
        env = self._environment
        return read_legacy(config_dir(env).path, user_home(env))

    def _resolve(
        self,
        document: Mapping[str, Any],
        *,
        is_new: bool = False,
        override: Document | None = None,
    ) -> Settings:
        return resolve(
            document,
            file=str(self.path),
            environment=self._environment,
            flags=self._flags,
            override=override,
            is_new=is_new,
        )

"""Everything that makes two caches different, in one frozen value, and digests of prefixes.

Every digest is a SHA-256 over framed fields: each is preceded by its length as int64 LE, an
absent one by -1, so that bytes of one field cannot pose as another's. A prefix is a chain:
the digest of a block covers its tokens and, through its parent's digest, all before them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from osaurus.types.cache import CacheHints, KVMode

#: Layout of records and kinds of layers on disk; raise it on any change.
CACHE_FORMAT = 1
#: What a record stands for; raise it when the meaning changes though the bytes do not.
RESTORE_CONTRACT = "blocks-1"
#: Parent of a sequence's first block.
ROOT = bytes(32)


def framed_digest(domain: str, *fields: bytes | None) -> bytes:
    """32 bytes."""
    digest = hashlib.sha256()
    for field in (domain.encode(), *fields):
        digest.update(struct.pack("<q", -1 if field is None else len(field)))
        digest.update(field or b"")
    return digest.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKey:
    """What must be equal for two processes to share keys and values.

    `identity` is NAME@FINGERPRINT of the bundle, `topology` counts and sizes its layers,
    `overrides` names settings that change hidden states for the same tokens.
    """

    identity: str
    dtype: str
    topology: str
    block_tokens: int
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The bundle's readable id."""
        return self.identity.rpartition("@")[0] or self.identity

    def __str__(self) -> str:
        return "|".join(
            (
                self.identity,
                f"dtype={self.dtype}",
                "kv=raw",
                f"cachefmt={CACHE_FORMAT}",
                f"restore={RESTORE_CONTRACT}",
                self.topology,
                f"block={self.block_tokens}",
                *sorted(self.overrides),
            )
        )


def policy_salt(kv_mode: KVMode, max_kv_size: int | None) -> str:
    """Prompts are stored raw whatever the mode; the mode parts them all the same, since what
    follows a compressed middle was computed from it."""
    return f"cache-policy-1|prompt=raw|kv_mode={kv_mode}|max_kv_size={max_kv_size}"


def namespace_of(model_key: ModelKey, hints: CacheHints, policy: str) -> bytes:
    """32 bytes: prefixes of different namespaces never meet. Computed once a request."""
    salt = framed_digest("salt1", hints.media_salt, hints.scope_salt.encode(), policy.encode())
    return framed_digest("space1", str(model_key).encode(), salt)


def block_digest(namespace: bytes, parent: bytes, tokens: Sequence[int]) -> bytes:
    """32 bytes; tokens are hashed as int64 LE."""
    return framed_digest("blk1", namespace, parent, np.asarray(tokens, dtype="<i8").tobytes())


def snapshot_digest(key: bytes) -> bytes:
    """The digest under which the state after a block is kept on disk, by the block's key."""
    return framed_digest("state1", key)


def snapshot_record_key(key: bytes) -> str:
    """The key of that snapshot's record."""
    return snapshot_digest(key).hex()[:32]


def generated_digest(digest: bytes) -> bytes:
    """The key of a block's other form: keys and values that decode rows made, or that were
    computed on top of such. They may differ from prefill's in the last bits."""
    return framed_digest("gen1", digest)

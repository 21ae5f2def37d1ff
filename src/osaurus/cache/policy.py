"""How a request's keys and values are kept: its own wish, else the load's default."""

from __future__ import annotations

from collections.abc import Iterable

from osaurus.types.cache import CacheConfig, KVMode

#: Bundles whose answers TurboQuant 3/3 has been shown not to hurt: words that all occur in
#: the bundle's name. Every layer must have full attention besides.
PROVEN_FOR_TURBO = (("gemma", "qat", "mxfp4"), ("gemma", "jang_4m"))


def resolve_load_mode(mode: KVMode, name: str, kinds: Iterable[str]) -> KVMode:
    """What `engine_selected` means for a bundle: TurboQuant 3/3 where it is proven, else
    blocks as computed. Other modes mean what they say. `kinds` are those of the layers."""
    if mode.kind != "engine_selected":
        return mode
    words = name.lower().replace("-", "_")
    is_proven = any(all(word in words for word in row) for row in PROVEN_FOR_TURBO)
    return KVMode("turbo", 3, 3) if is_proven and set(kinds) == {"full_attention"} else KVMode()


def resolve_kv_policy(
    config: CacheConfig,
    kv_mode: KVMode | None,
    max_kv_size: int | None,
    prompt_tokens: int,
    *,
    full_kv_fits: bool,
) -> tuple[KVMode, int | None]:
    """The mode and the rotating cap in tokens (None: full attention) of one request. Pure.

    An explicit value wins, even one that is worse. The default cap is for prompts strictly
    longer than `default_max_kv_size` * `long_prompt_multiplier` whose full keys and values do
    not fit the budget: it drops the middle of the prompt, so it is the last resort.

    Worked example, 65536 and 2.0: a prompt of 131072 tokens has no cap, one of 131073 has
    65536, if it does not fit as it is.
    """
    mode = config.kv_mode if kv_mode is None or kv_mode.kind == "none" else kv_mode
    if max_kv_size is not None or config.default_max_kv_size is None:
        return mode, max_kv_size
    longest = config.default_max_kv_size * config.long_prompt_multiplier
    capped = prompt_tokens > longest and not full_kv_fits
    return mode, config.default_max_kv_size if capped else None

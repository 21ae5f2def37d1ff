"""How a request's keys and values are kept: its own wish, else the load's default."""

from __future__ import annotations

from osaurus.types.cache import CacheConfig, KVMode


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

"""Every setting, one row each: the file `server-runtime.json` is these keys as nested objects.

The page `docs/settings.md` shows this table, and a test holds it to it. A row that is not
used is kept for programs that write it, and does nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from osaurus.settings.aliases import check_aliases
from osaurus.settings.fields import Kind, Liveness, Setting
from osaurus.settings.profiles import PROFILES, SLIDER
from osaurus.types.cache import KVMode
from osaurus.types.sampling import RANGES, Range

SCHEMA_VERSION = 3

_POSITIVE = Range(0, math.inf, open_low=True)
_AT_LEAST_1 = Range(1, math.inf)
_PERCENT = Range(0, 100, open_low=True)
_SHARE = Range(0, 1, open_low=True)


def _row(key: str, kind: Kind, default: Any, live: Liveness, help: str, **more: Any) -> Setting:  # noqa: A002
    return Setting(key=key, kind=kind, default=default, live=live, help=help, **more)


def _whole(key: str, default: int | None, live: Liveness, help: str, **more: Any) -> Setting:  # noqa: A002
    more.setdefault("range", _AT_LEAST_1)
    return _row(key, "whole", default, live, help, **more)


def _number(key: str, default: float | None, live: Liveness, help: str, **more: Any) -> Setting:  # noqa: A002
    more.setdefault("range", _POSITIVE)
    return _row(key, "number", default, live, help, **more)


def _kept(key: str, default: Any, reason: str, **more: Any) -> Setting:
    """A setting of the original that nothing here heeds, and why."""
    kinds: Mapping[type, Kind] = {bool: "switch", int: "whole", float: "number", str: "text"}
    kind = more.pop("kind", kinds.get(type(default), "text"))
    if "words" in more:
        kind = "word"
    return _row(key, kind, default, "restart", reason, is_used=False, **more)


_NETWORK = (
    _row("network.host", "text", "127.0.0.1", "restart", "Address to listen on.", flag="--host"),
    _whole("network.port", 1337, "restart", "Port to listen on.", range=Range(1, 65535),
           flag="--port"),
    _row("network.expose", "switch", False, "restart",
         "Allow an address that other machines can reach while no key guards this server.",
         flag="--expose"),
    _row("network.allowedHosts", "texts", (), "restart",
         "Further host names that this server is called by.", flag="--allow-host"),
    _row("network.corsOrigins", "texts", (), "restart", "Web origins that may call this server.",
         flag="--cors-origin"),
    _row("network.servedModelName", "text", None, "live",
         "A further name of the model in use, or of the default one."),
    _row("network.logLevel", "word", "info", "restart", "Least severe messages logged.",
         words=("trace", "debug", "info", "warning", "error"), flag="--log-level"),
    _row("network.apiKey", "text", None, "live",
         "A key that opens this server, kept as its hash; `osaurus keys` makes better ones.",
         is_secret=True),
    _row("network.trustLoopback", "switch", True, "live",
         "Programs of this machine need no key, unless they speak for others."),
    _row("network.logFormat", "word", "text", "restart", "How the log is written.",
         words=("text", "json"), flag="--log-format"),
    _whole("network.rateLimitRequestsPerMinute", None, "live",
           "Answers that this server begins in a minute; more get 429 and when to come again.",
           unit="requests"),
    _number("network.timeoutSeconds", None, "live",
            "Longest time for an answer, from its request on: waiting, loading and all.",
            unit="s"),
)  # fmt: skip

_CONCURRENCY = (
    _whole("concurrency.maxConcurrentSequences", None, "live",
           "Requests of one model that decode at the same time, 32 at most; auto takes what the "
           "memory holds, at most 8 on a CPU and 32 on CUDA; unset takes the profile's.",
           unit="requests", words=("auto",), flag="--max-concurrent"),
    _row("concurrency.continuousBatching", "switch", True, "live",
         "Without it one request runs at a time."),
    _whole("concurrency.prefillStepSize", None, "next load",
           "Longest piece of a prompt read in one forward.", unit="tokens"),
    _whole("concurrency.prefillBatchSize", None, "next load",
           "Prompts that are read by turns, a piece of each; unset takes all that run.",
           unit="requests"),
    _whole("concurrency.completionBatchSize", None, "next load",
           "Requests that decode in one forward; unset takes all that run.", unit="requests"),
    _kept("concurrency.smeltMode", "disabled",
          "It is about weights on Apple's unified memory; here they are mapped from the file.",
          words=("engine_selected", "disabled", "flash_moe", "ssd_streaming")),
)  # fmt: skip

_NO_ROTATION = (
    "No cache here drops the middle of a prompt: one that does not fit the memory is refused."
)
_ONE_DISK = "There is one store on disk; cache.blockDisk is about it."
_CACHE = (
    _row("cache.prefix.enabled", "switch", True, "next load",
         "Reuse what prompts that begin alike have in common."),
    _number("cache.prefix.memoryLimitMB", None, "next load",
            "Memory for prefixes that nobody uses; unset takes the percentage.", unit="MB"),
    _number("cache.prefix.memoryPercent", None, "next load",
            "Share of the machine's memory for such prefixes; unset takes the profile's.",
            unit="%", range=_PERCENT),
    _row("cache.pagedKV.enabled", "switch", None, "next load",
         "Keep such prefixes in memory; false drops them when their request ends."),
    _whole("cache.pagedKV.blockSize", None, "next load",
           "Tokens in a block of keys and values; unset is 32.", unit="tokens",
           range=Range(1, 1024)),
    _whole("cache.pagedKV.maxBlocks", None, "next load",
           "Most blocks that a model may hold; unset takes what the memory allows.",
           unit="blocks"),
    _row("cache.liveKVCodec", "text", "engine_selected", "next load",
         "How older keys and values are kept in memory; native and none are as computed.",
         form="turbo(K,V) or affine(BITS,GROUP)",
         words=("engine_selected", "native", "turboquant", "none"), parse=KVMode.parse,
         flag="--kv-mode"),
    _whole("cache.turboQuantKeyBits", None, "next load", "Bits of keys for turboquant.",
           unit="bits", range=Range(2, 8)),
    _whole("cache.turboQuantValueBits", None, "next load", "Bits of values for turboquant.",
           unit="bits", range=Range(2, 8)),
    _row("cache.storedKVCodec", "word", "auto", "next load",
         "How prompts are kept on disk: as computed, or not at all when disabled.",
         words=("auto", "native", "turboquant", "disabled")),
    _row("cache.blockDisk.enabled", "switch", True, "next load", "Keep prompts on disk.",
         flag="--no-disk-cache"),
    _number("cache.blockDisk.maxSizePercent", None, "next load",
            "Share of the volume that they may take; unset takes a tenth, at least 10 GB.",
            unit="%", range=_PERCENT),
    _number("cache.blockDisk.maxSizeGB", None, "next load",
            "The same in GB, where no percentage is set.", unit="GB"),
    _row("cache.blockDisk.directory", "text", None, "next load",
         "Where they are kept; unset is the cache directory.", flag="--kv-cache-dir"),
    _row("cache.enableSSMReDerive", "switch", True, "next load",
         "Compute missing snapshots of recurrent layers when the model is idle."),
    _number("cache.prefix.ttlMinutes", None, "next load",
            "How long a prefix that nobody uses stays in memory; unset is as long as there is "
            "room.", unit="minutes"),
    _kept("cache.defaultMaxKVSize", None, _NO_ROTATION, kind="whole", range=_AT_LEAST_1),
    _kept("cache.longPromptMultiplier", 2.0, _NO_ROTATION, range=_POSITIVE),
    _kept("cache.prefix.legacyEntryCountCache", False,
          "Prefixes are counted in bytes: cache.prefix.memoryLimitMB bounds them."),
    _kept("cache.legacyDisk.enabled", False, _ONE_DISK),
    _kept("cache.legacyDisk.maxSizeGB", None, _ONE_DISK, kind="number", range=_POSITIVE),
    _kept("cache.legacyDisk.directory", None, _ONE_DISK),
)  # fmt: skip

_POWER = (
    _row("power.autoSleepEnabled", "switch", False, "next load",
         "Let models that nobody uses sleep, after the times below."),
    _number("power.lightSleepAfterSeconds", None, "next load",
            "When an idle model gives up the prefixes that it holds in memory; those on disk "
            "stay.", unit="s"),
    _number("power.deepSleepAfterSeconds", None, "live",
            "When an idle model is unloaded, if residency does not unload it sooner.", unit="s"),
    _row("power.wakeOnRequest", "switch", True, "live",
         "A request loads a model that was unloaded for idleness; otherwise it answers 404."),
    _row("power.jitLoad", "switch", True, "live",
         "A request loads its model; otherwise only models that were loaded by hand are served "
         "(serve MODEL, POST /admin/preload)."),
)  # fmt: skip

_DEFAULT = "Where a request says nothing; unset takes the bundle's."
_GENERATION = (
    _whole("generation.maxTokens", None, "live",
           "Longest answer where a request says nothing; unset is the room left in the context.",
           unit="tokens"),
    _number("generation.temperature", None, "live", _DEFAULT, range=RANGES["temperature"]),
    _number("generation.topP", None, "live", _DEFAULT, range=RANGES["top_p"]),
    _whole("generation.topK", None, "live", _DEFAULT, range=RANGES["top_k"]),
    _number("generation.minP", None, "live", _DEFAULT, range=RANGES["min_p"]),
    _number("generation.repetitionPenalty", None, "live", _DEFAULT,
            range=RANGES["repetition_penalty"]),
    _whole("generation.streamInterval", 1, "live",
           "Pieces of text that a stream sends as one; the first goes out at once."),
    _kept("generation.diffusionMaxDenoisingSteps", None, "No model here writes by diffusion.",
          kind="whole", range=_AT_LEAST_1),
)  # fmt: skip

_TOOLS = (
    _row("tools.toolParserOverride", "text", None, "next load",
         "Format of tool calls, whatever the bundle says; auto asks the bundle, none reads none."),
    _row("tools.reasoningParserOverride", "text", None, "next load",
         "Format of thinking, whatever the bundle says; auto asks the bundle, none reads none."),
    _row("tools.customChatTemplate", "text", None, "next load",
         "A Jinja file, or its text, in place of the template of every model that loads."),
    _kept("tools.mcpConfigFile", None,
          "This server calls no tools itself; programs that ask it do."),
    _kept("tools.enableAutoToolChoice", False,
          "Choosing tools by itself needs no leave: tool_choice auto is a request's default."),
)  # fmt: skip

_TEXT_ONLY = "Models read text here; pictures and sound in a request are a 400."
_MULTIMODAL = (
    _kept("multimodal.vlmMode", "auto", _TEXT_ONLY, words=("auto", "force_off", "force_on")),
    _kept("multimodal.requireMediaSaltForCache", True,
          "Media always part prefixes; only true is accepted while prompts are reused."),
    _kept("multimodal.enableVideo", True, _TEXT_ONLY),
    _kept("multimodal.enableAudio", True, _TEXT_ONLY),
)  # fmt: skip

_NO_DRAFTS = "No drafter runs yet: every token is the model's own."
_MTP = (
    _kept(
        "mtp.mode",
        "family_default",
        _NO_DRAFTS,
        words=("off", "family_default", "auto", "force_on"),
    ),
    _kept("mtp.draftTokenLimit", None, _NO_DRAFTS, kind="whole", range=_AT_LEAST_1),
    _kept("mtp.explicitDepth", None, _NO_DRAFTS, kind="whole", range=_AT_LEAST_1),
    _kept("mtp.keepDraftCacheSeparate", True, _NO_DRAFTS),
    _kept("mtp.acceptedTokensOnlyEnterBaseCache", True, _NO_DRAFTS),
    _kept("mtp.dflash2DrafterPath", None, _NO_DRAFTS),
    _kept("mtp.dflash2BlockSize", None, _NO_DRAFTS, kind="whole", range=_AT_LEAST_1),
)

_PERFORMANCE = (
    _row("performance.device", "text", "auto", "next load",
         "Where models run: cpu, cuda, cuda:1; auto takes a CUDA device when there is one.",
         flag="--device"),
    _whole("performance.threads", None, "next load",
           "Most threads that compute on the CPU; unset is one a physical core, within the "
           "process's limits.", unit="threads", flag="--threads"),
    _row("performance.computeMode", "word", "bfloat16", "next load",
         "float32 dequantizes everything: slow, for comparisons.", words=("bfloat16", "float32"),
         flag="--compute-mode"),
    _row("performance.quantizeOnLoad", "word", None, "next load",
         "Load matrices that are not quantized as 8- or 4-bit ones.", words=("int8", "int4"),
         flag="--quantize"),
    _whole("performance.maxContextTokens", None, "next load",
           "Longest context; a model's own limit when it is shorter.", unit="tokens",
           range=Range(2, math.inf), flag="--max-context"),
    _number("performance.latencyBudgetMs", 75.0, "next load",
            "Longest pause of running answers while a prompt is read.", unit="ms"),
    _number("performance.kvBudgetMB", None, "next load",
            "Memory for keys and values; unset is a quarter of what is available.", unit="MB"),
    _kept("performance.tiedHeadCodec", "fp16_passthrough",
          "performance.quantizeOnLoad decides for heads too.",
          words=("fp16_passthrough", "q8", "q6", "q4")),
    _kept("performance.compiledDecode", False, "Decoding runs the kernels as they are."),
    _kept("performance.deepseekV4ActivationQAT", False,
          "Activations are not rounded to what a model was trained with."),
)  # fmt: skip

_MEMORY = (
    _row("memorySafety.mode", "word", "safe_auto", "next load",
         "How much memory a model may take; only strict refuses one that may not fit.",
         words=tuple(PROFILES), flag="--memory-safety"),
    _whole("memorySafety.slider", SLIDER.index("safe_auto"), "next load",
           "The same mode as a number; a stored one that disagrees is ignored.",
           range=Range(0, len(SLIDER) - 1)),
    _row("memorySafety.failClosedWhenEstimateUnknown", "switch", False, "next load",
         "Refuse a model whose size cannot be estimated, in every mode."),
    _number("memorySafety.customPhysicalMemoryFraction", None, "next load",
            "Share of the memory that a model may take, instead of the mode's.", range=_SHARE),
    _whole("memorySafety.customAllocatorCacheBytes", None, "next load",
           "What an accelerator's allocator may hold unused, instead of the mode's.",
           unit="bytes"),
    _whole("memorySafety.customMaxConcurrentSequences", None, "live",
           "Requests at the same time, before every other setting of it.", unit="requests"),
    _kept("memorySafety.customDefaultMaxKVSize", None, _NO_ROTATION, kind="whole",
          range=_AT_LEAST_1),
    _kept("memorySafety.allowExperimentalMLXPress", False, "It is about MLX, which is not used."),
)  # fmt: skip

_RESIDENCY = (
    _row("residency.evictionPolicy", "word", "strict_single_model", "live",
         "Keep one model loaded (and one for embeddings), or several as long as the memory lasts.",
         words=("strict_single_model", "manual_multi_model")),
    _row("residency.mode", "word", "after_seconds", "live",
         "When a model that nobody uses is unloaded.",
         words=("immediately", "after_seconds", "never")),
    _number("residency.seconds", 900.0, "live", "How long it stays, for after_seconds.",
            unit="s", range=Range(30, 86_400)),
    _number("residency.loadRAMSoftThreshold", 0.80, "live",
            "Share of the memory beyond which manual_multi_model evicts and a load is tight.",
            range=Range(0, 1)),
    _number("residency.loadRAMHardThreshold", 0.90, "live",
            "Share of the memory beyond which a load is said not to fit.", range=Range(0, 1)),
    _row("guardrails.degenerationDetection", "switch", False, "live",
         "Flag answers that repeat themselves without end."),
)  # fmt: skip

_MODELS = (
    _row("models.directory", "text", None, "live",
         "Where models are fetched to and looked for first; OSAURUS_MODELS_DIR wins over it."),
    _row("models.extraDirectories", "texts", (), "live", "Further folders with models."),
    _row("models.hubCaches", "texts", (), "live", "Further Hugging Face caches."),
    _row("models.aliases", "texts", (), "live",
         "Names that programs ask for, as NAME=MODEL; * at the end of NAME stands for any rest. "
         "A model that is here goes before them.", parse=check_aliases),
    _row("prompt.keepAttributionLine", "switch", False, "live",
         "Leave the billing line of coding agents in the prompt.", flag="--keep-attribution-line"),
)  # fmt: skip

#: In the order of the page and of `osaurus config show`.
SETTINGS: tuple[Setting, ...] = (
    *_NETWORK, *_CONCURRENCY, *_CACHE, *_POWER, *_GENERATION, *_TOOLS, *_MULTIMODAL, *_MTP,
    *_PERFORMANCE, *_MEMORY, *_RESIDENCY, *_MODELS,
)  # fmt: skip

BY_KEY: Mapping[str, Setting] = {setting.key: setting for setting in SETTINGS}

#: What a new file says: explicit, so that it can be seen and changed there.
INITIAL: Mapping[str, Any] = {
    "schemaVersion": SCHEMA_VERSION,
    "concurrency": {"maxConcurrentSequences": "auto"},
}

"""Whether a model fits: what it will take, what its profile allows, and what to say of it.

Pure: facts in, a `LoadPlan` out. Host and device are judged apart. Only the profile `strict`
refuses; every other one says the same as advice. Bytes throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from osaurus.runtime.geometry import Geometry
from osaurus.runtime.machine import Memory
from osaurus.settings.capacity import Capacity
from osaurus.settings.profiles import PROFILES
from osaurus.types.cache import MemoryProfile

#: Share of the available memory that keys and values may grow to, as `engine/memory.py` has it.
KV_SHARE = 0.25
#: Of the budget for them, what snapshots of state may take, as `engine/pools.py` has it.
SNAPSHOT_SHARE = 0.25
#: Verifying drafts allocates and frees this much a step, whatever the model.
SPECULATION_FLOOR_BYTES = 2 << 30
#: Buffers of one forward pass, and what an interpreter with torch takes besides.
ACTIVATION_FLOOR_BYTES = 64 << 20
#: Of the weights' file, what passes through the host's memory at a time on its way to a device.
STAGED_BYTES = 1 << 30
#: `auto` runs one request for each of these in the budget.
AUTO_BYTES_PER_REQUEST = 1 << 30
#: Of a context, what `auto` wants to hold for each request of one model.
AUTO_CONTEXT_TOKENS = 4096
#: Weights that take more than this share of the memory, up to the second, get room to load.
NEAR_MEMORY = (0.55, 0.86)

Verdict = Literal["ok", "tight", "refused", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The settings that decide: the profile, and what the user put in its place."""

    mode: MemoryProfile = "safe_auto"
    custom_fraction: float | None = None
    custom_allocator_cache_bytes: int | None = None
    refuses_unknown: bool = False

    @property
    def refuses(self) -> bool:
        return PROFILES[self.mode].refuses


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFacts:
    """One model and how it is to run. `weights_bytes` is what its weights take once loaded.
    `geometry` None: the config does not tell. `kv_budget_bytes` is the user's own limit."""

    model_id: str
    weights_bytes: int
    geometry: Geometry | None
    capacity: int
    context_tokens: int | None = None
    chunk_tokens: int = 512
    kv_item_bytes: int = 2
    kv_budget_bytes: int | None = None
    snapshots: int = 50
    drafts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingSet:
    """What a loaded model takes where it runs."""

    weights_bytes: int
    kv_bytes: int
    state_bytes: int
    activation_bytes: int
    speculation_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.state_bytes + self.scratch_bytes

    @property
    def scratch_bytes(self) -> int:
        """What is allocated and freed at every step."""
        return self.activation_bytes + self.speculation_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One place. `budget_bytes` None is no limit."""

    place: str
    needed_bytes: int
    budget_bytes: int | None
    physical_bytes: int
    available_bytes: int

    @property
    def fits(self) -> bool:
        return self.budget_bytes is None or self.needed_bytes <= self.budget_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """`warnings` are advice, `blocking` are why the model is not loaded. `max_requests` is how
    many of a usual length the memory for keys and values holds, None where that is unknown."""

    model_id: str
    mode: MemoryProfile
    working_set: WorkingSet
    is_estimated: bool
    judgements: tuple[Judgement, ...]
    allocator_cache_bytes: int | None
    max_requests: int | None
    warnings: tuple[str, ...]
    blocking: tuple[str, ...]

    @property
    def allowed(self) -> bool:
        return not self.blocking

    @property
    def summary(self) -> str:
        places = ", ".join(
            f"{_gb(one.needed_bytes)} of {_gb(one.physical_bytes)} on the {one.place}"
            + ("" if one.budget_bytes is None else f" ({_gb(one.budget_bytes)} allowed)")
            for one in self.judgements
        )
        return f"needs about {places}: {describe(self.working_set)}"


def describe(found: WorkingSet) -> str:
    parts = (
        ("weights", found.weights_bytes),
        ("keys and values up to", found.kv_bytes),
        ("states", found.state_bytes),
        ("activations", found.activation_bytes),
        ("speculation", found.speculation_bytes),
    )
    return ", ".join(f"{name} {_gb(size)}" for name, size in parts if size)


def resolve_capacity(capacity: Capacity, limits: Limits, memory: Memory, *, is_device: bool) -> int:
    """Requests of one model at the same time; `auto` from the budget of where models run."""
    limit = capacity.limit(on_accelerator=is_device)
    if capacity.requests != "auto":
        return limit
    budget = budget_of(limits, memory.physical_bytes)
    room = memory.physical_bytes if budget is None else budget
    return max(1, min(limit, room // AUTO_BYTES_PER_REQUEST))


def budget_of(limits: Limits, physical_bytes: int, weights_bytes: int = 0) -> int | None:
    """What a loaded model may take of a memory; None for no limit.

    Worked example, safe_auto: of 10 GB 7 may be taken; weights of 6 GB raise that to 6.6.
    """
    fraction = limits.custom_fraction
    if fraction is None:
        fraction = PROFILES[limits.mode].load_fraction
        if fraction is None:
            return None
        share = weights_bytes / physical_bytes
        if not limits.refuses and NEAR_MEMORY[0] < share <= NEAR_MEMORY[1]:
            fraction = max(fraction, min(0.92, share + 0.06))
    return int(fraction * physical_bytes)


def estimate(facts: LoadFacts, available_bytes: int) -> WorkingSet:
    """`available_bytes` is that of the place where the model runs."""
    geometry = facts.geometry
    if geometry is None:
        kv, state = max(int(0.2 * facts.weights_bytes), 512 << 20), 0
        activations = ACTIVATION_FLOOR_BYTES
    else:
        kv, state = _memory_of_requests(facts, geometry, available_bytes)
        activations = _activations(facts, geometry)
    speculation = max(SPECULATION_FLOOR_BYTES, 2 * activations) if facts.drafts else 0
    return WorkingSet(
        weights_bytes=facts.weights_bytes,
        kv_bytes=kv,
        state_bytes=state,
        activation_bytes=activations,
        speculation_bytes=speculation,
    )


def _memory_of_requests(facts: LoadFacts, geometry: Geometry, available: int) -> tuple[int, int]:
    """Blocks of a full batch of full contexts and the states beside them, within the budget
    that the engine gives both."""
    context = geometry.context_tokens or 2048
    context = min(context, facts.context_tokens or context)
    blocks = facts.capacity * geometry.kv_bytes(context, facts.kv_item_bytes)
    slots = facts.capacity * geometry.state_bytes
    snapshots = facts.snapshots * geometry.state_bytes
    budget = facts.kv_budget_bytes or int(KV_SHARE * available)
    budget = min(budget, blocks + slots + snapshots)
    state = min(slots + min(snapshots, int(SNAPSHOT_SHARE * budget)), budget)
    return min(blocks, budget - state), state


def _requests_that_fit(facts: LoadFacts, available: int) -> int | None:
    geometry = facts.geometry
    if geometry is None:
        return None
    context = min(geometry.context_tokens or 2048, facts.context_tokens or AUTO_CONTEXT_TOKENS)
    tokens = min(context, AUTO_CONTEXT_TOKENS)
    one = geometry.kv_bytes(tokens, facts.kv_item_bytes) + geometry.state_bytes
    budget = facts.kv_budget_bytes or int(KV_SHARE * available)
    return max(1, budget // max(1, one))


def _activations(facts: LoadFacts, geometry: Geometry) -> int:
    """A chunk of rows through the widest layer in float32, one matrix of it in full, logits."""
    rows = facts.chunk_tokens + facts.capacity
    wide = max(geometry.intermediate_size, geometry.hidden_size)
    bytes_of_rows = 4 * rows * (4 * geometry.hidden_size + 3 * wide)
    matrix = 2 * wide * geometry.hidden_size
    logits = 4 * geometry.vocab_size * facts.capacity * 2
    return ACTIVATION_FLOOR_BYTES + bytes_of_rows + matrix + logits


def plan_load(
    facts: LoadFacts,
    limits: Limits,
    host: Memory,
    device: Memory | None = None,
    *,
    others_bytes: int = 0,
) -> LoadPlan:
    """`others_bytes` is what stays loaded beside it, and what is being loaded."""
    place = device or host
    needs = estimate(facts, place.available_bytes)
    judgements = [_judge(place, needs.total_bytes + others_bytes, facts, limits)]
    if device is not None:
        staged = min(facts.weights_bytes, STAGED_BYTES) + ACTIVATION_FLOOR_BYTES
        judgements.append(_judge(host, staged, facts, limits))
    issues = [_too_large(facts, limits, one, needs) for one in judgements if not one.fits]
    is_known = facts.geometry is not None and facts.weights_bytes > 0
    refused = issues if limits.refuses else []
    advice = [] if limits.refuses else issues
    if not is_known:
        unknown = (
            f"{facts.model_id}: its config does not tell what it will take, and memorySafety."
            f"mode {limits.mode} wants to know; set it to safe_auto to load it all the same"
        )
        if limits.refuses or limits.refuses_unknown:
            refused = [*refused, unknown]
    return LoadPlan(
        model_id=facts.model_id,
        mode=limits.mode,
        working_set=needs,
        is_estimated=is_known,
        judgements=tuple(judgements),
        allocator_cache_bytes=allocator_cache(limits, needs),
        max_requests=_requests_that_fit(facts, place.available_bytes),
        warnings=tuple(advice),
        blocking=tuple(refused),
    )


def allocator_cache(limits: Limits, needs: WorkingSet) -> int | None:
    """What an accelerator's allocator may hold unused: never less than a step's scratch, else
    every step would allocate it anew. None is no limit."""
    limit = limits.custom_allocator_cache_bytes
    if limit is None:
        limit = PROFILES[limits.mode].allocator_cache_bytes
    return None if limit is None else max(limit, needs.scratch_bytes)


def _judge(place: Memory, needed: int, facts: LoadFacts, limits: Limits) -> Judgement:
    weights = facts.weights_bytes if needed >= facts.weights_bytes else 0
    return Judgement(
        place=place.name,
        needed_bytes=needed,
        budget_bytes=budget_of(limits, place.physical_bytes, weights),
        physical_bytes=place.physical_bytes,
        available_bytes=place.available_bytes,
    )


def _too_large(facts: LoadFacts, limits: Limits, one: Judgement, needs: WorkingSet) -> str:
    assert one.budget_bytes is not None
    share = 100 * one.budget_bytes / one.physical_bytes
    origin = f"memorySafety.mode {limits.mode}"
    if limits.custom_fraction is not None:
        origin = "memorySafety.customPhysicalMemoryFraction"
    advice = "lower performance.maxContextTokens or concurrency.maxConcurrentSequences"
    if needs.weights_bytes > one.budget_bytes:
        advice = "choose a smaller quantization, or set performance.quantizeOnLoad"
    return (
        f"{facts.model_id} needs about {_gb(one.needed_bytes)} on the {one.place} "
        f"({describe(needs)}), and {origin} allows {_gb(one.budget_bytes)}, {share:.0f} % of "
        f"{_gb(one.physical_bytes)}; {advice}, or raise memorySafety."
        "customPhysicalMemoryFraction"
    )


def feasibility(
    *,
    needed_bytes: int,
    others_bytes: int,
    memory: Memory,
    soft: float = 0.80,
    hard: float = 0.90,
) -> Verdict:
    """For `/health`, in every mode: what pressure a load would be under. Refuses nothing."""
    soft, hard = sorted(min(1.0, max(0.0, share)) for share in (soft, hard))
    projected = needed_bytes + others_bytes
    if projected > hard * memory.physical_bytes:
        return "refused"
    is_tight = projected > soft * memory.physical_bytes or needed_bytes > memory.available_bytes
    return "tight" if is_tight else "ok"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.0f} MB"

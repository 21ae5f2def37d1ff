"""A bench run as text for a person and as JSON with stable keys for a program.

A figure is the median with its lowest and highest repeat; what did not run shows its reason
where a speed would stand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from osaurus.bench.machine import Machine
from osaurus.bench.workloads import Measurement, NotRun, Outcome

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One thing measured: ours, or a peer in the same run. `facts` say what exactly ran."""

    name: str
    outcomes: tuple[Outcome, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    model: str
    machine: Machine
    subjects: tuple[Subject, ...]
    command: str
    repeats: int


def as_json(report: Report) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "command": report.command,
        "model": report.model,
        "repeats": report.repeats,
        "machine": report.machine.as_dict(),
        "subjects": [
            {
                "name": subject.name,
                "facts": dict(subject.facts),
                "results": [_outcome_json(outcome) for outcome in subject.outcomes],
            }
            for subject in report.subjects
        ],
    }


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, NotRun):
        return {"workload": outcome.workload, "ran": False, "reason": outcome.reason}
    return {
        "workload": outcome.workload,
        "ran": True,
        "unit": outcome.unit,
        "median": outcome.median,
        "low": outcome.low,
        "high": outcome.high,
        "values": list(outcome.values),
    }


def as_text(report: Report) -> str:
    """Machine facts, then one line a workload with a column for each subject."""
    machine = report.machine
    lines = [
        f"model    {report.model}",
        f"machine  {machine.cpu}, {machine.cores} cores, {machine.memory_bytes / 1e9:.1f} GB",
        f"load     {machine.load_average} before the run",
        f"isa      {' '.join(machine.isa) or 'unknown'}",
        f"repeats  {report.repeats}, median (lowest to highest)",
    ]
    for subject in report.subjects:
        facts = ", ".join(f"{key} {value}" for key, value in subject.facts.items())
        lines.append(f"{subject.name}  {facts}")
    return "\n".join([*lines, "", _table(report.subjects)])


def _table(subjects: Sequence[Subject]) -> str:
    names = list(dict.fromkeys(o.workload for subject in subjects for o in subject.outcomes))
    rows = [["workload", *(subject.name for subject in subjects)]]
    reasons: list[str] = []
    for name in names:
        row = [name]
        for subject in subjects:
            found = next((o for o in subject.outcomes if o.workload == name), None)
            row.append(_cell(found))
            if isinstance(found, NotRun):
                reasons.append(f"{subject.name}, {name}: did not run: {found.reason}")
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(table + (["", *reasons] if reasons else []))


def _cell(outcome: Outcome | None) -> str:
    if isinstance(outcome, Measurement):
        return f"{outcome.median:.1f} {outcome.unit} ({outcome.low:.1f} to {outcome.high:.1f})"
    return "did not run" if isinstance(outcome, NotRun) else "-"

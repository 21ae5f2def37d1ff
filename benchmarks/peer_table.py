"""The report of `cpu_peers` as markdown: a line a figure, and the goals with what was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Report = Mapping[str, Any]

_DECODING = "while all decode"
_LESS_IS_BETTER = ("ms", "s", "MB", "times")


@dataclass(frozen=True, slots=True)
class _Goal:
    """`figure` of osaurus by `other_figure` of `peer`; no peer: the figure itself."""

    what: str
    figure: str
    peer: str
    limit: float
    is_most: bool = False
    other_figure: str = ""
    is_decode: bool = False


_GOALS = (
    _Goal("decode, one stream, by llama.cpp's", "decode at 64", "llama.cpp", 1.25),
    _Goal("8 streams by vLLM CPU's, prompts included", "8 x 64+", "vLLM CPU", 1.7),
    _Goal("8 streams by vLLM CPU's, while all decode", "8 x 64+", "vLLM CPU", 1.7, is_decode=True),
    _Goal("prefill 512 by vLLM CPU's", "prefill 512", "vLLM CPU", 1.1),
    _Goal("longest gap of 4 streams, ms", "longest gap of 4 streams", "", 100, is_most=True),
    _Goal("newcomer's wait by its wait alone", "newcomer, among by alone", "", 1.5, is_most=True),
    _Goal(
        "growth over torch by llama-server's resident memory",
        "growth over torch after the run",
        "llama.cpp",
        1.3,
        is_most=True,
        other_figure="resident after the run",
    ),
)


def as_markdown(report: Report) -> str:
    names = [*report["programs"]]
    peers = [name for name in names if name != "osaurus"]
    speeds = report["speeds"]
    lines = [
        (
            f"{report['model']}, {report['date']} UTC; {report['machine']['cpu']}, "
            f"{report['threads']} threads, {report['slots']} slots of {report['context']:,} "
            f"tokens. Read {speeds['read_bytes_per_s'] / 1e9:.1f} GB/s; bfloat16 products "
            f"{speeds['bf16_flop_per_s'] / 1e9:.0f} GFLOP/s."
        ),
        "",
        *(
            f"- {name} {facts['version']}: {facts['weights']} weights"
            for name, facts in report["programs"].items()
        ),
        *(f"- {name}: not run: {reason}" for name, reason in report["not_started"].items()),
        "",
    ]
    head = [
        "figure",
        *names,
        *(f"osaurus by {peer}" for peer in peers),
        "roof, file",
        "osaurus of it",
        "roof, bf16",
    ]
    rows = [
        _row(figure, row, names, peers)
        for figure, row in report["rows"].items()
        if "osaurus" in row["programs"]
    ]
    lines += _table(head, rows)
    alone = [
        (figure, row["programs"]["llama-bench"])
        for figure, row in report["rows"].items()
        if "llama-bench" in row["programs"]
    ]
    if alone:
        lines += ["", *(f"llama-bench, {figure}: {_cell(found)} tok/s" for figure, found in alone)]
    reasons = [
        f"- {name}, {figure}: not run: {found['not_run']}"
        for figure, row in report["rows"].items()
        for name, found in row["programs"].items()
        if "not_run" in found
    ]
    if reasons:
        lines += ["", *reasons]
    lines += [
        "",
        *_table(["goal", "found", "limit", "reached"], [_goal(g, report) for g in _GOALS]),
    ]
    return "\n".join(lines) + "\n"


def _row(figure: str, row: Mapping[str, Any], names: list[str], peers: list[str]) -> list[str]:
    programs = row["programs"]
    ours = programs["osaurus"].get("median")
    cells = [f"{figure}, {row['unit']}", *(_cell(programs.get(name, {})) for name in names)]
    for peer in peers:
        other = programs.get(peer, {}).get("median")
        cells.append(f"{ours / other:.2f}" if ours and other else "-")
    roof = row["roof"]
    best = roof["file"]
    share = None
    if best and ours:
        share = best / ours if row["unit"] in _LESS_IS_BETTER else ours / best
    return [
        *cells,
        _number(best) if best else "-",
        f"{100 * share:.0f} %" if share else "-",
        _number(roof["bfloat16"]) if roof["bfloat16"] else "-",
    ]


def _goal(goal: _Goal, report: Report) -> list[str]:
    ours = _median(report, goal.figure, "osaurus", goal.is_decode)
    figure = goal.other_figure or goal.figure
    other = _median(report, figure, goal.peer, goal.is_decode) if goal.peer else 1.0
    limit = f"at {'most' if goal.is_most else 'least'} {goal.limit:g}"
    if ours is None or not other:
        return [goal.what, "not measured", limit, "-"]
    found = ours / other
    is_reached = found <= goal.limit if goal.is_most else found >= goal.limit
    return [goal.what, _number(found), limit, "yes" if is_reached else "**no**"]


def _median(report: Report, figure: str, name: str, is_decode: bool) -> float | None:
    for found, row in report["rows"].items():
        if found.startswith(figure) and found.endswith(_DECODING) == is_decode:
            return row["programs"].get(name, {}).get("median")
    return None


def _cell(found: Mapping[str, Any]) -> str:
    if "not_run" in found:
        return "not run"
    if "median" not in found:
        return "-"
    if len(found["values"]) == 1:
        return _number(found["median"])
    return f"{_number(found['median'])} ({_number(found['low'])} to {_number(found['high'])})"


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]

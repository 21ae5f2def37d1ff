"""The support table of `docs/models.md`: read from recorded outcomes of the parity tests.

One record a transformers version in `golden/models`, made by `scripts/models_table.py`; the
tests compare what they see with the record of the version they run with.
"""

from __future__ import annotations

import json
from pathlib import Path

from osaurus.models.families import FAMILIES
from transformers_families import MADE, NAMED

ROOT = Path(__file__).parents[1]
RECORDS = Path(__file__).parent / "golden" / "models"
PAGE = ROOT / "docs" / "models.md"
#: The table stands between these lines of the page.
BEGIN, END = "<!-- table: scripts/models_table.py -->", "<!-- end of the table -->"

#: family -> "packed", "stacked", "single-slot" or "refused: why"; "; not in bfloat16: why" after
#: a form that serves float32 alone.
Outcomes = dict[str, str]


def record_of(version: str) -> Outcomes | None:
    path = RECORDS / f"transformers-{version}.json"
    return json.loads(path.read_text()) if path.exists() else None


def versions() -> list[str]:
    found = [path.stem.removeprefix("transformers-") for path in RECORDS.glob("*.json")]
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


def table() -> str:
    """Rows by family; a column says how that version of transformers runs it."""
    columns = versions()
    records = [record_of(version) or {} for version in columns]
    lines = ["| family | model_type | here | " + " | ".join(columns) + " |"]
    lines.append("|---" * (len(columns) + 3) + "|")
    reasons: list[str] = []
    for name, model_types in rows():
        here = "native" if all(t in FAMILIES for t in model_types) else "transformers route"
        cells: list[str] = []
        for record in records:
            form, _, reason = record.get(name, "–").partition(": ")
            if reason and reason not in reasons:
                reasons.append(reason)
            form = form.replace("refused", "no").replace("; not in bfloat16", ", float32 only")
            cells.append(f"{form} ({reasons.index(reason) + 1})" if reason else form)
        types = ", ".join(f"`{t}`" for t in model_types)
        lines.append(f"| {name} | {types} | {here} | " + " | ".join(cells) + " |")
    lines.append("")
    lines += [f"- ({index}) {reason}" for index, reason in enumerate(reasons, start=1)]
    return "\n".join(lines).rstrip() + "\n"


def rows() -> list[tuple[str, tuple[str, ...]]]:
    made = {name: (str(config["family"]),) for name, config in MADE.items()}
    return sorted({**NAMED, **made}.items(), key=lambda row: row[0].lower())


def page_with_table(page: str) -> str:
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n{END}{rest.split(END)[1]}"

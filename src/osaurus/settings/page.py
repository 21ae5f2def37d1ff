"""The table of `docs/settings.md`, made from the schema so that it cannot drift.

python -m osaurus.settings.page >> docs/settings.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from osaurus.settings.fields import Setting
from osaurus.settings.schema import SETTINGS

_KEPT = (
    "Settings of other programs. The file keeps them, `osaurus config show` says `no effect`, and "
    "nothing\nhere heeds them."
)


def tables() -> str:
    """One table a section of what is used, then one of what is only kept."""
    sections = dict.fromkeys(setting.path[0] for setting in SETTINGS)
    lines: list[str] = []
    for section in sections:
        used = [one for one in SETTINGS if one.path[0] == section and one.is_used]
        if used:
            lines += [f"### {section}", "", *_table(used), ""]
    lines += ["### Kept without effect", "", _KEPT, "", "| key | why |", "|---|---|"]
    lines += [f"| `{one.key}` | {one.help} |" for one in SETTINGS if not one.is_used]
    lines.append("")
    return "\n".join(lines)


def _table(settings: list[Setting]) -> Iterator[str]:
    yield "| key | default | may be | meaning | counts | environment, flag |"
    yield "|---|---|---|---|---|---|"
    for one in settings:
        names = f"`{one.environment}`" + (f", `{one.flag}`" if one.flag else "")
        default = "unset" if one.default is None else f"`{json.dumps(one.default)}`"
        legal = one.legal.removesuffix("; null leaves it unset") + (
            f" ({one.unit})" if one.unit else ""
        )
        cells = (f"`{one.key}`", default, legal, one.help, one.live, names)
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write(tables())

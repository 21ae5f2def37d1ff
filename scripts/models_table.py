"""Run the parity tests of the transformers route and write what came of them into the docs.

    PYTHONPATH=src:tests python scripts/models_table.py            run, record, write the page
    PYTHONPATH=src:tests python scripts/models_table.py --page     write the page from the records

The record is that of the transformers version which runs this; the page has a column for each.
A family is recorded as refused for the reason that its test was skipped with; any failed test
leaves the records as they are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from support_table import PAGE, RECORDS, ROOT, page_with_table


def run_tests() -> dict[str, str]:
    """Each family's outcome with the installed transformers."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "tests/parity/test_transformers_route.py"]
        done = subprocess.run(
            # The older form of the report is the one that has a test's properties.
            [
                *command,
                "-k",
                "answers_are_those",
                "-o",
                "junit_family=xunit1",
                f"--junitxml={report}",
            ],
            cwd=ROOT,
            check=False,
        )
        if done.returncode:
            raise SystemExit("some tests failed: the records stay as they are")
        cases = list(ElementTree.parse(report).iter("testcase"))
    outcomes: dict[str, str] = {}
    for case in cases:
        found = {p.get("name", ""): p.get("value", "") for p in case.iter("property")}
        outcomes[found["family"]] = found["outcome"]
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--page", action="store_true", help="only write the page")
    if not parser.parse_args().page:
        RECORDS.mkdir(parents=True, exist_ok=True)
        record = RECORDS / f"transformers-{version('transformers')}.json"
        before = record.read_text() if record.exists() else None
        record.unlink(missing_ok=True)  # the tests compare themselves with it
        try:
            before = json.dumps(run_tests(), indent=2, ensure_ascii=False) + "\n"
        finally:
            if before is not None:
                record.write_text(before)
    PAGE.write_text(page_with_table(PAGE.read_text()))


if __name__ == "__main__":
    main()

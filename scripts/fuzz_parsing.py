"""Long fuzzing of the output machine, and the time 1 MB of hostile text takes, format by format.

    PYTHONPATH=src:tests python scripts/fuzz_parsing.py --seconds 60 [FORMAT ...]

Prints one line a format: texts read, the worst of the 1 MB readings (whole and in pieces of 64
characters) and the text that was repeated for it. Fails at the first exception, or when cutting a
text changes its reading. The pytest twin of this file is `tests/props/test_parsing_transcripts.py`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from props.test_parsing_transcripts import fragments
from unit.parsing.test_pathological import FAMILIES, attacks
from unit.parsing.transcripts import TOOLS, WRITERS, every, machine_for, read, separate

MEGABYTE = 1_000_000


def fuzz(family: str, seconds: float, rng: random.Random) -> int:
    """Read random marker salads whole, by single characters and cut at random; count them."""
    parts = fragments(family)
    wholes = [write([("put_note", {"body": "x"})]) for write in WRITERS.get(family, ())]
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        text = "".join(rng.choices(parts, k=rng.randrange(1, 30)))
        if wholes and rng.random() < 0.4:
            base = rng.choice(wholes)
            place = rng.randrange(len(base) + 1)
            text = base[:place] + text[:30] + base[rng.randrange(place, len(base) + 1) :]
        tools = TOOLS if rng.random() < 0.75 else ()
        thinking = rng.random() < 0.3
        whole = read(family, text, tools, thinking=thinking).as_json()
        singles = separate(machine_for(family, tools, thinking=thinking), list(text))
        cuts = [rng.randrange(len(text) + 1) for _ in range(rng.randrange(8))]
        parted = read(family, text, tools, thinking=thinking, cuts=cuts)
        if not whole == singles.as_json() == parted.as_json():
            raise SystemExit(f"{family}: cutting changes how {text!r} reads (cuts {cuts})")
        count += 1
    return count


def worst_megabyte(family: str) -> tuple[float, str]:
    """CPU seconds of the slowest reading of 1 MB, and the unit it repeats."""
    worst, culprit = 0.0, ""
    for unit in attacks(family):
        text = (unit * (MEGABYTE // len(unit) + 1))[:MEGABYTE]
        for thinking in (False, True):
            for size in (MEGABYTE, 64):
                machine = machine_for(family, TOOLS, thinking=thinking)
                start = time.process_time()
                separate(machine, every(text, size))
                spent = time.process_time() - start
                if spent > worst:
                    worst, culprit = spent, unit
    return worst, culprit


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("formats", nargs="*", default=FAMILIES)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options = parser.parse_args()
    sys.stdout.write(f"seed {options.seed}\n")
    for family in options.formats or FAMILIES:
        count = fuzz(family, options.seconds, random.Random(options.seed))
        worst, unit = worst_megabyte(family)
        sys.stdout.write(
            f"{family:14} {count:8} texts   1 MB in at most {worst:.2f} s ({unit!r})\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()

"""The `osaurus` command, also reached by `python -m osaurus`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    from osaurus.cli.app import run_command_line

    # numpy's OpenBLAS would keep a thread a core waiting, by spinning, for products that nothing
    # here asks of it. It reads this once, when numpy is imported; templates' children inherit it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    sys.exit(run_command_line(sys.argv[1:]))


if __name__ == "__main__":
    main()

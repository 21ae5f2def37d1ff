"""The `osaurus` command, also reached by `python -m osaurus`."""

from __future__ import annotations

import sys


def main() -> None:
    from osaurus.cli.app import run_command_line

    sys.exit(run_command_line(sys.argv[1:]))


if __name__ == "__main__":
    main()

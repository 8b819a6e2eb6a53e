"""The command ``slurmrl``, which is the same as ``python -m slurmrl``.

The command imports other modules only after it has set up the handling of Ctrl-C.
"""

from __future__ import annotations

import sys

INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended, as shells report it."""


def main() -> int:
    """Run this process's command line and return its exit code."""
    try:
        from slurmrl.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())

"""``python -m slurmrl`` is the command ``slurmrl``."""

from __future__ import annotations

import sys

from slurmrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

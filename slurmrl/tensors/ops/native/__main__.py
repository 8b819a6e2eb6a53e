"""Build the operators ahead of time: ``python -m slurmrl.tensors.ops.native [cpu] [cuda]``.

Run the command on a login node with compilers. Set SLURMRL_OPS_CACHE to a folder that compute nodes
can read.
"""

from __future__ import annotations

import argparse
import sys

from slurmrl.errors import SlurmrlError
from slurmrl.tensors.ops.native import libraries
from slurmrl.tensors.ops.native.libraries import Half


def main() -> int:
    parser = argparse.ArgumentParser(prog="build-ops", description=__doc__)
    parser.add_argument(
        "half",
        nargs="*",
        type=Half,
        metavar="{cpu,cuda}",
        help="cpu needs a C++ compiler; cuda also needs nvcc (default: cpu and cuda)",
    )
    tools = libraries.find_toolchain()
    status = 0
    for half in parser.parse_args().half or list(Half):
        try:
            path = libraries.library(
                libraries.make(half, tools), libraries.cache_folder(), libraries.host_folder()
            )
        except SlurmrlError as error:
            print(f"build-ops: {half}: {error}", file=sys.stderr)
            status = error.exit_code
        else:
            print(f"{half}: {path}")
    return status


if __name__ == "__main__":
    sys.exit(main())

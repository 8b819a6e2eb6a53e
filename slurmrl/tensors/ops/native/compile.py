"""A program that compiles the CPU or CUDA half and loads the library once as a test.

The program runs in a separate process, so that a faulty library cannot crash the caller. The
program is a script that needs only torch. The script reads a recipe as JSON from standard input and
writes ``<name>.so`` into the folder given as its argument.

nvcc compiles the ``.cu`` files directly, because they do not use torch, and torch's own build would
require a CUDA torch of nvcc's version.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def compile_cuda(recipe: dict[str, Any], folder: Path) -> list[str]:
    """Compile the recipe's ``.cu`` files; return the object files."""
    objects = []
    for source in (name for name in recipe["sources"] if name.endswith(".cu")):
        target = folder / f"{Path(source).stem}.cuda.o"
        command = [recipe["nvcc"], *recipe["nvcc_flags"], "-c", source, "-o", str(target)]
        print(" ".join(command), flush=True)
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        objects.append(str(target))
    return objects


def link_flags(recipe: dict[str, Any], objects: list[str]) -> list[str]:
    flags = ["-Wl,--as-needed", "-Wl,--exclude-libs,ALL", *objects]
    if objects:
        flags += [f"-L{recipe['cuda_home']}/{name}" for name in ("lib64", "lib")]
        flags += ["-lcudart_static", "-lrt", "-ldl", "-lpthread"]
    return flags


def main(folder: Path) -> None:
    recipe = json.load(sys.stdin)
    objects = compile_cuda(recipe, folder)
    from torch.utils import cpp_extension  # The module is slow to import.

    cpp_extension.load(
        name=recipe["name"],
        sources=[name for name in recipe["sources"] if not name.endswith(".cu")],
        extra_cflags=recipe["cxx_flags"],
        extra_ldflags=link_flags(recipe, objects),
        extra_include_paths=[f"{recipe['cuda_home']}/include"] if objects else [],
        build_directory=str(folder),
        with_cuda=False,
        is_python_module=False,
        verbose=True,
    )


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.cmd[0]} failed with status {error.returncode}")

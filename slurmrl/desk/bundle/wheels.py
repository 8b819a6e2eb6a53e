"""The packages that a cluster without a package index installs slurmrl from."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import distribution, distributions
from pathlib import Path
from typing import Final

import slurmrl
from slurmrl.config.schema import Config
from slurmrl.errors import EnvironmentFailure

PACKAGE: Final = "slurmrl"
PLATFORMS: Final = ("_2_28", "_2_27", "_2_17", "2014", "_2_12", "_2_5", "1")
"""Of manylinux; pip takes each literally."""
NOT_BUILT: Final = (".*", "__pycache__", "*.egg-info", "build", "dist", "docs", "runs", "tests")
INDEX: Final = "https://download.pytorch.org/whl"
OMITTED: Final = "none"
_EXTRA: Final = re.compile(r"""extra == ["'](\w+)["']""")
TABLES: Final = (".parquet", ".arrow")
CUDA: Final = "cuda"
"""PyPI's own build of torch."""


def gather(folder: Path, *, python: str, torch: str, extras: Sequence[str]) -> list[Path]:
    """Fill a new folder with wheels of slurmrl and its requirements, for Linux on x86-64.

    The wheels have the versions that are installed here, and include some of slurmrl's extras,
    which need not be installed here. Raises EnvironmentFailure with what pip printed.
    """
    source = Path(slurmrl.__file__).parents[1]
    if not (source / "setup.cfg").exists():
        raise EnvironmentFailure(
            f"{source} has no source of slurmrl to make its wheel of: run slurmrl bundle in a "
            "checkout (scripts/setup), or add --no-wheels and carry the wheel over yourself"
        )
    folder.mkdir()
    constraints = folder.with_name("constraints.txt")
    constraints.write_text("".join(f"{line}\n" for line in installed(torch)))
    wanted = requirements(torch, extras)
    _pip(download_command(folder, constraints, wanted, python=python, torch=torch))
    copied = folder.with_name("source")  # a build writes into the tree, and takes what is there
    shutil.copytree(source, copied, ignore=shutil.ignore_patterns(*NOT_BUILT))
    _pip(["wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(copied)])
    if torch == OMITTED:
        for wheel in folder.glob("torch-*.whl"):
            wheel.unlink()
    return sorted(folder.glob("*.whl"))


def requirements(torch: str, extras: Sequence[str] = ()) -> list[str]:
    """What slurmrl needs. Without torch, what torch itself brings along is left to it, too."""
    needed = []
    for line in distribution(PACKAGE).requires or ():
        extra = _EXTRA.search(line)
        if extra is None:
            needed.append(line)
        elif extra[1] in extras:
            needed.append(line.partition(";")[0].strip())
    return [line for line in needed if torch != OMITTED or _name(line) != "torch"]


def extras_of(config: Config, files: Iterable[str]) -> list[str]:
    """The extras of slurmrl that a configuration and its files need."""
    logging, tasks = config.logging, config.evaluation and config.evaluation.tasks
    models = (config.find_model(role) for role in config.roles)
    layouts = [model.backend for model in models if model is not None]
    layouts += [tasks.backend] if tasks else []
    needed = {
        "data": any(name.endswith(TABLES) for name in files),
        "megatron": any(layout.startswith("megatron:") for layout in layouts),
        "mlflow": logging.mlflow is not None,
        "tensorboard": logging.tensorboard,
        "wandb": logging.wandb is not None,
    }
    return [extra for extra, wanted in needed.items() if wanted]


def installed(torch: str) -> list[str]:
    """Return the versions of this environment as constraints.

    The local part of torch's version, which names its build, is left out.
    """
    found = {
        _name(one.metadata["Name"]): one.version.partition("+")[0]
        for one in distributions()
        if one.metadata["Name"]
    }
    found.pop(PACKAGE, None)
    build = f"+{torch}" if torch not in (CUDA, OMITTED) else ""
    return [
        f"{name}=={version}{build if name == 'torch' else ''}"
        for name, version in sorted(found.items())
        if not name.startswith(("nvidia-", "triton"))  # torch names its own
    ]


def download_command(
    folder: Path, constraints: Path, wanted: Sequence[str], *, python: str, torch: str
) -> list[str]:
    index = [] if torch in (CUDA, OMITTED) else ["--extra-index-url", f"{INDEX}/{torch}"]
    return [
        "download",
        "--only-binary=:all:",
        "--implementation=cp",
        f"--python-version={python}",
        *(f"--platform=manylinux{tag}_x86_64" for tag in PLATFORMS),
        *index,
        "-c",
        str(constraints),
        "-d",
        str(folder),
        *wanted,
    ]


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", found[0] if found else requirement).lower()


def _pip(arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "pip", arguments[0], "-q", "--disable-pip-version-check"]
    done = subprocess.run([*command, *arguments[1:]], stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise EnvironmentFailure(
            f"pip {arguments[0]} failed; --no-wheels makes a bundle without packages:\n"
            f"{done.stderr.strip()}"
        )

"""Find or make a Python with torch for CUDA and all modules that scripts/test-gpu imports.

Nothing is downloaded. A new virtual environment sees the packages of an existing Python, and gets
the other packages from a folder of wheels (scripts/make-wheels).
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TESTS_NEED = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
OLDEST_TORCH = (2, 11)
LIMIT_S = 120.0
PROBE = """
import json, platform, site, sys
facts = {"python": platform.python_version(), "paths": [p for p in sys.path if "-packages" in p]}
try:
    import torch
except ImportError as error:
    facts["reason"] = str(error)
else:
    facts.update(torch=torch.__version__, cuda=torch.version.cuda, gpus=[])
    try:
        torch.cuda.init()
        for number in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(number)
            size = f"{about.total_memory / 2**30:.0f} GiB"
            facts["gpus"].append(f"{about.name}, {size}, capability {about.major}.{about.minor}")
    except (RuntimeError, AssertionError) as error:
        facts.update(gpus=[], reason=str(error))
    else:
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["cudnn"] = torch.backends.cudnn.version()
print(json.dumps(facts))
"""


class CannotRunError(Exception):
    """The machine lacks a requirement of the command."""


@dataclass(frozen=True)
class Environment:
    """The Python that runs the sections."""

    python: Path
    torch: dict[str, Any]
    """The output of `PROBE`."""
    missing: list[str] = field(default_factory=list)
    """Requirements that neither the machine nor the wheels have."""


def requirements() -> list[str]:
    """Return the requirements in setup.cfg except torch, and the requirements of the tests."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    lines = parser["options"]["install_requires"].split()
    return [*(line for line in lines if re.split(r"\W", line)[0] != "torch"), *TESTS_NEED]


def probe(python: Path) -> dict[str, Any]:
    """Return facts about a Python and its torch.

    If no GPU can be used, ``reason`` says why.
    """
    try:
        done = subprocess.run(
            [python, "-c", PROBE], capture_output=True, text=True, timeout=LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"reason": str(error)}
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return {"reason": f"exit {done.returncode}: {done.stderr.strip()[-500:]}"}
    return found


def release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def find_torch(named: Path | None) -> tuple[Path, dict[str, Any]]:
    """Return the ``named`` Python or, by default, the first Python whose torch uses a GPU.

    Try the project's virtual environment, this Python and python3. Raises CannotRunError.
    """
    on_path = shutil.which("python3")
    usual = [ROOT / ".venv/bin/python", Path(sys.executable), *([Path(on_path)] if on_path else [])]
    tried = []
    for python in dict.fromkeys([named.absolute()] if named else usual):
        if not named and not python.exists():
            continue
        found = probe(python)
        if found.get("gpus") and release(found["torch"]) >= OLDEST_TORCH:
            return python, found
        torch = f"torch {found['torch']}: " if "torch" in found else ""
        reason = found.get("reason") or ("too old" if found["gpus"] else "it sees no GPU")
        tried.append(f"  {python}: {torch}{reason}")
    first = "no Python here has a torch of 2.11 or newer that can use a GPU:"
    raise CannotRunError("\n".join([first, *tried, "--python names another"]))


def prepare(python: Path, torch: dict[str, Any], wheels: Path, folder: Path) -> Environment:
    """Return the project's virtual environment, unchanged, or make another in ``folder``.

    Raises CannotRunError.
    """
    if python.parent == ROOT / ".venv/bin":
        return Environment(python, torch)
    made = make_venv(python, torch["paths"], folder)
    return Environment(made, torch, install(made, requirements(), wheels))


def make_venv(python: Path, paths: list[str], folder: Path) -> Path:
    """Make a virtual environment that sees the packages of ``python``, which are in ``paths``.

    --system-site-packages alone would not be enough if ``python`` is in an environment itself.
    """
    _run([python, "-m", "venv", "--clear", "--without-pip", "--system-site-packages", folder])
    made = folder / "bin" / "python"
    asked = [made, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    lines = [str(ROOT), *(f"import site; site.addsitedir({path!r})" for path in paths)]
    (Path(_run(asked).strip()) / "machine.pth").write_text("\n".join(lines) + "\n")
    return made


def install(python: Path, needed: list[str], wheels: Path) -> list[str]:
    """Install missing packages; return the ``needed`` packages that are not available.

    Raises CannotRunError if pip is missing.
    """
    carried = sorted(wheels.glob("pip-*.whl"))
    pip = [python, f"{carried[-1]}/pip"] if carried else [python, "-m", "pip"]
    _run([*pip, "--version"])
    command = [*pip, "install", "-q", "--no-index", "--no-compile", "--find-links", wheels]
    if _succeeds([*command, *needed]):
        return []
    return [line for line in needed if not _succeeds([*command, line])]


def _succeeds(command: list[str | Path]) -> bool:
    try:
        _run(command)
    except CannotRunError:
        return False
    return True


def _run(command: list[str | Path]) -> str:
    environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environ)
    if done.returncode != 0:
        text = " ".join(map(str, command))
        raise CannotRunError(f"{text} exited with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout

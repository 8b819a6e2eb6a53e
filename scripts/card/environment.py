"""A Python that has torch for CUDA and all else that the sections of scripts/test-gpu import.

Nothing is downloaded. A virtual environment sees the packages of the Python that it was made from
and gets the rest from a folder of wheels (scripts/make-wheels).
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
    """The machine lacks what the command cannot do without."""


@dataclass(frozen=True)
class Environment:
    """The Python that runs the sections."""

    python: Path
    torch: dict[str, Any]
    """What `PROBE` prints."""
    missing: list[str] = field(default_factory=list)
    """Requirements that neither the machine nor the wheels have."""


def requirements() -> list[str]:
    """What setup.cfg asks for, without torch, and what the tests import."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    lines = parser["options"]["install_requires"].split()
    return [*(line for line in lines if re.split(r"\W", line)[0] != "torch"), *TESTS_NEED]


def probe(python: Path) -> dict[str, Any]:
    """What this Python and its torch are. ``reason``, where there is one, says why no GPU can be
    used.
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
    """The first Python whose torch uses a GPU: the one that is named, else the project's virtual
    environment, the one that runs this, and python3. Raises CannotRunError.
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
    """The project's own virtual environment as it is, or a new one in ``folder``. Raises
    CannotRunError.
    """
    if python.parent == ROOT / ".venv/bin":
        return Environment(python, torch)
    made = make_venv(python, torch["paths"], folder)
    return Environment(made, torch, install(made, requirements(), wheels))


def make_venv(python: Path, paths: list[str], folder: Path) -> Path:
    """A virtual environment that sees the packages in ``paths``, those of ``python``. The option
    --system-site-packages alone would not do where that Python is in an environment itself.
    """
    _run([python, "-m", "venv", "--clear", "--without-pip", "--system-site-packages", folder])
    made = folder / "bin" / "python"
    asked = [made, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    lines = [str(ROOT), *(f"import site; site.addsitedir({path!r})" for path in paths)]
    (Path(_run(asked).strip()) / "machine.pth").write_text("\n".join(lines) + "\n")
    return made


def install(python: Path, needed: list[str], wheels: Path) -> list[str]:
    """Install what is needed and not there yet; return what cannot be had. Raises CannotRunError
    where pip is missing.
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

"""Code of a test that changes a local trial's workers before they import a module."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOOK = """
import os, sys

os.environ[{variable!r}] = {folder!r}
sys.path.append({root!r})

class Hook:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            from {package} import {function}
            {function}()

sys.meta_path.insert(0, Hook())
"""
FOLDER = "TEST_FOLDER"
"""Name of the environment variable with the folder of the test."""


def hooked(folder: Path, trial: str, module: str, function: str) -> list[str]:
    """Return ``code`` with which processes call ``function`` when they import ``module``.

    Each Python process of the trial imports ``sitecustomize`` from the trial's copy of the code.
    """
    write_hook(folder / f"{trial}.hook", module, function)
    return [str(folder / f"{trial}.hook" / "sitecustomize.py")]


def write_hook(hook: Path, module: str, function: str) -> None:
    """Make a folder for PYTHONPATH that calls ``function`` at the import of ``module``."""
    hook.mkdir()
    package, _, name = function.partition(":")
    text = HOOK.format(
        variable=FOLDER,
        folder=str(hook.parent),
        root=str(ROOT),
        module=module,
        package=package,
        function=name,
    )
    (hook / "sitecustomize.py").write_text(text)

"""Code of a test that changes a local trial's workers before they import a module."""

from __future__ import annotations

from pathlib import Path

from tests.support.trials import Site

ROOT = Path(__file__).resolve().parents[2]
HOOK = """
import sys

class Hook:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            from {package} import {function}
            {function}()

sys.meta_path.insert(0, Hook())
"""
FOLDER = "TEST_FOLDER"
"""The variable with the folder of the test."""


def hooked(site: Site, folder: Path, trial: str, module: str, function: str) -> dict[str, str]:
    """Return settings with which processes call ``function`` when they import ``module``."""
    hook, variables = folder / f"{trial}.hook", folder / f"{trial}.variables"
    write_hook(hook, module, function)
    code = site.paths(trial.replace(".", "/")).code
    variables.write_text(f"PYTHONPATH={code}:{hook}:{ROOT}\n{FOLDER}={folder}\n")
    variables.chmod(0o600)
    return {"variables_file": str(variables)}


def write_hook(hook: Path, module: str, function: str) -> None:
    """Make a folder for PYTHONPATH that calls ``function`` at the import of ``module``."""
    hook.mkdir()
    package, _, name = function.partition(":")
    text = HOOK.format(module=module, package=package, function=name)
    (hook / "sitecustomize.py").write_text(text)

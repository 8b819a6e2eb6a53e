from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurmrl import env
from slurmrl.errors import UsageError

PACKAGE = Path(env.__file__).parent


def test_every_environment_variable_is_documented() -> None:
    declared = re.findall(r'Variable\(\s*"(\w+)"', (PACKAGE / "env.py").read_text())
    described = re.findall(
        r"## `(\w+)`\n\n- \*\*Set by:\*\* (?:user|the site|Slurm|slurmrl)\n"
        r"- \*\*Default:\*\* .+\n\n\w.*\.\n",
        env.reference(),
    )
    assert declared
    assert described == declared


def test_every_variable_is_used() -> None:
    names = [name for name, value in vars(env).items() if isinstance(value, env.Variable)]
    text = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    assert not [name for name in names if not re.search(rf"\b(env\.{name}\b|{name}\.get\()", text)]


def test_error_about_an_invalid_value_names_its_variable() -> None:
    assert env.LINK.get({"SLURM_ARRAY_TASK_ID": ""}) == 0
    with pytest.raises(UsageError, match="SLURMRL_OPS='fast': one of auto, torch, native"):
        env.OPS.get({"SLURMRL_OPS": "fast"})

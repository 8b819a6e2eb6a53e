"""Reward functions: rules that judge completions.

A new rule = one file beside ``exact_match.py`` plus one line below; a user's own function or class
is named ``package.module:name`` in the configuration and needs neither (docs/rewards.md).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from slurmrl.errors import UnreadableInputError, UsageError
from slurmrl.registry import Registry, near
from slurmrl.rewards.reward import CheckedReward

REWARDS = Registry(
    "reward",
    {
        "code": "slurmrl.rewards.code:CodeReward",
        "exact_match": "slurmrl.rewards.exact_match:ExactMatch",
        "math": "slurmrl.rewards.math:MathReward",
        "model": "slurmrl.rewards.model:ModelReward",
    },
)


def make(name: str, options: Mapping[str, Any], *, cores: int | None = None) -> CheckedReward:
    """Make the function of a name in the table or of ``module:name``.

    :param cores: CPU cores that it may use; default: those of this process.

    :raises UsageError: an unknown name, an object that is not a reward, or options that it rejects.
    :raises UnreadableInputError: the module cannot be imported.
    """
    kind = _own(name) if ":" in name else REWARDS.load(name)
    return CheckedReward(name, kind, options, cores or len(os.sched_getaffinity(0)))


def _own(reference: str) -> Any:
    """The user's function or class. Exceptions raised inside the module propagate."""
    module_name, _, name = reference.partition(":")
    importlib.invalidate_caches()  # a listing may have been cached while the folder was unreadable
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        missing = error.name is not None and f"{module_name}.".startswith(f"{error.name}.")
        gone = isinstance(error, ModuleNotFoundError) and missing
        why = f"there is no module '{error.name}'" if gone else f"{module_name}: {error}"
        raise UnreadableInputError(f"reward '{reference}': {why}") from error
    except OSError as error:
        if error.filename is None:
            raise
        raise UnreadableInputError(f"reward '{reference}': {module_name}: {error}") from error
    except SyntaxError as error:
        raise UsageError(f"reward '{reference}': {error}") from error
    if not hasattr(module, name):
        public = sorted(attribute for attribute in vars(module) if not attribute.startswith("_"))
        hint = near(name, public)
        raise UsageError(f"reward '{reference}': {module_name} has no '{name}'; {hint}")
    return getattr(module, name)

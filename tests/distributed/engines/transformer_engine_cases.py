"""Functions that ranks run in the tests of TransformerEngine's modules."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from slurmrl.errors import UsageError
from tests.distributed.engines.megatron_cases import Case, make
from tests.support import megatron_cpu, transformer_engine_cpu


def kinds(case: Case) -> set[str]:
    """Names of the classes of all modules."""
    engine: Any = make(case)
    chunks = [getattr(chunk, "module", chunk) for chunk in engine._chunks]
    return {type(module).__name__ for chunk in chunks for module in chunk.modules()}


def fp8_settings(case: Case) -> tuple[dict[str, Any], int]:
    """Settings of megatron-core for FP8, and the tokens of a padded micro-batch of two."""
    engine: Any = make(case)
    names = ("fp8", "fp8_recipe", "fp8_param", "disable_parameter_transpose_cache", "bf16")
    micro = engine._micro(None)
    return {name: getattr(engine._settings, name) for name in names}, len(micro.ids)


def chosen(release: str, dtype: str) -> tuple[bool, list[str]]:
    """Return whether TransformerEngine of this release is used by default, and the warnings."""
    transformer_engine_cpu.install()
    from megatron.core import utils

    from slurmrl.engines.megatron.layers import uses_te

    known = utils._te_version
    utils._te_version = type(utils.get_te_version())(release)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = uses_te(None, torch.device("cuda"), dtype)
    finally:
        utils._te_version = known
    return found, [str(one.message) for one in told]


def without(wanted: bool | None) -> bool | str:
    """Return the selection without TransformerEngine."""
    megatron_cpu.install()
    from slurmrl.engines.megatron.layers import uses_te

    try:
        return uses_te(wanted, torch.device("cuda"), "bfloat16")
    except UsageError as error:
        return str(error)

"""Layouts in the terms of Megatron and RLinf, merged with the backend's string."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from slurmrl.config.allocation import AXES, Allocation, ExpertSizes, parse
from slurmrl.config.allocation.allocation import BACKENDS
from slurmrl.config.schema import Model, ParallelSizes, Rollout
from slurmrl.errors import AllocationError

FIELDS: Final = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
ROLLOUT_FIELDS: Final = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}


class Disagreement(NamedTuple):
    """A problem with one field."""

    field: str
    message: str


def given(model: Model) -> dict[str, int]:
    """Sizes by axis that the section ``model`` of a role sets."""
    sizes = model.model or ParallelSizes()
    return _given(sizes, FIELDS)


def given_rollout(rollout: Rollout) -> dict[str, int]:
    return _given(rollout, ROLLOUT_FIELDS)


def _given(section: ParallelSizes | Rollout, fields: dict[str, str]) -> dict[str, int]:
    values = {axis: getattr(section, field) for axis, field in fields.items()}
    return {axis: size for axis, size in values.items() if size is not None}


def is_engine_only(backend: str) -> bool:
    return backend.strip() in BACKENDS


def merge(
    backend: str, sizes: dict[str, int], gpus: int | None
) -> tuple[str, list[tuple[str, str]]]:
    """The complete string for a backend and separate sizes, and their disagreements as pairs of
    axis and message.

    If ``backend`` is only an engine's name, the layout comes from ``sizes``, and data parallelism
    fills the rest of ``gpus``.
    """
    if not sizes:
        return backend, []
    if is_engine_only(backend):
        try:
            return str(_allocation(backend.strip(), sizes, gpus)), []
        except AllocationError as error:
            axis = next((name for name in ("etp", "ep", "cp", "pp", "tp") if name in sizes), "tp")
            return f"{backend.strip()}:d1", [(axis, str(error))]
    try:
        allocation = parse(backend)
    except AllocationError:
        return backend, []  # reported where strings are checked
    return backend, list(_differences(allocation, sizes))


def _allocation(backend: str, sizes: dict[str, int], gpus: int | None) -> Allocation:
    full = dict.fromkeys(AXES, 1) | {axis: n for axis, n in sizes.items() if axis in AXES}
    copy = full["tp"] * full["pp"] * full["cp"]
    if gpus is not None:
        if gpus % copy:
            raise AllocationError(
                f"one copy of the model needs {copy} GPUs (tensor * pipeline * context), which "
                f"does not divide the {gpus} GPUs of cluster.hosts * cluster.workers_per_host"
            )
        full["dp"] = gpus // copy
    experts = None
    if full["ep"] > 1 or "etp" in sizes:
        stage = full["dp"] * full["tp"] * full["cp"]
        tp = sizes.get("etp", full["tp"])
        if stage % (tp * full["ep"]):
            raise AllocationError(
                f"experts need {tp * full['ep']} ranks (expert tensor * expert), which does not "
                f"divide the {stage} ranks of a pipeline stage"
            )
        experts = ExpertSizes(stage // (tp * full["ep"]), tp, full["ep"])
    return Allocation(backend, sizes=full, experts=experts)


def _differences(allocation: Allocation, sizes: dict[str, int]) -> Iterator[tuple[str, str]]:
    stated = {**allocation.sizes, "etp": allocation.etp}
    letters = {"tp": "t", "pp": "p", "cp": "c", "ep": "e", "etp": "t of ffn"}
    for axis, size in sizes.items():
        if stated[axis] != size:
            yield (
                axis,
                f"{size} is not allowed: backend '{allocation}' says {letters[axis]} = "
                f"{stated[axis]}; both must agree",
            )

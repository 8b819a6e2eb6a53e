"""Graphs on a CPU that behave like CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slurmrl.tensors.ops.sampling import Sampled


class RecordedGraphs:
    """Captures functions as graphs, and counts replays."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, compute: Callable[[], Sampled]) -> RecordedGraph:
        self.captured += 1
        return RecordedGraph(compute, self)


class RecordedGraph:
    """The operators that a function called. A replay calls them with the numbers, shapes and memory
    of the capture, without the Python code between them.
    """

    def __init__(self, compute: Callable[[], Sampled], graphs: RecordedGraphs) -> None:
        self._graphs, self._computed = graphs, True
        with _Recorder() as recorder:
            self.samples = compute()
        self._calls = recorder.calls

    def replay(self) -> None:
        self._graphs.replayed += 1
        if self._computed:  # A capture on a GPU would not compute.
            self._computed = False
            return
        for function, args, kwargs, results in self._calls:
            _overwrite(results, function(*args, **kwargs))


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        results = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, results))
        return results


def _overwrite(old: Any, new: Any) -> None:
    """Write new results to the memory of earlier results. Views already contain them."""
    for target, values in zip(tree_leaves(old), tree_leaves(new), strict=True):
        if isinstance(target, Tensor) and target.data_ptr() != values.data_ptr():
            target.copy_(values)

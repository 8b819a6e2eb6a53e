"""megatron-core in processes without a GPU.

Megatron uses torch.cuda for its device, streams and random states. Here, each module of megatron
gets a separate ``torch`` object that represents the CPU. The rest of the process uses the real
``torch``. Rank processes call ``install`` before they make a megatron engine.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from slurmrl.plan import engine_rules

FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like")
MODULES = (
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel",
    "megatron.core.transformer.moe.moe_layer",
)


class _Cuda(types.SimpleNamespace):
    """The parts of torch.cuda that megatron uses."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _Nothing:
    """A stream or an event of a device without streams."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: _Nothing()


def _cuda() -> _Cuda:
    def nothing(*_: Any, **__: Any) -> None:
        pass

    return _Cuda(
        current_device=lambda: torch.device("cpu"),
        device_count=lambda: 1,
        synchronize=nothing,
        set_device=nothing,
        empty_cache=nothing,
        Stream=_Nothing,
        Event=_Nothing,
        current_stream=lambda *_: _Nothing(),
        default_stream=lambda *_: _Nothing(),
        stream=lambda _: contextlib.nullcontext(),
        manual_seed=lambda seed: torch.default_generator.manual_seed(seed),
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
    )


def _on_cpu(factory: Any) -> Any:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return made


class _Distributed(types.ModuleType):
    """torch.distributed, plus the collectives over unequal tensors that gloo lacks."""

    def __init__(self) -> None:
        super().__init__("torch.distributed")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    @staticmethod
    def all_gather(outputs: list[torch.Tensor], own: torch.Tensor, group: Any = None) -> None:
        longest = max(len(output) for output in outputs)
        padded = own.new_zeros((longest, *own.shape[1:]))
        padded[: len(own)] = own
        whole = [torch.empty_like(padded) for _ in outputs]
        torch.distributed.all_gather(whole, padded, group=group)
        for output, part in zip(outputs, whole, strict=True):
            output.copy_(part[: len(output)])

    @staticmethod
    def reduce_scatter(output: torch.Tensor, parts: list[torch.Tensor], group: Any = None) -> None:
        whole = torch.cat(parts)
        torch.distributed.all_reduce(whole, group=group)
        output.copy_(whole.split([len(part) for part in parts])[group.rank()])


class TorchOnCPU(types.ModuleType):
    """The real torch, with the CPU as its device."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _cuda()
        self.distributed = _Distributed()
        for name in FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def called_by_megatron(depth: int = 2) -> bool:
    """Return whether the function ``depth`` frames above belongs to megatron."""
    name = str(sys._getframe(depth).f_globals.get("__name__", ""))
    return name.startswith(("megatron.", "transformer_engine."))


def _patch_tensors() -> None:
    """Replace methods of tensors. This affects all callers, so the methods check whether megatron
    calls them.
    """
    real_type, real_cuda = torch.Tensor.type, torch.Tensor.cuda

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = real_type(self, *args, **kwargs)
        if args or kwargs or not called_by_megatron():
            return found
        return found.replace("torch.", "torch.cuda.", 1)

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if called_by_megatron() else real_cuda(self, *args, **kwargs)

    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = cuda  # type: ignore[method-assign]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def accept() -> None:
    """Let the commands of this process accept megatron for workers without GPUs."""
    engine_rules.ENGINES["megatron"] = replace(engine_rules.ENGINES["megatron"], needs_gpu=False)  # type: ignore[index]


def install() -> None:
    """Import megatron-core and let it work on the CPU; once per process."""
    fake = TorchOnCPU()
    with _quiet():
        for name in MODULES:
            importlib.import_module(name)
    if "megatron_cpu" in vars(sys.modules["megatron.core"]):
        return
    vars(sys.modules["megatron.core"])["megatron_cpu"] = True
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and vars(module).get("torch") is torch:
            vars(module)["torch"] = fake
    _patch_tensors()
    _patch_megatron()


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    def get_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state

    def to_cpu(tensor: torch.Tensor | None, as_numpy: bool = False, **_: Any) -> Any:
        return tensor.numpy() if as_numpy and tensor is not None else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu

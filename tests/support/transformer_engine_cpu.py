"""TransformerEngine in processes without a GPU.

Its Python code and megatron's adapters run unchanged. Its CUDA kernels, which another extension
module contains, are replaced by the same operations of torch. Unused features (quantized tensors,
fused attention, triton, ONNX) exist only by name. ``install`` must run before the first import of
megatron-core, in processes that do nothing else.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
import warnings
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support import megatron_cpu

FOLDER = Path(__file__).parents[2] / "build" / "transformer_engine"
"""The folder of the package's Python part, which scripts/test makes."""
WITHOUT = (
    "einops",
    "transformer_engine.pytorch.onnx_extensions",
    "transformer_engine.pytorch.triton",
    "transformer_engine.pytorch.triton.cross_entropy",
    "transformer_engine.pytorch.triton.pad",
    "transformer_engine.pytorch.triton.permutation",
)


class _Numbers:
    """An enumeration whose members are created on access."""

    def __init__(self) -> None:
        self._members: dict[str, int] = {}

    def __getattr__(self, name: str) -> int:
        return self._members.setdefault(name, len(self._members))


class _Names(types.ModuleType):
    """A module in which every name exists."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found: Any = _Numbers() if name.startswith("NVTE") else type(name, (), {})
        if name == "Float8BlockScaleTensorFormat":
            found = _Numbers()
        setattr(self, name, found)
        return found


class _Kernels(_Names):
    """The replaced extension module."""

    DType = IntEnum(
        "DType",
        "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1",
        start=0,
    )
    FP8FwdTensors = IntEnum(
        "FP8FwdTensors",
        [f"GEMM{n}_{kind}" for n in (1, 2, 3) for kind in ("INPUT", "WEIGHT", "OUTPUT")],
        start=0,
    )
    FP8BwdTensors = IntEnum(
        "FP8BwdTensors",
        [f"GRAD_{kind}{n}" for n in (1, 2, 3) for kind in ("OUTPUT", "INPUT")],
        start=0,
    )

    @staticmethod
    def get_num_cublas_streams() -> int:
        return 1

    @staticmethod
    def rmsnorm_fwd(
        x: Tensor, weight: Tensor, eps: float, *more: Any
    ) -> tuple[Tensor, None, Tensor]:
        """Return the normalized x [N, h], and the factor of each row [N]."""
        zero_centered = bool(more[-1])
        scale = x.double().square().mean(-1).add(eps).rsqrt()
        made = x.double() * scale[:, None] * (weight.double() + zero_centered)
        return made.to(x.dtype), None, scale.float()

    @staticmethod
    def rmsnorm_bwd(
        grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, _: int, zero_centered: bool
    ) -> tuple[Tensor, Tensor]:
        rows, normed = grad.double(), x.double() * scale[:, None]
        inner = rows * (weight.double() + zero_centered)
        back = (inner - normed * (inner * normed).mean(-1, keepdim=True)) * scale[:, None]
        return back.to(x.dtype), (rows * normed).sum(0).to(weight.dtype)

    @staticmethod
    def generic_gemm(
        a: Tensor,
        a_turned: bool,
        b: Tensor,
        b_turned: bool,
        out: Tensor | None,
        *more: Any,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None, None, None]:
        """Return the product B A of tensors whose last dimension is the columns. A tensor is
        transposed if its flag is set.
        """
        bias, grad, accumulate = more[2], more[6], more[9]
        made = _product(a.flatten(0, -2), a_turned, b.flatten(0, -2), b_turned)
        if bias is not None and not grad:
            made += bias
        if not b_turned:
            made = made.view(*b.shape[:-1], -1)
        if out is not None:
            made = out.copy_(out + made if accumulate else made)
        return made, b.flatten(0, -2).sum(0) if grad and bias is not None else None, None, None

    @staticmethod
    def te_general_grouped_gemm(
        a: Sequence[Tensor],
        a_turned: bool,
        b: Sequence[Tensor],
        b_turned: bool,
        out: list[Tensor],
        _: Any,
        splits: list[int],
        biases: Any,
        *more: Any,
    ) -> Any:
        single, accumulate = more[1], more[6]
        outs = out[0].split(splits) if single else out
        for one, other, made in zip(a, b, outs, strict=True):
            product = _product(one, a_turned, other, b_turned)
            made.copy_(made + product if accumulate else product)
        return biases

    @staticmethod
    def multi_tensor_l2norm(
        _: int, __: Any, lists: list[list[Tensor]], per_tensor: bool
    ) -> tuple[Tensor, Tensor | None]:
        norms = torch.stack([t.float().norm() for t in lists[0]])
        return norms.norm()[None], norms if per_tensor else None

    @staticmethod
    def multi_tensor_scale(_: int, __: Any, lists: list[list[Tensor]], scale: float) -> None:
        for source, target in zip(*lists, strict=True):
            target.copy_(source * scale)


def _product(a: Tensor, a_turned: bool, b: Tensor, b_turned: bool) -> Tensor:
    return (b.T if b_turned else b) @ (a.T if a_turned else a)


def install() -> None:
    """Import TransformerEngine and megatron-core and let both work on the CPU; once per process."""
    if "transformer_engine_torch" in sys.modules:
        return
    if not FOLDER.is_dir():
        raise FileNotFoundError(f"{FOLDER} is not there: scripts/test makes it")
    sys.path.insert(0, str(FOLDER))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # Do not search for shared objects.
    for name in WITHOUT:
        _add(_Names(name))
    sys.modules["transformer_engine_torch"] = _Kernels("transformer_engine_torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        common = importlib.import_module("transformer_engine.common")
        vars(common)["load_framework_extension"] = lambda _: None
        importlib.import_module("transformer_engine.pytorch")
    megatron_cpu.install()
    _patch()


def _add(module: types.ModuleType) -> None:
    vars(module)["__path__"] = []
    parent, _, name = module.__name__.rpartition(".")
    sys.modules[module.__name__] = module
    if parent in sys.modules:
        setattr(sys.modules[parent], name, module)


def _patch() -> None:
    warnings.filterwarnings("ignore", "To guarantee overlapping")  # about CUDA streams
    warnings.filterwarnings("ignore", "fp8_autocast is deprecated")  # megatron calls it.
    fake = megatron_cpu.TorchOnCPU()
    fake.cuda.is_available = lambda: True
    fake.cuda.is_current_stream_capturing = lambda: False
    properties = types.SimpleNamespace(major=8, minor=0, multi_processor_count=1)
    fake.cuda.get_device_properties = lambda *_: properties
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine.") and vars(module).get("torch") is torch:
            vars(module)["torch"] = fake
    real = torch.Tensor.is_cuda

    def is_cuda(self: Tensor) -> bool:
        return megatron_cpu.called_by_megatron() or bool(real.__get__(self))

    torch.Tensor.is_cuda = property(is_cuda)  # type: ignore[assignment,method-assign]

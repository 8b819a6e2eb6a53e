"""Recognition of GPUs that fail, from the errors of CUDA, NCCL and torch. No torch.

Codes and texts are those of cudaError_t in CUDA's driver_types.h and of cudaGetErrorString. torch
raises them as AcceleratorError with ``error_code``; NCCL, cuBLAS and older versions of torch only
quote the text. A lost GPU (Xid 79) has no code of its own: NVML and the driver name it in words.
Errors that a kernel's own bug causes (illegal address, assert, illegal instruction) are not here,
nor is lack of memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class GpuFault:
    words: str
    certain: bool = True
    """Whether only hardware or driver cause it. If not, a bug in a kernel may, on every host."""


_ECC: Final = GpuFault("uncorrectable ECC error")
_NVLINK: Final = GpuFault("uncorrectable NVLink error")
_GONE: Final = GpuFault("the device is lost")
_NOT_READY: Final = GpuFault("the driver or its fabric manager is not ready")
_MISMATCH: Final = GpuFault("the driver was exchanged")
_CONTAINED: Final = GpuFault("contained error of memory or NVLink", certain=False)
_LAUNCH: Final = GpuFault("unspecified launch failure", certain=False)
_UNKNOWN: Final = GpuFault("unknown error", certain=False)

CODES: Final = {
    100: _GONE,  # cudaErrorNoDevice, of a process that has used one
    214: _ECC,  # cudaErrorECCUncorrectable
    220: _NVLINK,  # cudaErrorNvlinkUncorrectable
    226: _CONTAINED,  # cudaErrorContained
    719: _LAUNCH,  # cudaErrorLaunchFailure
    802: _NOT_READY,  # cudaErrorSystemNotReady
    803: _MISMATCH,  # cudaErrorSystemDriverMismatch
    999: _UNKNOWN,  # cudaErrorUnknown
}
_TEXTS: Final = {
    r"uncorrectable ECC error": _ECC,
    r"uncorrectable NVLink error": _NVLINK,
    r"fallen off the bus|\b(GPU|device)( is| was| has been)? lost\b": _GONE,
    r"no CUDA-capable device is detected": _GONE,
    r"\bXid\b": GpuFault("Xid", certain=False),
    r"system not yet initialized": _NOT_READY,
    r"unsupported display driver / cuda driver combination": _MISMATCH,
    r"invalid access of peer GPU memory over nvlink or a hardware error": _CONTAINED,
    r"unspecified launch failure": _LAUNCH,
    r"cuda (error|failure)[^a-z]{0,8}unknown error": _UNKNOWN,
}
TEXTS: Final = {re.compile(text, re.IGNORECASE): fault for text, fault in _TEXTS.items()}


def find_fault(error: BaseException) -> GpuFault | None:
    """Return the fault that an exception reports. A code takes precedence over the text."""
    if not isinstance(error, RuntimeError):
        return None
    code = getattr(error, "error_code", None)
    return CODES.get(code) if isinstance(code, int) else find_in(str(error))


def find_in(text: str) -> GpuFault | None:
    """Return the fault that a text names."""
    return next((fault for pattern, fault in TEXTS.items() if pattern.search(text)), None)

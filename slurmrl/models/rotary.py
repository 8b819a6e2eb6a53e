"""Rotary position embedding (Su et al. 2021, RoFormer) with the scalings of ``rope.py``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slurmrl.models.rope import Rope
from slurmrl.tensors.ops.arguments import wide

Rotation = tuple[Tensor, Tensor]
"""cos and sin, each [T, 1, D], as ``tensors.ops.elementwise.rotate`` takes them."""


class RotaryTable:
    """The angles of all positions.

    It has no parameters, so it does not depend on the device or sharding of its model.
    """

    def __init__(self, rope: Rope, head_dim: int) -> None:
        self._rope, self._head_dim = rope, head_dim
        self._frequencies, self._scale = frequencies(rope, head_dim)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Return the cos and sin for positions [T], as ``dtype``.

        They are computed in float32, or in float64 if ``dtype`` is float64.
        """
        if self._frequencies.dtype != wide(dtype):
            self._frequencies, _ = frequencies(self._rope, self._head_dim, wide(dtype))
        self._frequencies = self._frequencies.to(positions.device)  # copied once
        angles = (positions.to(wide(dtype))[:, None] * self._frequencies)[:, None, :]
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def frequencies(
    rope: Rope, head_dim: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, float]:
    """Angle per position of each pair [D/2] (on the CPU), and the factor of cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=dtype, device="cpu") / head_dim
    base = rope.theta**exponents
    if rope.kind == "linear":
        return 1.0 / base / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(1.0 / base, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(base, rope, head_dim), _yarn_scale(rope)
    return 1.0 / base, 1.0


def _llama3(freqs: Tensor, rope: Rope) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and interpolate between them.

    This follows the reference code of Llama 3.1.
    """
    low, high = float(rope.options["low_freq_factor"]), float(rope.options["high_freq_factor"])
    wavelengths = 2 * math.pi / freqs
    smooth = (rope.original_length / wavelengths - low) / (high - low)
    blended = (1 - smooth) * freqs / rope.factor + smooth * freqs
    scaled = torch.where(wavelengths > rope.original_length / low, freqs / rope.factor, blended)
    return torch.where(wavelengths < rope.original_length / high, freqs, scaled)


def _yarn(base: Tensor, rope: Rope, head_dim: int) -> Tensor:
    """NTK-by-parts interpolation (Peng et al. 2023, YaRN, section 3.2)."""

    def turning_pair(turns: float) -> float:
        """The pair that makes this many rotations within the original length."""
        return (
            head_dim
            * math.log(rope.original_length / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low = turning_pair(float(rope.options.get("beta_fast") or 32))
    high = turning_pair(float(rope.options.get("beta_slow") or 1))
    if rope.options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    pairs = torch.arange(head_dim // 2, dtype=base.dtype, device="cpu")
    keep = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return (1 - keep) / (rope.factor * base) + keep / base


def _yarn_scale(rope: Rope) -> float:
    """The attention temperature of YaRN (section 3.4), applied to cos and sin."""

    def grown(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    stated = rope.options.get("attention_factor")
    if stated is not None:
        return float(stated)
    mscale, all_dim = rope.options.get("mscale"), rope.options.get("mscale_all_dim")
    if mscale and all_dim:
        return grown(float(mscale)) / grown(float(all_dim))
    return grown(1.0)

"""The rotary position settings of a ``config.json``. Torch-free.

They have the ``rope_parameters`` form of transformers 5, or the older form with ``rope_theta`` and
``rope_scaling``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KINDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # kind: required fields, optional fields
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor",),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
PARTIAL = "partial_rotary_factor"
WHOLE_HEADS = (None, 1)
"""Values of that field with which all dims of a head are rotated."""
ORIGINAL_LENGTH = "original_max_position_embeddings"
WITH_ORIGINAL_LENGTH = ("llama3", "yarn")
REFUSED: Mapping[str, str] = {
    "longrope": "its angles depend on the length of a sequence, so cached keys would have to be "
    "rotated again while it grows",
}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """One kind of rotary scaling and its numbers.

    ``dynamic`` is the unscaled rotation up to ``max_position_embeddings``. Longer sequences are
    refused, because transformers' angles would depend on the longest sequence of a batch.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_length: int = 0
    """Context length before the extension (llama3, yarn)."""
    options: Mapping[str, Any]
    """The kind's remaining fields, as in the file."""

    @staticmethod
    def from_hf(values: Mapping[str, Any], max_positions: int) -> tuple[Rope, list[str]]:
        """Read the rotary fields of a ``config.json`` like transformers; the list has the problems.

        The older ``rope_scaling`` precedes ``rope_parameters``, and an original length beside them
        precedes one inside.
        """
        stated = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
        kind = stated.pop("rope_type", None) or stated.pop("type", None) or "default"
        stated.pop("type", None)
        partial = stated.pop(PARTIAL, None)
        if partial not in WHOLE_HEADS:
            return Rope(options={}), [f"{PARTIAL} {partial!r} is not supported, only 1"]
        theta = stated.pop("rope_theta", None) or values.get("rope_theta") or 10000.0
        if kind not in KINDS:
            reason = REFUSED.get(kind) or f"it is not one of {', '.join(KINDS)}"
            return Rope(options={}), [f"rope_type '{kind}' is not supported: {reason}"]
        problems = _field_problems(kind, {**stated, "rope_theta": theta})
        if problems:
            return Rope(options={}), problems
        original = 0
        if kind in WITH_ORIGINAL_LENGTH:
            inside = stated.pop(ORIGINAL_LENGTH, None)
            original = values.get(ORIGINAL_LENGTH) or inside or max_positions
        factor = stated.pop("factor", None) or 1.0
        rope = Rope(
            kind=kind,
            theta=float(theta),
            factor=float(factor),
            original_length=int(original),
            options=stated,
        )
        return rope, []

    def to_hf(self) -> dict[str, Any]:
        """The ``rope_parameters`` object of a ``config.json``."""
        values: dict[str, Any] = {"rope_theta": self.theta, "rope_type": self.kind}
        if "factor" in KINDS[self.kind][0]:
            values["factor"] = self.factor
        if self.original_length:
            values[ORIGINAL_LENGTH] = self.original_length
        return {**values, **self.options}


def _field_problems(kind: str, stated: Mapping[str, Any]) -> list[str]:
    required, optional = KINDS[kind]
    missing = [name for name in required if stated.get(name) is None]
    allowed = {*required, *optional, "rope_theta", ORIGINAL_LENGTH}
    unknown = sorted(set(stated) - allowed)
    known = ", ".join(sorted(allowed))
    return [
        *(
            f"rope field '{name}' is {value!r}, must be a number"
            for name, value in stated.items()
            if name in allowed and not isinstance(value, int | float | None)
        ),
        *(f"rope_type '{kind}' needs the field '{name}'" for name in missing),
        *(f"rope_type '{kind}' has no field '{name}'; it has: {known}" for name in unknown),
    ]

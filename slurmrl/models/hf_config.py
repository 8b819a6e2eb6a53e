"""The architecture of a model that transformers runs: its unchanged ``config.json``. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurmrl.errors import UsageError
from slurmrl.models.config import Head
from slurmrl.models.length_limit import TABLE, LengthLimit, length_limit
from slurmrl.tensors.checkpoint.stored import TensorSlice
from slurmrl.tensors.layout.box import Index

MODULE = "inner."
"""The prefix of parameter names; the rest is transformers' name."""


@dataclass(frozen=True, kw_only=True)
class HFConfig:
    """The config of a model for ``implementation: hf``. Whether transformers supports the family is
    known only when the model is built."""

    model_type: str
    values: Mapping[str, Any]
    positions: int | None = None
    """Size of the loaded model's position table, if it has one."""

    @staticmethod
    def from_hf(values: Mapping[str, Any], *, strict: bool = False) -> HFConfig:
        """Read a ``config.json`` object. Raises UsageError if it lacks the model type or requests
        an unsupported loss."""
        model_type = values.get("model_type")
        if not isinstance(model_type, str):
            raise UsageError(
                f"'model_type' is {model_type!r}, must be a model type of transformers"
            )
        if values.get("output_router_logits") and values.get("router_aux_loss_coef") != 0:
            raise UsageError(
                "implementation hf does not compute the load-balancing loss of "
                "output_router_logits: set that to false, or use the built-in decoder"
            )
        return HFConfig(model_type=model_type, values=dict(values))

    def check_length(self, tokens: int) -> None:
        """Raises UsageError for a sequence that is longer than the model supports, or whose results
        would depend on the rest of its batch."""
        limits = [length_limit(self.values), self.positions and LengthLimit(self.positions, TABLE)]
        limit = min((limit for limit in limits if limit), default=None)
        if limit is not None and tokens > limit.tokens:
            raise UsageError(
                f"a sequence of {tokens} tokens is too long for this {self.model_type} model: "
                f"{limit.reason}"
            )

    def to_hf(self, *, head: Head = "lm", dtype: str = "float32") -> dict[str, Any]:
        """The ``config.json`` object of an export."""
        values = {**self.values, "dtype": dtype}
        if head == "value":
            values |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
            values.pop("architectures", None)  # the class of the language model
        return dict(sorted(values.items()))


def stored(name: str, shape: Index) -> tuple[TensorSlice, ...]:
    """A parameter's tensor in an export: the one of transformers' name."""
    return (TensorSlice(name.removeprefix(MODULE)),)

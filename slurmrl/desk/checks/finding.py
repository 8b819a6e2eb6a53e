"""The result of a check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from slurmrl.errors import Problem


class Weight(StrEnum):
    FAILED = "failed"
    """The run would fail."""
    WARNING = "warning"
    """The run might fail, or this was not checked."""
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    subject: str
    """``data``, ``reward``, ``tokenizer``, ``weights``, ``disk space``, …"""
    weight: Weight
    message: str
    key: str = ""
    """Dotted key of the setting, or of the line that ``where`` names."""
    where: str = ""
    """File and line; empty for a setting in the configuration."""

    @property
    def problem(self) -> Problem:
        return Problem(self.where, self.key, self.message)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Finding:
        return Finding(**{**values, "weight": Weight(values["weight"])})

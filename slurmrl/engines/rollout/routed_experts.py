"""The experts that SGLang reports of the tokens that it has read.

SGLang keeps them beside keys and values: a prefix that it has cached has those of the request that
has read it. Torch-free.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from slurmrl.errors import RunFailedError, UsageError
from slurmrl.layout.copy import Array
from slurmrl.models.config import ModelConfig
from slurmrl.plan.engines import EXPERTS_NEED

FLAG = "--enable-return-routed-experts"
ENABLED = "enable_return_routed_experts"


def check_settings(where: str, server: Mapping[str, object]) -> None:
    """Raises UsageError if a server with these settings does not report experts, or others."""
    if server.get(ENABLED) is not True:
        raise UsageError(f"{where}: rollout.replay_experts needs a server with {FLAG}")
    for name, needed in EXPERTS_NEED.items():
        value = server.get(name, needed)
        if value not in (needed, None):
            raise UsageError(
                f"{where}: the server's {name} is {value}, with which it reports the experts of "
                "other tokens; leave it out, or rollout.replay_experts"
            )


@dataclass(frozen=True, kw_only=True)
class RoutedLayers:
    """The blocks of experts of a model."""

    layers: int
    """All layers of the model, dense ones included."""
    sparse: tuple[int, ...]
    """Those with experts, ascending."""
    experts: int
    per_token: int

    @staticmethod
    def of(config: ModelConfig) -> RoutedLayers | None:
        """None for a model without experts."""
        if config.moe is None:
            return None
        return RoutedLayers(
            layers=config.num_layers,
            sparse=tuple(sorted(config.moe.layers)),
            experts=config.moe.experts,
            per_token=config.moe.per_token,
        )

    def read(self, where: str, text: str | None, tokens: int) -> Array:
        """Of a completion with its prompt, as `Completion` has them, from what the server reports:
        int32 [tokens - 1, layers, experts of a token] in base64. Raises RunFailedError if that is
        something else."""
        if text is None:
            raise RunFailedError(
                f"{where}: the answer has no experts; start the server with {FLAG}"
            )
        try:
            numbers = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
            rows = numbers.reshape(tokens - 1, self.layers, self.per_token)[:, self.sparse]
        except (binascii.Error, ValueError) as error:
            raise RunFailedError(
                f"{where}: the experts of {tokens} tokens are not {tokens - 1} rows of "
                f"{self.per_token} in each of {self.layers} layers: {error}"
            ) from error
        ordered = np.sort(rows, -1)
        known = (ordered >= 0).all() and (ordered < self.experts).all()
        if not known or (ordered[..., 1:] == ordered[..., :-1]).any():
            raise RunFailedError(
                f"{where}: the experts of a token are not {self.per_token} of the {self.experts} "
                "experts of each layer"
            )
        flat = rows.reshape(tokens - 1, len(self.sparse) * self.per_token).astype(np.int16)
        return np.pad(flat, ((0, 1), (0, 0)), constant_values=-1)

"""The routers of a model of transformers, whose choices are recorded in generation and replayed.

A router chooses experts by one ``topk`` of K out of E scores, and returns the indices. A replayed
choice replaces the result of ``topk``; the replayed experts' scores give the weights.

Shapes: T tokens, L blocks with experts, K experts of a token in each, E experts of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slurmrl.errors import UsageError
from slurmrl.models.experts import Routes
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_loading import sketch

TOPK: Final = (torch.topk, torch.Tensor.topk)
FILL: Final = (torch.masked_fill, torch.Tensor.masked_fill)
NAMES: Final = ("gate", "router")
"""Names of routers within blocks that have experts."""


class HFRouters:
    """All routers of a model."""

    def __init__(self, model: nn.Module) -> None:
        """Find the routers. Raises UsageError if a block with experts has no known router."""
        self.routes: Routes | None = None
        """Object that records or replaces the choices of the next calls; None: routers choose."""
        refused = f"the experts of {type(model).__name__} cannot be replayed"
        self._found: list[_Router] = []
        for name, block in model.named_modules():
            if isinstance(getattr(block, "experts", None), nn.Module):
                router = _router_of(block)
                if router is None:
                    raise UsageError(f"{refused}: {name} has no router with top_k and num_experts")
                self._found.append(_Router(self, router, len(self._found)))
        widths = {each.per_token for each in self._found}
        if len(widths) > 1:
            raise UsageError(f"{refused}: top_k differs by block")
        self.blocks, self.per_token = len(self._found), next(iter(widths), 0)

    def try_out(self) -> None:
        """Call each router of a model on the meta device with two tokens.

        Raises UsageError if a router does not return the indices of one ``topk``.
        """
        self.routes = RecordedReads(1, self.blocks)
        for router in self._found:
            with suppress(TypeError, RuntimeError):  # Some routers need additional arguments.
                router(torch.zeros(2, router.hidden, device="meta"))
        self.routes = None


def refusal(config: HFConfig) -> str:
    """Return why the experts of a model cannot be replayed; "" if its routers show no reason."""
    try:
        routers = HFRouters(sketch(config, "lm"))
        routers.try_out()
    except UsageError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - transformers' classes may raise anything
        return f"the routers of a {config.model_type} model fail: {error}"
    return "" if routers.blocks else f"a {config.model_type} model has no experts to replay"


def _router_of(block: nn.Module) -> nn.Module | None:
    """Return the router of a block with experts; None if it has no router of a known form."""
    for child in (getattr(block, name, None) for name in NAMES):
        sizes = (getattr(child, "top_k", None), getattr(child, "num_experts", None))
        if isinstance(child, nn.Module) and all(isinstance(size, int) for size in sizes):
            return child
    return None


class _Router:
    """Replacement of a router's ``forward``, which records or replays its choice."""

    def __init__(self, routers: HFRouters, router: nn.Module, block: int) -> None:
        self._routers, self._block, self._name = routers, block, type(router).__name__
        self.per_token: int = router.top_k  # type: ignore[assignment]
        self._experts: int = router.num_experts  # type: ignore[assignment]
        self.hidden: int = getattr(router, "weight", torch.zeros(0)).shape[-1]
        self._compute = router.forward
        router.forward = self

    def __call__(self, *values: Any, **named: Any) -> Any:
        routes = self._routers.routes
        if routes is None:
            return self._compute(*values, **named)
        choice = _Choice(routes, self._block, self.per_token, self._experts)
        with choice:
            outputs = self._compute(*values, **named)
        if len(choice.taken) != 1 or not any(each is choice.taken[0] for each in outputs):
            raise UsageError(
                f"the experts that {self._name} chooses cannot be recorded or replayed: it does "
                "not return the indices of one topk; set rollout.replay_experts to false"
            )
        return outputs


class _Choice(TorchFunctionMode):
    """Mode in which the routes decide the result of a router's ``topk``."""

    def __init__(self, routes: Routes, block: int, per_token: int, experts: int) -> None:
        super().__init__()
        self._routes, self._block, self._sizes = routes, block, (experts, per_token)
        self.taken: list[Tensor] = []
        """Experts [T, K] of each ``topk``."""
        self._filled: tuple[Any, Any] = (None, None)
        """Result and input of the last ``masked_fill`` of scores."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in FILL:
            self._filled = result, args[0]
        if func not in TOPK:
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        if (*scores.shape[1:], *result.indices.shape[1:]) != self._sizes:
            return result
        taken = self._routes.chosen(self._block, result.indices)
        self.taken.append(taken)
        if taken is result.indices:
            return result
        if scores is self._filled[0]:  # Groups of experts do not restrict recorded experts.
            scores = self._filled[1]
        return torch.return_types.topk((scores.gather(-1, taken), taken))


class RecordedReads:
    """Routes that store the choices of one call of the model."""

    def __init__(self, rows: int, blocks: int) -> None:
        self._rows, self._blocks = rows, blocks
        self._chosen: dict[int, Tensor] = {}

    def chosen(self, block: int, own: Tensor) -> Tensor:
        self._chosen[block] = own.to(torch.int16)
        return own

    def experts(self) -> Tensor:
        """Return the ids of the chosen experts [rows, tokens per row, blocks * top-k], int16."""
        assert len(self._chosen) == self._blocks, "the model must have called all of its blocks"
        experts = torch.cat([self._chosen[block] for block in range(self._blocks)], dim=1)
        return experts.view(self._rows, -1, experts.shape[1])

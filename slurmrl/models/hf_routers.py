"""The routers of a model of transformers: their choices are recorded in generation and replayed.

T tokens, L blocks with experts, K experts of a token in each, E experts of a block.

A router chooses by one ``topk`` of K out of E scores, and returns the indices. A replayed choice
takes the place of the result, so the weights follow from the scores of the replayed experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slurmrl.errors import UsageError
from slurmrl.models.experts import Routes
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_loading import make_model

TOPK: Final = (torch.topk, torch.Tensor.topk)
NAMES: Final = ("gate", "router")
"""Names of routers within blocks that have experts."""


class HFRouters:
    """All routers of a model."""

    def __init__(self, model: nn.Module) -> None:
        """Raises UsageError if a block with experts has no router whose choices can be changed."""
        self.routes: Routes | None = None
        """Treatment of the experts of the next calls; None: the routers choose."""
        found: list[_Router] = []
        for name, block in model.named_modules():
            if not isinstance(getattr(block, "experts", None), nn.Module):
                continue
            router = next((each for each in map(_child(block), NAMES) if each is not None), None)
            if router is None:
                raise UsageError(
                    f"the experts of {type(model).__name__} cannot be replayed: {name} has no "
                    "router with top_k and num_experts"
                )
            found.append(_Router(self, router, len(found)))
        widths = {each.per_token for each in found}
        if len(widths) > 1:
            raise UsageError(
                f"the experts of {type(model).__name__} cannot be replayed: its blocks give a "
                f"token {' or '.join(map(str, sorted(widths)))} experts"
            )
        self.blocks = len(found)
        self.per_token = next(iter(widths), 0)


def refusal(config: HFConfig) -> str:
    """Return why the experts of a model cannot be replayed, as far as its modules show; or ""."""
    try:
        with torch.device("meta"):
            model = make_model(config, "lm", None, 0, torch.float32)
        blocks = HFRouters(model).blocks
    except UsageError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - transformers' classes may raise anything
        return f"transformers cannot build a {config.model_type} model: {error}"
    return "" if blocks else f"a {config.model_type} model has no experts to replay"


def _child(block: nn.Module) -> Callable[[str], nn.Module | None]:
    """Return a function of a name that gives the router with that name, if it is one."""

    def router(name: str) -> nn.Module | None:
        child = getattr(block, name, None)
        sizes = (getattr(child, "top_k", None), getattr(child, "num_experts", None))
        known = isinstance(child, nn.Module) and all(isinstance(size, int) for size in sizes)
        return child if known else None

    return router


class _Router:
    """Calls a router's own method, with other experts if there are some."""

    def __init__(self, routers: HFRouters, router: nn.Module, block: int) -> None:
        self._routers, self._block = routers, block
        self._name = type(router).__name__
        self.per_token: int = router.top_k  # type: ignore[assignment]
        self._experts: int = router.num_experts  # type: ignore[assignment]
        self._compute = router.forward
        router.forward = self

    def __call__(self, *values: Any, **named: Any) -> Any:
        routes = self._routers.routes
        if routes is None:
            return self._compute(*values, **named)
        choice = _Choice(routes, self._block, self.per_token, self._experts)
        with choice:
            outputs = self._compute(*values, **named)
        (taken,) = choice.taken if len(choice.taken) == 1 else (None,)
        if taken is None or not any(each is taken for each in outputs):
            raise UsageError(
                f"the experts that {self._name} chooses cannot be recorded or replayed: it does "
                "not return the indices of one topk; set rollout.replay_experts to false"
            )
        return outputs


class _Choice(TorchFunctionMode):
    """Lets the routes decide the result of a router's ``topk``."""

    def __init__(self, routes: Routes, block: int, per_token: int, experts: int) -> None:
        super().__init__()
        self._routes, self._block = routes, block
        self._per_token, self._experts = per_token, experts
        self.taken: list[Tensor] = []
        """The experts [T, K] of each ``topk``."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in TOPK:
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        if (*scores.shape[1:], *result.indices.shape[1:]) != (self._experts, self._per_token):
            return result
        taken = self._routes.chosen(self._block, result.indices)
        self.taken.append(taken)
        if taken is result.indices:
            return result
        return torch.return_types.topk((scores.gather(-1, taken), taken))


class RecordedReads:
    """Keeps the choices for the tokens of one call of the model."""

    def __init__(self, rows: int, blocks: int) -> None:
        self._rows = rows
        self._chosen: list[Tensor | None] = [None] * blocks

    def chosen(self, block: int, own: Tensor) -> Tensor:
        self._chosen[block] = own.to(torch.int16)
        return own

    def experts(self) -> Tensor:
        """Return the experts [rows, tokens of a row, L * K], int16."""
        found = [each for each in self._chosen if each is not None]
        assert len(found) == len(self._chosen), "the model calls all of its blocks"
        return torch.stack(found, dim=1).view(self._rows, -1, len(found) * found[0].shape[-1])

"""Every kind of optimizer against torch's, also on parts of tensors and after a resume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from slurmrl.config.problems import descriptions
from slurmrl.config.schema.roles import LEFT_OUT, MOMENTS, USERS, Kind, Optimizer
from slurmrl.engines.optimizers import OPTIMIZERS, ShardOptimizer

BETAS = {"betas": (0.8, 0.9)}
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, BETAS),
    "adam": (torch.optim.Adam, BETAS),
    "sgd": (torch.optim.SGD, {}),
    "sgd with momentum": (torch.optim.SGD, {"momentum": 0.6}),
}
SHAPES = {"matrix": (7, 5), "vector": (11,)}
STEPS = 8


def options_of(kind: str, **changes: Any) -> Optimizer:
    settings = {"lr": 0.02, "schedule": "cosine", "weight_decay": 0.3}
    name: Any = kind.partition(" ")[0]
    return Optimizer(name=name, **{**settings, **KINDS[kind][1], **changes})


def made(options: Optimizer, parameters: Mapping[str, Tensor]) -> ShardOptimizer:
    kind = OPTIMIZERS[options.name]
    found: ShardOptimizer = kind(
        options, STEPS, parameters, {"matrix", "matrix 0", "matrix 1", "matrix 2"}
    )
    return found


def random(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()
    }


def gradients(steps: range, dtype: torch.dtype = torch.float32) -> Iterator[dict[str, Tensor]]:
    for step in steps:
        yield random(100 + step, dtype)


def torchs(kind: str, options: Optimizer, steps: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights after steps of torch's class, one tensor at a time."""
    parameters = {name: nn.Parameter(value) for name, value in random(0, dtype).items()}
    known, settings = KINDS[kind]
    if "eps" in known([parameters["matrix"]]).defaults:
        settings = {**settings, "eps": options.eps}
    apart = known is torch.optim.SGD  # which adds decay to the gradient, and ours does not
    decays = {"matrix": 0.0 if apart else options.weight_decay, "vector": 0.0}
    groups = [{"params": [p], "weight_decay": decays[n]} for n, p in parameters.items()]
    reference = known(groups, foreach=False, **settings)
    for step, found in enumerate(gradients(range(steps), dtype)):
        for group in reference.param_groups:
            group["lr"] = options.learning_rate(step, STEPS)
        for name, p in parameters.items():
            p.grad = found[name]
        if apart:
            rate = options.learning_rate(step, STEPS)
            parameters["matrix"].data.mul_(1.0 - rate * options.weight_decay)
        reference.step()
    return {name: p.detach() for name, p in parameters.items()}


@pytest.mark.parametrize(("dtype", "decay"), [(torch.float32, 0.0), (torch.float64, 0.3)])
@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_steps_equal_torch(kind: str, decay: float, dtype: torch.dtype) -> None:
    options = options_of(kind, weight_decay=decay)
    weights = random(0, dtype)
    optimizer = made(options, weights)
    for found in gradients(range(STEPS), dtype):
        optimizer.step(weights, found)
    rounding = 1e-12 if dtype == torch.float64 else 2e-6
    for name, wanted in torchs(kind, options, STEPS, dtype).items():
        assert (weights[name] - wanted).abs().max() < rounding, name
        assert (weights[name] - random(0, dtype)[name]).abs().max() > 1e-6, name


@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_steps_do_not_depend_on_sharding(kind: str) -> None:
    def split(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            f"{name} {number}": part.clone()
            for name, value in values.items()
            for number, part in enumerate(value.flatten().split([3, 0, value.numel() - 3]))
        }

    whole, parts = random(0), split(random(0))
    one, two = made(options_of(kind), whole), made(options_of(kind), parts)
    for found in gradients(range(STEPS)):
        one.step(whole, found)
        two.step(parts, split(found))
    for name, wanted in split(whole).items():
        torch.testing.assert_close(parts[name], wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_and_step_number_suffice_to_resume(kind: str) -> None:
    weights = random(0)
    straight = made(options_of(kind), weights)
    for found in gradients(range(3)):
        straight.step(weights, found)
    again = {name: value.clone() for name, value in weights.items()}
    resumed = made(options_of(kind), again)
    resumed.steps = straight.steps
    for moment, values in straight.moments.items():
        for name, value in values.items():
            resumed.moments[moment][name].copy_(value)
    for found in gradients(range(3, STEPS)):
        straight.step(weights, found)
        resumed.step(again, found)
    for name in SHAPES:
        assert torch.equal(weights[name], again[name])
        for moment in straight.moments:
            assert torch.equal(straight.moments[moment][name], resumed.moments[moment][name])


def test_every_torch_optimizer_is_supported_or_rejected() -> None:
    known = {
        name.lower()
        for name, found in vars(torch.optim).items()
        if isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
    } - {"optimizer"}
    kinds = set(get_args(Kind))
    assert kinds | set(LEFT_OUT) == known
    assert not kinds & set(LEFT_OUT)
    assert set(OPTIMIZERS) == set(MOMENTS) == {kind.partition(" ")[0] for kind in KINDS} == kinds


@pytest.mark.parametrize("name", LEFT_OUT)
def test_unsupported_optimizers_are_rejected_with_the_reason(name: str) -> None:
    with pytest.raises(ValueError, match=f"{LEFT_OUT[name]}; allowed: adamw, adam, "):
        Optimizer.model_validate({"name": name})


def test_unused_optimizer_settings_are_known_and_described() -> None:
    assert Optimizer(name="sgd", betas=(0.8, 0.9), momentum=0.5).unused == ("betas",)
    assert Optimizer(name="adam", momentum=0.5, eps=1e-3).unused == ("momentum",)
    assert all(options_of(kind).unused == () for kind in KINDS)
    for field, users in USERS.items():
        text = descriptions(Optimizer)[field]
        named = {kind for kind in get_args(Kind) if f"`{kind}`" in text}
        assert named == set(users) or field == "eps"

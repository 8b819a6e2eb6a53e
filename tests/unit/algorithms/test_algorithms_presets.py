"""Presets of policy gradients."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from slurmrl.algorithms.policy.presets import PRESETS
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.algorithms.scalars import PolicyScalars
from slurmrl.plan.algorithms import ALGORITHMS, POLICY_GRADIENTS

DOCS = Path(__file__).parents[3] / "docs" / "algorithms.md"


def values(settings: Any, key: str) -> Any:
    for part in key.split("."):
        settings = getattr(settings, part)
    return settings


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_gives_defaults_that_the_user_may_override(name: str) -> None:
    """Every value of the preset applies unless the user sets another one."""
    settings = PolicyGradient.model_validate({"batch_size": 8, "name": name})
    for key, value in PRESETS[name].settings.items():
        wanted = value.items() if key == "kl" else [(key, value)]
        assert all(
            values(settings, f"kl.{part}" if key == "kl" else part) == each for part, each in wanted
        )
    own = {"kl": {"coef": 0.5, "estimator": "k2"}, "n_minibatches": 3, "reward_clip": 7.0}
    changed = PolicyGradient.model_validate({"batch_size": 8, "name": name, **own})
    assert (changed.kl.coef, changed.n_minibatches, changed.reward_clip) == (0.5, 3, 7.0)
    assert changed.kl.where == settings.kl.where
    assert changed.advantage == settings.advantage


@pytest.mark.parametrize("name", PRESETS)
def test_documented_kl_penalty_has_a_coefficient(name: str) -> None:
    """Otherwise the settings would have no effect. An explicit 0 disables the penalty."""
    kl = {"where": "loss", "estimator": "k3"}
    if PolicyGradient.model_validate({"batch_size": 8, "name": name}).uses_reference:
        settings = PolicyGradient.model_validate({"batch_size": 8, "name": name, "kl": kl})
        assert settings.penalises_in_loss
    else:
        reason = f"kl.where, kl.estimator is not allowed without kl.coef: {name} has no KL penalty"
        with pytest.raises(ValidationError, match=re.escape(reason)):
            PolicyGradient.model_validate({"batch_size": 8, "name": name, "kl": kl})
    off = {"batch_size": 8, "name": name, "kl": {**kl, "coef": 0.0}}
    assert not PolicyGradient.model_validate(off).uses_reference


@pytest.mark.parametrize("coef", [0.0, 0.1])
def test_kl_coefficient_is_a_known_metric(coef: float) -> None:
    """The metric is also recorded without a reference, as 0."""
    settings = PolicyGradient.model_validate(
        {"batch_size": 8, "name": "grpo", "kl": {"coef": coef}}
    )
    recorded = PolicyScalars(settings).values()
    assert recorded == {"kl_coef": coef}
    assert recorded.keys() <= set(settings.objective_metrics(recomputes=False))


@pytest.mark.parametrize(
    ("name", "choice", "belonging"),
    [
        ("rloo", {"aggregation": "tokens"}, {"aggregation_length": None}),
        ("gspo", {"objective": "sapo"}, {"clip_ratio_high": None, "ratio": "sequence"}),
        ("gspo", {"objective": "clip"}, {"clip_ratio": 3e-4, "clip_ratio_high": 4e-4}),
        ("dapo", {"objective": "cispo", "clip_ratio_high": 4.0}, {"clip_ratio": 0.2}),
        ("grpo", {"advantage": "gae"}, {"advantage_std": "none"}),
        ("rloo", {"aggregation": "constant"}, {"aggregation_length": 1}),
    ],
)
def test_overriding_a_preset_choice_drops_its_dependent_settings(
    name: str, choice: dict[str, Any], belonging: dict[str, Any]
) -> None:
    settings = PolicyGradient.model_validate({"batch_size": 8, "name": name, **choice})
    assert {key: getattr(settings, key) for key in belonging} == belonging
    in_force = {key: value for key, value in settings.preset.items() if key != "kl"}
    assert all(getattr(settings, key) == value or key in choice for key, value in in_force.items())
    assert PolicyGradient.model_validate(settings.model_dump(mode="json")) == settings


def test_every_preset_can_be_chosen_and_is_documented() -> None:
    """The registry, the schema, and the table of docs/algorithms.md have the same names."""
    assert set(PRESETS) == set(POLICY_GRADIENTS)
    assert set(PRESETS) == set(get_args(PolicyGradient.model_fields["name"].annotation))
    assert all(ALGORITHMS.load(name) is PolicyGradient for name in PRESETS)
    section = DOCS.read_text().partition("## Policy gradients")[2].partition("Calls of a step")[0]
    assert set(PRESETS) == set(re.findall(r"^\| `(\w+)` \|.*arXiv", section, re.M))


@pytest.mark.parametrize("name", PRESETS)
def test_resolved_settings_survive_a_round_trip(name: str) -> None:
    """A run directory's configuration has every value, so a later preset cannot change a trial."""
    settings = PolicyGradient.model_validate({"batch_size": 8, "name": name})
    assert PolicyGradient.model_validate(settings.model_dump(mode="json")) == settings

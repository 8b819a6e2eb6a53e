"""Named choices of settings: tables of defaults, each value with its source.

A preset changes only defaults; the values in a configuration take precedence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from slurmrl.algorithms.policy.hyperparameters import KL, Advantages, Objective
from slurmrl.config.schema.base import Section


@dataclass(frozen=True)
class Preset:
    title: str
    """Name of the method, and its paper."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Defaults that differ from `ppo`."""
    completions: int = 1
    """Default of `rollout.n`."""


GROUP_SIZE: Final = 8
"""Completions per prompt if a method compares them. Papers use 4 to 64; 8 suits small runs."""
PLAIN: Final = {
    # These safeguards of ReaL's PPO are not part of the papers' objectives.
    "reward_clip": None,
    "early_stop_importance_ratio": None,
}
NO_KL: Final = {"kl": {"coef": 0.0}}
GROUP_NORMALIZED: Final = {
    # DeepSeekMath (arXiv 2402.03300), section 4.1.2: (r - mean) / std of the prompt's outputs.
    **PLAIN,
    "advantage": "group",
    "advantage_std": "group",
    "normalize_advantages": False,
}
REINFORCE: Final = {
    # The method makes one update for each batch. The loss sums log-probabilities over each
    # completion and averages the sums over completions.
    **PLAIN,
    "n_minibatches": 1,
    "objective": "unclipped",
    "aggregation": "constant",
    "aggregation_length": 1,
    "normalize_advantages": False,
}

PRESETS: Final[dict[str, Preset]] = {
    "ppo": Preset("proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347)"),
    "grpo": Preset(
        "group relative policy optimization (Shao et al. 2024, arXiv 2402.03300)",
        {
            **GROUP_NORMALIZED,
            "aggregation": "sequences",  # eq. 3: the mean over each output, then over outputs
            "n_minibatches": 1,  # section 4.2: a single update following each exploration stage
            # eq. 4 and section 4.2: the k3 estimator in the loss, coefficient 0.04
            "kl": {"where": "loss", "estimator": "k3", "coef": 0.04},
        },
        GROUP_SIZE,
    ),
    "dr_grpo": Preset(
        "GRPO without its length and difficulty biases (Liu et al. 2025, arXiv 2503.20783)",
        {
            **GROUP_NORMALIZED,
            **NO_KL,  # section 3.1: beta 0
            "advantage_std": "none",  # section 3.2: no division by the standard deviation
            "aggregation": "constant",  # section 3.2: no division by the output's length
            "n_minibatches": 1,
        },
        GROUP_SIZE,
    ),
    "dapo": Preset(
        "decoupled clip and dynamic sampling (Yu et al. 2025, arXiv 2503.14476)",
        {
            **GROUP_NORMALIZED,
            **NO_KL,  # section 2.3: no KL penalty
            "clip_ratio": 0.2,  # section 4.1: epsilon_low
            "clip_ratio_high": 0.28,  # section 4.1: epsilon_high
            "aggregation": "tokens",  # eq. 12: token-level loss
            "zero_variance": "drop",  # section 3.2: dynamic sampling
            "n_minibatches": 16,  # section 4.1: 16 gradient updates for each rollout step
        },
        16,  # section 4.1: responses sampled for each prompt
    ),
    "rloo": Preset(
        "REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740)",
        {
            **REINFORCE,
            "advantage": "leave_one_out",  # section 3
            "kl": {"coef": 0.03},  # the KL penalty in the reward, for TL;DR
        },
        4,  # k
    ),
    "remax": Preset(
        "REINFORCE with a greedy baseline (Li et al. 2023, arXiv 2310.10505)",
        {**REINFORCE, "advantage": "greedy"},  # algorithm 1
    ),
    "reinforce_pp": Preset(
        "REINFORCE++ (Hu et al. 2025, arXiv 2501.03262)",
        {
            **PLAIN,
            "advantage": "none",  # the returns, whose rewards include the KL penalty
            "normalize_advantages": True,  # over all tokens of the global batch
            "kl": {"coef": 0.01},  # k1 in the reward; the paper gives no coefficient
        },
    ),
    "gspo": Preset(
        "group sequence policy optimization (Zheng et al. 2025, arXiv 2507.18071)",
        {
            **GROUP_NORMALIZED,
            **NO_KL,
            "ratio": "sequence",  # eq. 7
            "clip_ratio": 3e-4,  # section 5.1: left clipping range
            "clip_ratio_high": 4e-4,  # section 5.1: right clipping range
            "aggregation": "sequences",  # eq. 5
            "n_minibatches": 4,  # section 5.1: four mini-batches
        },
        GROUP_SIZE,
    ),
    "cispo": Preset(
        "clipped importance weights (MiniMax 2025, arXiv 2506.13585)",
        {
            **GROUP_NORMALIZED,
            **NO_KL,  # section 3.1
            "objective": "cispo",  # eq. 4
            "clip_ratio": 1.0,  # section 3.1: no lower bound
            "clip_ratio_high": 4.0,  # at most 5, as in ScaleRL (Khatri et al. 2025, 2510.13786)
            "aggregation": "tokens",  # eq. 4
        },
        GROUP_SIZE,
    ),
    "sapo": Preset(
        "soft adaptive policy optimization (Gao et al. 2025, arXiv 2511.20347)",
        {
            **GROUP_NORMALIZED,
            **NO_KL,
            "objective": "sapo",
            "sapo_tau_positive": 1.0,  # tau_pos
            "sapo_tau_negative": 1.05,  # tau_neg
            "aggregation": "sequences",
        },
        GROUP_SIZE,
    ),
    "lite_ppo": Preset(
        "PPO's loss without a critic (Liu et al. 2025, arXiv 2508.08221)",
        {
            **GROUP_NORMALIZED,
            **NO_KL,
            "advantage_std": "batch",  # subtract the group's mean, divide by the batch's deviation
            "aggregation": "tokens",
        },
        GROUP_SIZE,
    ),
    "m2po": Preset(
        "second-moment trust policy optimization (Zheng et al. 2025, arXiv 2510.01161)",
        {
            **GROUP_NORMALIZED,
            **NO_KL,
            "objective": "unclipped",  # the mask replaces the clip
            "m2_threshold": 0.04,
            "aggregation": "tokens",
        },
        GROUP_SIZE,
    ),
}


BELONGS_TO: Final = {
    "advantage_std": "advantage",
    "clip_ratio": "objective",
    "clip_ratio_high": "objective",
    "sapo_tau_positive": "objective",
    "sapo_tau_negative": "objective",
    "aggregation_length": "aggregation",
}
"""Mapping from a setting to the setting on which it depends: the preset's value of the first
applies only if the second has the preset's value too."""


CHOICES: Final[dict[str, type[Section]]] = {
    "objective": Objective,
    "aggregation": Objective,
    "advantage": Advantages,
}
"""Sections of the settings that `BELONGS_TO` maps to."""


def with_defaults(values: Mapping[str, Any], default: str) -> dict[str, Any]:
    """Return the values of an ``algorithm`` section, completed by the preset that it names.

    If the section names a user's own algorithm, the preset is ``default``. Raises ValueError for
    settings of a KL penalty whose coefficient is 0 in the preset.
    """
    name = str(values.get("name", default))
    name = default if ":" in name else name
    if name not in PRESETS:
        return dict(values)
    settings = settings_of(name, values)
    _reject_kl_without_coefficient(name, settings, values)
    return _merged(settings, values)


def settings_of(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a preset that apply with ``values``.

    If ``values`` choose another objective, advantage or aggregation than the preset, the settings
    in `BELONGS_TO` for this choice are left out.
    """
    settings = PRESETS[name].settings
    own = {
        key: settings.get(key, section.model_fields[key].default)
        for key, section in CHOICES.items()
    }
    others = {key for key, choice in own.items() if values.get(key, choice) != choice}
    return {key: value for key, value in settings.items() if BELONGS_TO.get(key) not in others}


def _reject_kl_without_coefficient(
    name: str, settings: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    """Raise ValueError for settings of a KL penalty whose coefficient is 0 in the preset.

    An explicit ``coef: 0`` is allowed: it states that the penalty is off.
    """
    kl = values.get("kl")
    if not isinstance(kl, Mapping) or "coef" in kl or settings.get("kl", {}).get("coef") != 0:
        return
    unused = [f"kl.{key}" for key in KL.model_fields if key in kl]
    if unused:
        raise ValueError(
            f"{', '.join(unused)} is not allowed without kl.coef: {name} has no KL penalty by "
            "default; set kl.coef to a number greater than 0"
        )


def _merged(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**defaults, **values}
    for key, default in defaults.items():
        value = values.get(key)
        if isinstance(default, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(default, value)
    return merged

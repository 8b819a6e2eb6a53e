"""Batches and settings with which TRL and slurmrl compute the same loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

VOCABULARY, END = 32, 2
GROUP, LONGEST = 4, 6
"""Completions of a prompt, and the limit of their tokens."""

STALE, FRESH = "stale completions", "fresh completions"
"""Of another policy than the one that is trained, and of this one."""

Values = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A loss. ``differs``: the results that differ by definition (docs/migrating/trl.md)."""

    name: str
    trainer: str
    """TRL's: ``SFT`` for SFTTrainer."""
    batch: str
    ours: Values
    """The section ``algorithm``."""
    theirs: Values = field(default_factory=dict)
    """Arguments of TRL's config class."""
    rollout: Values = field(default_factory=dict)
    differs: Literal["nothing", "loss", "gradients", "both"] = "nothing"


def batches() -> Values:
    """Return prompts and answers of several lengths, including answers of one token. Completions
    have no old log-probabilities yet.
    """
    random = Random(7)

    def tokens(low: int, high: int) -> list[int]:
        return [random.randrange(3, VOCABULARY) for _ in range(random.randint(low, high))]

    def answer() -> list[int]:
        return [*tokens(0, LONGEST - 1), END]

    def completion() -> list[int]:
        """Return a completion, which may end at the limit."""
        return answer() if random.random() < 0.7 else tokens(LONGEST, LONGEST)

    groups = [[completion() for _ in range(GROUP)] for _ in range(4)]
    groups[0][0] = [END]
    rewards = [[random.choice((0.0, 0.5, 1.0)) for _ in group] for group in groups]
    rewards[1], rewards[2] = [1.0] * GROUP, [0.0, 0.0, 1.0, 0.0]
    pairs = [
        {"prompt": tokens(1, 5), "chosen": [*tokens(1, 5), END], "rejected": [*tokens(1, 5), END]}
        for _ in range(5)
    ]
    completions = [
        {"prompt": tokens(1, 5), "completions": group, "rewards": own}
        for group, own in zip(groups, rewards, strict=True)
    ]
    labeled = [
        {"prompt": tokens(1, 5), "answer": [*tokens(1, 5), END], "label": label}
        for label in (True, False, True, True, False)
    ]
    return {
        "answers": [{"prompt": tokens(1, 6), "answer": [*tokens(1, 6), END]} for _ in range(7)],
        "pairs": pairs,
        "pair": pairs[:1],
        "labeled": mismatched(labeled, first=-1),
        "labeled as here": mismatched(labeled, first=1),
        STALE: completions,
        FRESH: completions,
    }


def mismatched(rows: list[Values], first: int) -> list[Values]:
    """Return the rows with the mismatched answers from which slurmrl estimates the KL divergence:
    the answer of the previous row; for the first row, of the row at ``first``. (TRL takes the last
    row of a micro-batch for the first one.)
    """
    others = [rows[first], *rows[:-1]]
    return [{**row, "mismatched": other["answer"]} for row, other in zip(rows, others, strict=True)]


def dpo(name: str, ours: Values, theirs: Values, **more: Any) -> Case:
    more = {"batch": "pairs", **more}
    return Case(f"dpo-{name}", "DPO", ours={"name": "dpo", **ours}, theirs=theirs, **more)


NO_REFERENCE: Values = {"kl": {"coef": 0.0}}


def grpo(name: str, ours: Values, theirs: Values, **more: Any) -> Case:
    """Return GRPO settings without a reference and with TRL's epsilon, unless set."""
    settings = {"name": "grpo", **NO_REFERENCE, "n_minibatches": 1, **ours}
    if settings["name"] != "dr_grpo":  # which divides by none
        settings = {"std_epsilon": 1e-4, **settings}
    limits = {"max_completion_length": LONGEST, **theirs}
    return Case(f"grpo-{name}", "GRPO", more.pop("batch", STALE), settings, limits, **more)


def rloo(name: str, ours: Values, theirs: Values, **more: Any) -> Case:
    return Case(
        f"rloo-{name}",
        "RLOO",
        FRESH,
        {"name": "rloo", **ours},
        {"max_completion_length": LONGEST, **theirs},
        **{"differs": "loss", **more},
    )


TOKENS: Values = {"aggregation": "tokens"}
MASK: Values = {"mask_truncated": True}
THEIR_MASK: Values = {"mask_truncated_completions": True}
KL: Values = {"kl": {"where": "loss", "estimator": "k3", "coef": 0.3}}

CASES = (
    Case("sft", "SFT", "answers", {"name": "sft"}),
    Case("reward", "Reward", "pairs", {"name": "reward_model"}),
    Case(
        "reward-centred",
        "Reward",
        "pairs",
        {"name": "reward_model", "center_coef": 0.2},
        {"center_rewards_coefficient": 0.2},
    ),
    dpo("sigmoid", {"beta": 0.3}, {"beta": 0.3}),
    dpo(
        "ipo",
        {"loss": "ipo", "beta": 0.3, "length_normalized": True},
        {"loss_type": ["ipo"], "beta": 0.3},
    ),
    dpo(
        "ipo-sums",
        {"loss": "ipo", "beta": 0.3},
        {"loss_type": ["ipo"], "beta": 0.3},
        differs="both",
    ),
    dpo("hinge", {"loss": "hinge", "beta": 0.3}, {"loss_type": ["hinge"], "beta": 0.3}),
    dpo("normalized", {"length_normalized": True}, {"loss_type": ["sigmoid_norm"]}),
    dpo("reference-free", {"reference_free": True}, {"reference_free": True}),
    # Of one pair, the mean over all chosen tokens is that of its answer.
    dpo(
        "sft",
        {"sft_coef": 0.4},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.4]},
        batch="pair",
    ),
    dpo(
        "sft-of-tokens",
        {"sft_coef": 0.4},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.4]},
        differs="both",
    ),
    # Of one pair, TRL's loss on sorted log-ratios is conservative DPO.
    dpo(
        "smoothed",
        {"label_smoothing": 0.2},
        {"loss_type": ["aot"], "label_smoothing": 0.2},
        batch="pair",
    ),
    dpo(
        "robust",
        {"label_smoothing": 0.2},
        {"loss_type": ["robust"], "label_smoothing": 0.2},
        differs="both",
    ),
    Case("kto", "KTO", "labeled", {"name": "kto", "beta": 0.5}, {"beta": 0.5}),
    Case(
        "kto-weights",
        "KTO",
        "labeled",
        {"name": "kto", "desirable_weight": 0.7, "undesirable_weight": 1.3},
        {"desirable_weight": 0.7, "undesirable_weight": 1.3},
    ),
    Case("kto-pairing", "KTO", "labeled as here", {"name": "kto"}, differs="both"),
    grpo("sequences", {}, {"loss_type": "grpo"}),
    grpo("dapo", TOKENS, {"loss_type": "dapo"}),
    grpo("bnpo", TOKENS, {"loss_type": "bnpo"}),
    grpo(
        "dr-grpo",
        {"name": "dr_grpo", "aggregation_length": LONGEST},
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
    ),
    grpo("on-policy", {}, {"loss_type": "grpo"}, batch=FRESH),
    grpo(
        "temperature", {}, {"loss_type": "grpo", "temperature": 0.7}, rollout={"temperature": 0.7}
    ),
    grpo(
        "clip-high",
        {**TOKENS, "clip_ratio": 0.1, "clip_ratio_high": 0.28},
        {"epsilon": 0.1, "epsilon_high": 0.28},
    ),
    grpo("two-sided", {**TOKENS, "dual_clip": 1.3}, {"delta": 1.3}),
    grpo(
        "std-of-batch", {"advantage_std": "batch"}, {"loss_type": "grpo", "scale_rewards": "batch"}
    ),
    grpo("std-epsilon", {"std_epsilon": 1e-6}, {"loss_type": "grpo"}, differs="both"),
    grpo("kl", KL, {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False}),
    grpo("kl-corrected", KL, {"loss_type": "grpo", "beta": 0.3}, differs="both"),
    grpo("entropy", {**TOKENS, "entropy_coef": 0.1}, {"loss_type": "dapo", "entropy_coef": 0.1}),
    grpo(
        "entropy-of-sequences",
        {"entropy_coef": 0.1},
        {"loss_type": "grpo", "entropy_coef": 0.1},
        differs="both",
    ),
    grpo(
        "gspo",
        {"name": "gspo", "clip_ratio": 0.03, "clip_ratio_high": 0.04},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.03,
            "epsilon_high": 0.04,
        },
    ),
    grpo(
        "luspo",
        {"ratio": "sequence", "aggregation": "constant", "aggregation_length": 1},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    ),
    grpo(
        "cispo",
        {"name": "cispo", "clip_ratio_high": 0.2},
        {"loss_type": "cispo", "epsilon_high": 1.2},
    ),
    grpo("sapo", {"name": "sapo"}, {"loss_type": "sapo"}),
    grpo("truncated", MASK, {"loss_type": "grpo", **THEIR_MASK}),
    grpo("truncated-tokens", {**TOKENS, **MASK}, {"loss_type": "dapo", **THEIR_MASK}),
    grpo(
        "truncated-dr-grpo",
        {"name": "dr_grpo", **MASK},
        {"loss_type": "dr_grpo", "scale_rewards": "none", **THEIR_MASK},
    ),
    grpo(
        "truncated-kl",
        {**KL, **MASK},
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False, **THEIR_MASK},
    ),
    rloo("plain", NO_REFERENCE, {"beta": 0.0}),
    rloo("kl", {"kl": {"coef": 0.3}}, {"beta": 0.3}),
    rloo("truncated", {**NO_REFERENCE, **MASK}, {"beta": 0.0, **THEIR_MASK}),
    rloo(
        "truncated-kl", {"kl": {"coef": 0.3}, **MASK}, {"beta": 0.3, **THEIR_MASK}, differs="both"
    ),
)

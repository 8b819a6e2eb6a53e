"""The metrics table in the documentation has exactly the names that runs record."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurmrl.algorithms.summaries import of_completions
from slurmrl.plan.metric_names import known_metrics
from slurmrl.plan.settings import load_settings
from slurmrl.run.metrics import TIME
from tests.unit.plan.conftest import PPO, write_model

DOCS = Path(__file__).parents[3] / "docs"
ROW = re.compile(r"^\| ((?:`[^`|]+`(?:, )?)+) \|", re.MULTILINE)
"""A row of a table whose first cell has only names."""
RL = "Policy gradients"
OFFLINE = "SFT, preferences and distillation"
SHARED = ("Every run", "Completions and rewards", "Rollout tasks", "Evaluations")
"""Sections of all algorithms. The others are of the variants that name them."""
GRPO = ("algorithm.name=grpo", "rollout.n=4")
TOOLS = "rollout.episode={name: multi_turn, environment: {name: tools}, tools: {calculator: {}}}"
PARTS = "reward={parts: {right: {name: exact_match}, model: {name: model}}}"
SUITES = "{every_steps: 1, suites: {a: {dataset: {type: prompt, path: held_out.jsonl}}}}"
PAIRS = ("dataset.type=preference", "reward=null", "evaluation.dataset.type=preference")
LABELS = ("dataset.type=kto", "reward=null", "evaluation.dataset.type=kto")
ANSWERS = ("dataset.type=prompt_answer", "reward=null", "evaluation.dataset.type=prompt_answer")
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ppo": (RL, ("algorithm.value_norm=moving",)),
    "ppo in bfloat16": (RL, ("algorithm.recompute_logprobs=true", "actor.dtype=bfloat16")),
    "grpo": (RL, (*GRPO, "evaluation.n=4", "algorithm.correction=truncate")),
    "suites": (RL, (*GRPO, f"evaluation={SUITES}")),
    "tools": (RL, (*GRPO, TOOLS)),
    "parts": (RL, (*GRPO, PARTS, "reward_model.path=model")),
    "dapo": (RL, ("algorithm.name=dapo", "algorithm.max_truncated=0.5")),
    "m2po": (RL, ("algorithm.name=m2po",)),
    "remax": (RL, ("algorithm.name=remax",)),
    "tasks": (RL, (*GRPO, "rollout.tasks={max: 2}")),
    "distill": (OFFLINE, ("algorithm.name=distill", "teacher.path=model")),
    "sft": (OFFLINE, ("algorithm.name=sft", *ANSWERS)),
    "dpo": (OFFLINE, ("algorithm.name=dpo", *PAIRS)),
    "kto": (OFFLINE, ("algorithm.name=kto", *LABELS)),
    "reward_model": (OFFLINE, ("algorithm.name=reward_model", *PAIRS)),
    "generate": ("", ("algorithm.name=generate", "evaluation=null")),
    "evaluate": ("", ("algorithm.name=evaluate", "evaluation=null", "rollout.n=4")),
}


def recorded(variant: str, folder: Path) -> set[str]:
    """Return the names that a run of a variant can record. Suites and intervals count once."""
    write_model(folder / "model")
    (folder / "ppo.yaml").write_text(PPO)
    row = '{"id": "1", "prompt": "1+1=", "answer": "2"}\n'
    for name in ("train.jsonl", "held_out.jsonl"):
        (folder / name).write_text(row)
    settings = load_settings(folder / "ppo.yaml", VARIANTS[variant][1], root=folder / "runs")
    names = {*known_metrics(settings.config, settings.algorithm), TIME}
    if variant == "evaluate":
        scored = [{"text": "2", "reward": 1.0}] * 4
        records = [{"id": "1", "completions": scored}]
        summary = of_completions(records, n=4, pass_score=1.0, pattern=None)
        names |= {f"eval/{name}" for name in summary.metrics}
    once = {name.removesuffix("/low").removesuffix("/high") for name in names}
    return {name.replace("eval/a/", "eval/") for name in once}


def sections(page: Path) -> dict[str, list[str]]:
    """Return the names in the tables of a page, by heading of the second level."""
    _, *parts = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {
        part.partition("\n")[0]: re.findall(r"`([^`]+)`", " ".join(ROW.findall(part)))
        for part in parts
    }


def matches(documented: str, name: str) -> bool:
    """Return whether a documented name matches. ``<part>`` in it matches one part of a path."""
    parts = (re.escape(part) for part in re.split(r"<\w+>", documented))
    return re.fullmatch("[^/]+".join(parts), name) is not None


def test_metrics_page_lists_exactly_the_recorded_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documented = sections(DOCS / "reference" / "metrics.md")
    used: set[tuple[str, str]] = set()
    for variant, (own, _) in VARIANTS.items():
        folder = tmp_path / variant
        folder.mkdir()
        monkeypatch.chdir(folder)
        allowed = [(head, row) for head in (*SHARED, own) for row in documented.get(head, ())]
        for name in recorded(variant, folder):
            found = [pair for pair in allowed if matches(pair[1], name)]
            assert found, f"docs/reference/metrics.md lacks {name} of {variant}"
            used.update(found)
    rows = {(head, row) for head, names in documented.items() for row in names}
    assert not rows - used, "docs/reference/metrics.md has metrics that no run records"


@pytest.mark.parametrize(
    "page",
    ["asynchronous", "rollouts"]
    + [
        f"algorithms/{name}"
        for name in (
            "policy-gradients",
            "off-policy",
            "sft",
            "dpo",
            "kto",
            "distill",
            "reward-model",
        )
    ],
)
def test_metrics_of_a_page_are_in_the_table(page: str) -> None:
    known = [
        name for names in sections(DOCS / "reference" / "metrics.md").values() for name in names
    ]
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    tables = re.findall(
        r"^\| metric \| meaning \|\n(.*?)\n\n", text + "\n", re.MULTILINE | re.DOTALL
    )
    named = [
        name for table in tables for name in re.findall(r"`([^`]+)`", " ".join(ROW.findall(table)))
    ]
    assert named
    assert [name for name in named if "…" not in name and name not in known] == []

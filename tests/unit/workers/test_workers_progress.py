"""Tests of the state that the master keeps from step to step and commits."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmrl.algorithms.preference_schema import DPO_INTERFACE, REWARD_MODEL_INTERFACE
from slurmrl.algorithms.schema import PAIR_SCORES, ROLLOUT
from slurmrl.algorithms.supervised_schema import SUPERVISED
from slurmrl.config.schema.data import DataSource
from slurmrl.data.ledger import LedgerRecord
from slurmrl.data.order import DataOrder
from slurmrl.errors import CorruptFileError, DamagedCheckpointError, UsageError
from slurmrl.plan.dataflow import Method
from slurmrl.plan.settings import Settings
from slurmrl.tensors.checkpoint.manifest import read_state, write_manifest
from slurmrl.workers.master.master import Master
from slurmrl.workers.master.progress import REQUIRED, STATE, Progress

SIZE = 10
FINGERPRINT = "f1"
STATS = {"kl_sequence": 30.0, "completions": 4.0}
"""A KL far above any target, which an adaptive coefficient answers."""


def start(settings: Settings, state: dict[str, Any] | None = None, size: int = SIZE) -> Progress:
    progress = Progress(settings, state)
    progress.use_dataset(size, FINGERPRINT, {"": 7})
    return progress


def step(progress: Progress) -> list[tuple[int, int]]:
    items = progress.take_batch()
    progress.advance(STATS)
    return items


def committed(progress: Progress) -> dict[str, Any]:
    """Return the state after it was written to a file and read back."""
    found: dict[str, Any] = json.loads(json.dumps(progress.state()))
    return found


def test_batches_cross_epoch_boundaries(make_settings: Any) -> None:
    """Each epoch has every item once, although the batch size 4 does not divide 10."""
    progress = start(make_settings())
    taken = [item for _ in range(5) for item in step(progress)]
    assert sorted(taken) == [(epoch, index) for epoch in range(2) for index in range(SIZE)]
    assert progress.ledger.record() == LedgerRecord(settled=20, next=20)
    assert progress.epoch == 2
    order = DataOrder(SIZE, 1)
    assert taken == [(e, i) for e in range(2) for i in order.indices(e)]


def test_items_taken_but_not_trained_are_repeated(make_settings: Any) -> None:
    """A run that ends within a step repeats the step with the same items."""
    progress = start(make_settings())
    step(progress)
    items = progress.take_batch()
    assert (progress.step, progress.ledger.settled) == (1, 4)
    again = start(make_settings(), committed(progress))
    assert again.take_batch() == items


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5, 6])
def test_restored_progress_equals_an_uninterrupted_run(make_settings: Any, stop: int) -> None:
    kl = {"kind": "adaptive", "target": 1.0, "horizon": 100}
    settings = make_settings(algorithm={"name": "ppo", "batch_size": 4, "kl": kl}, total_steps=9)

    def run(progress: Progress, steps: int) -> list[Any]:
        return [
            (
                progress.scalars(),
                step(progress),
                progress.evaluation_due(),
                progress.commit_due(),
            )
            for _ in range(steps)
        ]

    undisturbed = start(settings)
    whole = run(undisturbed, 9)
    before = start(settings)
    parts = run(before, stop)
    after = start(settings, committed(before))
    parts += run(after, 9 - stop)
    assert parts == whole
    assert committed(after) == committed(undisturbed)
    assert after.ledger.record() == LedgerRecord(settled=36, next=36)
    assert len({str(scalars) for scalars, *_ in whole}) > 1, "the coefficient must have moved"


def test_evaluations_and_commits_follow_their_frequencies(make_settings: Any) -> None:
    progress = start(make_settings())
    due = []
    for _ in range(6):
        step(progress)
        due.append((progress.evaluation_due(), progress.commit_due()))
    evaluated, commits = zip(*due, strict=True)
    assert evaluated == (False, True, False, True, False, True)
    assert commits == (False, False, True, False, False, True)


def test_log_frequency_counts_steps_or_epochs(make_settings: Any) -> None:
    progress = start(make_settings(logging={"every_steps": 2}, total_steps=6))
    assert [step(progress) and progress.log_due() for _ in range(6)] == [False, True] * 3
    by_epoch = start(make_settings(logging={"every_steps": None, "every_epochs": 1}))
    due = [bool(step(by_epoch)) and by_epoch.log_due() for _ in range(5)]
    assert due == [False, False, True, False, True], "10 items, 4 a step"


def test_last_step_is_evaluated_unless_switched_off(make_settings: Any) -> None:
    evaluation = make_settings().config.evaluation.model_dump(mode="json") | {"every_steps": 4}
    for at_end in (True, False):
        progress = start(make_settings(evaluation=evaluation | {"at_end": at_end}))
        progress.step = 5
        progress.evaluations.restore({"step": 4, "epoch": 0})  # type: ignore[union-attr]
        step(progress)
        assert progress.evaluation_due() is at_end


def test_evaluation_always_uses_the_first_items(make_settings: Any) -> None:
    progress = start(make_settings())
    assert progress.evaluation_items() == [(0, index) for index in range(5)]
    step(progress)
    assert progress.evaluation_items() == [(0, index) for index in range(5)]
    progress.held_out = {"": 3}
    assert progress.evaluation_items() == [(0, 0), (0, 1), (0, 2)]


def test_each_suite_has_its_own_items(make_settings: Any) -> None:
    dataset = make_settings().config.evaluation.model_dump(mode="json")["dataset"]
    suites = {"a": {"dataset": dataset, "samples": 2}, "b": {"dataset": dataset}}
    progress = start(make_settings(evaluation={"every_steps": 2, "samples": 9, "suites": suites}))
    progress.held_out = {"a": 7, "b": 3}
    assert [len(progress.evaluation_items(suite)) for suite in ("a", "b")] == [2, 3]


def test_progress_finishes_after_the_last_step(make_settings: Any) -> None:
    progress = start(make_settings(total_steps=2))
    assert progress.finish_reason() is None
    step(progress)
    assert progress.finish_reason() is None
    step(progress)
    assert progress.finish_reason() == "total_steps"
    again = start(make_settings(total_steps=2), committed(progress))
    assert again.finish_reason() == "total_steps"
    longer = start(make_settings(total_steps=3), committed(progress))
    assert longer.finish_reason() is None


def test_stop_condition_holds_after_a_restart(make_settings: Any) -> None:
    """A trial that was killed between the last commit and its end must not train further."""
    settings = make_settings(stop_when="eval/reward >= 0.5")
    progress = start(settings)
    step(progress)
    progress.metrics = {"step": 1, "eval/reward": 0.4}
    assert progress.finish_reason() is None
    step(progress)
    progress.metrics = {"step": 2, "eval/reward": 0.5}
    assert progress.finish_reason() == "stop_when: eval/reward >= 0.5"
    again = start(settings, committed(progress))
    assert again.finish_reason() == "stop_when: eval/reward >= 0.5"


@pytest.mark.parametrize("ledger", [{"settled": 8, "next": 4}, {"settled": -1}, [], None])
def test_contradictory_ledger_is_damage(make_settings: Any, ledger: Any, tmp_path: Path) -> None:
    """The state is checked when it is read, so an older commit becomes the base before training."""
    state = committed(start(make_settings())) | {"ledger": ledger}
    write_manifest(tmp_path, step=1, files=[], state=state)
    if ledger is not None:
        with pytest.raises(DamagedCheckpointError, match="in 'ledger', expected a ledger"):
            read_state(tmp_path, STATE, REQUIRED)
    with pytest.raises(CorruptFileError, match="the state of the last commit has"):
        Progress(make_settings(), state | {"ledger": ledger or None})


@pytest.mark.parametrize(("size", "fingerprint"), [(SIZE + 1, FINGERPRINT), (SIZE, "f2")])
def test_changed_dataset_is_rejected(make_settings: Any, size: int, fingerprint: str) -> None:
    progress = start(make_settings())
    step(progress)
    again = Progress(make_settings(), committed(progress))
    with pytest.raises(UsageError, match=rf"\({SIZE} items then, {size} now\)"):
        again.use_dataset(size, fingerprint, {"": 7})


def test_changed_file_is_named_if_the_commit_lists_sources(
    make_settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = start(make_settings())
    step(progress)
    state = committed(progress)
    state["dataset"]["sources"] = {"one": "a", "two": "b"}
    again = Progress(make_settings(), state)
    sources = {name: DataSource(path=f"{name}.jsonl") for name in ("one", "two")}
    dataset = again.config.dataset.model_copy(update={"path": "", "sources": sources})
    again.config = again.config.model_copy(update={"dataset": dataset})
    monkeypatch.setattr(again, "_sources", lambda directories: ({"one": "a", "two": "c"}, {}))
    with pytest.raises(UsageError, match=r"the dataset two\.jsonl has changed since the last"):
        again.use_dataset(SIZE, "f2", {"": 7})
    dataset = dataset.model_copy(update={"images_key": "images"})
    again.config = again.config.model_copy(update={"dataset": dataset})
    with pytest.raises(
        UsageError, match=r"two\.jsonl \(or an image or video of its rows\) has changed"
    ):
        again.use_dataset(SIZE, "f2", {"": 7})


def test_changed_tokens_of_rows_are_rejected(
    make_settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer's files may change as long as the rows keep their tokens."""
    now = ({"": "file"}, {"": "tokens"})
    monkeypatch.setattr(Progress, "_sources", lambda progress, directories: now)
    state = committed(start(make_settings()))
    start(make_settings(), state)
    older = state | {"dataset": {"size": SIZE, "fingerprint": FINGERPRINT}}
    now = ({"": "file"}, {"": "others"})
    with pytest.raises(
        UsageError, match=r"the tokenizer or chat .* or resume --update-code brought"
    ):
        start(make_settings(), state)
    start(make_settings(), older)


def test_changed_chat_template_is_rejected(make_settings: Any) -> None:
    """A commit without a template file, or of an old version, accepts any template."""
    progress = start(make_settings())
    progress.use_template("{{ messages }}")
    again = Progress(make_settings(), committed(progress))
    again.use_template("{{ messages }}")
    with pytest.raises(UsageError, match=r"the chat template .* has changed"):
        again.use_template("{{ messages[0] }}")
    Progress(make_settings(), committed(start(make_settings()))).use_template("{{ messages }}")


def test_changed_stop_tokens_are_rejected(make_settings: Any) -> None:
    """Their order may change. A commit of an old version accepts any tokens."""
    progress = start(make_settings())
    progress.use_stop_tokens([2, 7])
    state = committed(progress)
    start(make_settings(), state).use_stop_tokens([7, 2])
    with pytest.raises(UsageError, match=r"last commit \(ids \[2, 7\] then, \[2\] now\): put the"):
        start(make_settings(), state).use_stop_tokens([2])
    start(make_settings(), state | {"stop_token_ids": None}).use_stop_tokens([2])


@pytest.mark.parametrize(
    ("method", "interface", "rejected"),
    [
        (Method.TRAIN_STEP, SUPERVISED, False),
        (Method.TRAIN_STEP, DPO_INTERFACE, False),
        (Method.GENERATE, ROLLOUT, True),
        (Method.TRAIN_STEP, REWARD_MODEL_INTERFACE, True),
        (Method.INFERENCE, PAIR_SCORES, True),
        (Method.TRAIN_STEP, "own:Interface", True),
    ],
)
def test_changed_stop_tokens_are_accepted_if_no_call_uses_them(
    make_settings: Any, method: Method, interface: str, *, rejected: bool
) -> None:
    """An export has the new tokens."""
    progress = start(make_settings())
    progress.use_stop_tokens([2, 7])
    again = start(make_settings(), committed(progress))
    calls = [SimpleNamespace(method=method, interface=interface)]
    master: Any = SimpleNamespace(progress=again, plan=SimpleNamespace(all_calls=calls))
    with pytest.raises(UsageError) if rejected else nullcontext():
        Master._use_stop_tokens(master, {((2, "</s>"),)})
    assert again.stop_token_ids == ([2, 7] if rejected else [2])


def test_data_order_needs_the_dataset(make_settings: Any) -> None:
    with pytest.raises(RuntimeError, match="use_dataset"):
        Progress(make_settings(), None).take_batch()

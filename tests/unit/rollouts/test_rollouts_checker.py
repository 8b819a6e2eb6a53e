"""The checker of trials with rollout tasks accepts correct trials and finds each violation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slurmrl.fsio import documents
from slurmrl.rollouts.sample_files import SampleGroup, SampleWriter
from slurmrl.run.channel.message_log import LogWriter
from tests.support.rollout_checker import Checker
from tests.support.rollout_evidence import Archive
from tests.support.sample_groups import small_group

BATCH = 2
TASK = "rollout.0.0"
LINE = ((1, 1), (1, 2), (2, 3), (2, 4))
"""Incarnation and step: the second one goes on from the commit of step 2."""


class Story:
    """Two incarnations of a trial whose steps train items in order, with samples of the previous
    step's weights. Item 8 is dropped, and item 9 waits.
    """

    def __init__(self, *, filtered: bool = False) -> None:
        """``filtered``: the samples belong to candidates of a filter."""
        self.filtered = filtered
        self.unjudged: set[int] = set()
        self.items = {step: [2 * step - 2, 2 * step - 1] for _, step in LINE}
        self.versions = {step: f"{step - 1}.{1 if step < 3 else 2}" for _, step in LINE}
        self.again = [6, 7]
        """What the first incarnation had trained at step 3."""
        self.unrecorded: set[int] = set()
        self.ledger: dict[str, Any] = {
            "settled": 8,
            "next": 10,
            "dropped": [{"first": 8, "stop": 9, "reason": "stale"}],
            "samples": [{"item": 9}],
        }
        self.earlier: dict[str, Any] = {"settled": 4, "next": 4}
        """The ledger of step 2."""
        self.steps = [1, 2, 3, 4]
        self.line = [*LINE]
        self.row: Callable[[int], list[int]] = lambda item: [0, 100 - item]
        self.lease = "1.1"
        """In the files."""
        self.removed = ""
        """A file of the run directory."""
        self.damage: Callable[[bytes], bytes] = lambda data: data

    def write(self, run: Path) -> None:
        for name in ("history", "control", "checkpoints"):
            (run / name).mkdir(parents=True)
        records = [
            ("begin", 1, {"base": None}),
            ("commit", 1, {"step": 2, "directory": "step-2.1"}),
            ("begin", 2, {"base": "step-2.1"}),
            ("commit", 2, {"step": 4, "directory": "step-4.2"}),
        ]
        for slot, (kind, incarnation, data) in enumerate(records):
            record = {"kind": kind, "incarnation": incarnation, "data": data}
            (run / "history" / f"{slot:08d}").write_text(json.dumps(record))
        self._commit(run, "step-2.1", 2, self.earlier)
        self._commit(run, "step-4.2", 4, self.ledger)
        lines = [json.dumps({"step": step}) + "\n" for step in self.steps]
        (run / "metrics.jsonl").write_text("".join(lines))
        self._batches(run)
        if self.removed:
            (run / self.removed).unlink()

    def _commit(self, run: Path, name: str, step: int, ledger: dict[str, Any]) -> None:
        (run / "checkpoints" / name).mkdir()
        state = {"step": step, "ledger": ledger}
        (run / "checkpoints" / name / "state.json").write_text(json.dumps(state))

    def _batches(self, run: Path) -> None:
        task = run / "rollouts" / TASK
        task.mkdir(parents=True)
        results = LogWriter(task / "results")
        samples = SampleWriter(task / "samples")
        logs = {one: LogWriter(run / "control" / f"{one:08d}.master") for one in (1, 2)}
        batches = [(*place, self.items[place[1]]) for place in self.line]
        batches.insert(2, (1, 3, self.again))
        for incarnation, step, items in batches:
            stored = samples.write([self._group(item, self.versions[step]) for item in items])
            stored = tuple(replace(one, lease="1.1") for one in stored)
            told = [documents.to_json(one) for one in stored if one.item not in self.unrecorded]
            results.append({"type": "finished", "groups": told})
            batch = {"type": "load", "step": step, "items": list(map(self.row, items))}
            judged = [one for one in stored if one.item not in self.unjudged]
            groups = {"samples": [documents.to_json(replace(one, task=TASK)) for one in judged]}
            if self.filtered:
                rows = [self.row(one.item) for one in judged]
                logs[incarnation].append({**batch, **groups, "items": rows, "candidates": True})
            logs[incarnation].append(batch if self.filtered else {**batch, **groups})
        file = task / "samples" / "00000003.samples"
        file.write_bytes(self.damage(file.read_bytes()))

    def _group(self, item: int, version: str) -> SampleGroup:
        group = small_group(item, self.lease)
        return replace(group, versions=(version,), drawn_by=np.minimum(group.drawn_by, 0))


def problems(folder: Path, story: Story) -> list[str]:
    run = folder / "run"
    story.write(run)
    with Archive(run, folder / "archive"):
        pass
    return Checker(run, folder / "archive", BATCH, max_staleness=1).problems()


@pytest.mark.parametrize("filtered", [False, True])
def test_model_check_finds_no_violation_in_a_correct_run(tmp_path: Path, filtered: bool) -> None:
    story = Story(filtered=filtered)
    story.versions[4] = "2.2"  # one step behind
    assert problems(tmp_path, story) == []


SAMPLES = f"rollouts/{TASK}/samples/00000003.samples"
VIOLATIONS: dict[str, dict[str, Any]] = {
    "step 4 has 2 batches of incarnation 2": {"line": [*LINE, (2, 4)]},
    "step 4 has 0 batches of incarnation 2": {"line": [*LINE[:-1]]},
    "row 100 of epoch 0 is item 0 and item 7": {"row": lambda item: [0, 100 - item % 7]},
    "trained at step 3, has no file 00000003.samples": {"removed": SAMPLES},
    "trained at step 3, is item 4 of lease 1.2": {"lease": "1.2"},
    "the archive lacks the commit of step 4": {"removed": "checkpoints/step-4.2/state.json"},
    "has 1 items before 8 as dropped that were trained": {
        "ledger": {"dropped_before": [{"reason": "stale", "items": 1}]}
    },
    "the commit of step 4 gives out items again": {"earlier": {"next": 12}},
    "the commit of step 4 has [9] no more as dropped": {
        "earlier": {"next": 10, "dropped": [{"first": 9, "stop": 10, "reason": "stale"}]}
    },
    "item 0 is trained at the steps 1 and 4": {"items": {4: [0, 7]}},
    "lacks 1 of the items before 9: neither trained nor dropped": {
        "ledger": {"settled": 9, "dropped": []}
    },
    "has [7], which it has settled or not given out": {"ledger": {"leased": [{"items": [7]}]}},
    "has [9] in two states": {"ledger": {"leased": [{"items": [9]}]}},
    "has {9: 4} as trained, but the steps have trained {}": {
        "ledger": {"trained": [{"first": 9, "stop": 10, "step": 4}], "samples": []}
    },
    "step 3 has 1 items, expected 2": {"items": {3: [4]}},
    "step 3 has 1 items, expected 2 ": {"unjudged": {4}},
    "the metrics have the steps [1, 2, 3, 4, 4]": {"steps": [1, 2, 3, 4, 4]},
    "item 6, trained at step 4, has weights 1.1, too old for a staleness of 1": {
        "versions": {4: "1.1"}
    },
    "item 4, trained at step 3, has weights 3.2, from after that step": {"versions": {3: "3.2"}},
    "item 6, trained at step 4, has weights 3.1, which were rolled back": {"versions": {4: "3.1"}},
    "item 5, trained at step 3, is not in the results of rollout.0.0": {"unrecorded": {5}},
    "trained at step 3, has other bytes": {"damage": lambda data: data[:-1] + b"?"},
}
"""Messages of the checker, each with changes of a story: attributes, or entries of mappings."""


@pytest.mark.parametrize("said", VIOLATIONS)
@pytest.mark.parametrize("filtered", [False, True])
def test_model_check_finds_each_violation(tmp_path: Path, said: str, filtered: bool) -> None:
    story = Story(filtered=filtered)
    for name, value in VIOLATIONS[said].items():
        before = getattr(story, name)
        setattr(story, name, {**before, **value} if isinstance(before, dict) else value)
    found = problems(tmp_path, story)
    assert any(said.strip() in problem for problem in found), found

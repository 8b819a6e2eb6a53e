"""Functions that ranks run in the tests of batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slurmrl.data.sample import SequenceSample
from slurmrl.plan.dataflow import Method
from slurmrl.plan.model import CallPlan
from slurmrl.tensors.parallel.groups import Activity, build
from slurmrl.workers.worker.step_batch import Batch, Mail, Shares


@dataclass(frozen=True)
class Where:
    role: str
    sizes: dict[str, int]
    ranks: tuple[int, ...]


def lengths(items: int) -> list[int]:
    return [1 + (item * 5) % 7 for item in range(items)]


def prompts(items: int) -> SequenceSample:
    sizes = lengths(items)
    tokens = torch.arange(items).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
    ids = [f"{item}@0" for item in range(items)]
    metadata = {"row": [{"number": item} for item in range(items)]}
    return SequenceSample.from_default(sizes, ids, {"prompt_ids": tokens}, metadata)


def made(sample: SequenceSample, keys: tuple[str, ...]) -> SequenceSample:
    """Return a call's outputs, which depend only on the items. Completions are longer
    than prompts.
    """
    numbers = [int(name.partition("@")[0]) for name in sample.ids]
    sizes = [lengths(number + 1)[-1] + number % 3 for number in numbers]
    data: dict[str, Any] = {}
    single: dict[str, Any] = {}
    for key in keys:
        if key == "rewards":
            single[key] = torch.tensor(numbers, dtype=torch.float64) / 3
            continue
        each = [torch.full((n,), number) for n, number in zip(sizes, numbers, strict=True)]
        whole = torch.cat([torch.empty(0, dtype=torch.int64), *each])
        data[key] = whole if key == "input_ids" else whole.to(torch.float32) + 0.5
    return SequenceSample.from_default(sizes, sample.ids, data, per_sequence=single)


def plan_of(
    layouts: list[Where], name: str, layout: int, inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> CallPlan:
    return CallPlan(
        name=name,
        role=None if name == "judge" else layouts[layout].role,
        layout=layouts[layout].role,
        method=Method.GENERATE if name == "generate" else Method.INFERENCE,
        interface="nowhere:Nothing",
        inputs=inputs,
        outputs=outputs,
        ranks=layouts[layout].ranks,
    )


def run(
    layouts: list[Where],
    calls: list[tuple[str, int, tuple[str, ...], tuple[str, ...]]],
    batches: list[int],
    minibatches: int = 1,
) -> list[list[str]]:
    """Execute calls (name, number of the layout, inputs, outputs) on batches of these sizes, and
    check every input. Return the events of this rank for each batch. The call "generate" makes
    completions, and "judge" has no model. "busy" and "meanwhile" wait for each other.
    """
    rank, device = dist.get_rank(), torch.device("cpu")
    contexts = build(layouts, rank=rank, device=device)
    plans = [plan_of(layouts, *call) for call in calls]
    mail = Mail(None, device)
    events = []
    for items in batches:
        whole = prompts(items)
        shares = Shares(
            plans,
            lambda plan: next(where for where in layouts if where.role == plan.layout),
            whole.item_lengths(),
            minibatches,
        )
        mail.finish()
        batch = Batch(whole, whole.take, plans, shares, rank, mail, Activity())
        events.append([])
        for plan, (_, layout, _, _) in zip(plans, calls, strict=True):
            where = layouts[layout]
            context = contexts[where.role] if rank in where.ranks else None
            sample = batch.inputs(plan, context)
            assert (sample is None) == (context is None)
            result = None
            if sample is not None and context is not None:
                events[-1].append(plan.name)
                if plan.name in ("busy", "meanwhile"):
                    mail.total(torch.zeros(1))()
                check(sample, plan, [shares.of(plan).parts[context.dp_rank]])
                if context.is_leader and plan.outputs:
                    result = made(sample, plan.outputs)
            batch.add(plan, result)
        kept = {
            key for held in (batch._made, batch._held) for one in held.values() for key in one.keys
        }
        assert not kept, f"{kept} are read by no later call"
    mail.finish()
    return events


def choose(
    layouts: list[Where],
    calls: list[tuple[str, int, tuple[str, ...], tuple[str, ...]]],
    filtered: int,
    steps: list[tuple[list[list[int]], list[int]]],
) -> list[list[int]]:
    """Execute the first ``filtered`` calls on rounds of candidates, each a list of items, and the
    other calls on the chosen items. Check every input. Return the items of this rank in the last
    call of each step.
    """
    rank, device = dist.get_rank(), torch.device("cpu")
    contexts = build(layouts, rank=rank, device=device)
    plans = [plan_of(layouts, *call) for call in calls]
    mail, activity = Mail(None, device), Activity()
    last: list[list[int]] = []

    def begin(items: list[int], first: int, stop: int | None) -> tuple[Batch, Shares]:
        whole = prompts(max(items, default=0) + 1).take(items)
        shares = Shares(
            plans,
            lambda plan: next(where for where in layouts if where.role == plan.layout),
            whole.item_lengths(),
            2,
        )
        mail.finish()
        batch = Batch(
            *(whole, whole.take, plans, shares, rank, mail, activity), first=first, stop=stop
        )
        return batch, shares

    def execute(batch: Batch, shares: Shares, part: slice) -> None:
        for plan in plans[part]:
            where = next(where for where in layouts if where.role == plan.layout)
            context = contexts[where.role] if rank in where.ranks else None
            sample = batch.inputs(plan, context)
            result = None
            if sample is not None and context is not None:
                own = [batch.ids[item] for item in shares.of(plan).parts[context.dp_rank]]
                check_inputs(sample, plan, own)
                last[-1] = [int(name.partition("@")[0]) for name in own]
                if context.is_leader and plan.outputs:
                    result = made(sample, plan.outputs)
            batch.add(plan, result)

    for rounds, chosen in steps:
        last.append([])
        sources = []
        for items in rounds:
            batch, shares = begin(items, 0, filtered)
            execute(batch, shares, slice(filtered))
            sources.append(batch)
        batch, shares = begin(chosen, filtered, None)
        batch.take_over(sources)
        if chosen:
            execute(batch, shares, slice(filtered, None))
    mail.finish()
    return last


def rebalance(sizes: list[list[int]], minibatches: int) -> tuple[list[int], list[list[int]]]:
    """Let four ranks generate several completions per prompt, whose sequences have ``sizes[i]``
    tokens for item ``i``. Check that every sequence has its own tokens. Return this rank's training
    items and the lengths of their sequences.
    """
    rank, device = dist.get_rank(), torch.device("cpu")
    where = Where("actor", {"dp": 4}, (0, 1, 2, 3))
    context = build([where], rank=rank, device=device)["actor"]
    common = {"role": "actor", "interface": "nowhere:Nothing", "ranks": where.ranks}
    plans = [
        CallPlan(
            name="generate",
            method=Method.GENERATE,
            inputs=("prompt_ids",),
            outputs=("input_ids", "rewards"),
            **common,
        ),
        CallPlan(
            name="train",
            method=Method.TRAIN_STEP,
            inputs=("input_ids", "rewards"),
            outputs=(),
            **common,
        ),
    ]
    whole, mail = prompts(len(sizes)), Mail(None, device)
    shares = Shares(plans, lambda plan: where, whole.item_lengths(), minibatches)
    batch = Batch(whole, whole.take, plans, shares, rank, mail, Activity())
    own = batch.inputs(plans[0], context)
    assert own is not None
    items = [int(name.partition("@")[0]) for name in own.ids]
    tokens = [item * 100 + i for item in items for i, n in enumerate(sizes[item]) for _ in range(n)]
    counts = [len(sizes[item]) for item in items]
    made = SequenceSample(
        own.ids,
        {"input_ids": [sizes[item] for item in items], "rewards": [[1] * n for n in counts]},
        data={"input_ids": torch.tensor(tokens), "rewards": torch.ones(sum(counts))},
    )
    batch.add(plans[0], made)
    sample = batch.inputs(plans[1], context)
    assert sample is not None
    batch.add(plans[1], None)
    mail.finish()
    items = [int(name.partition("@")[0]) for name in sample.ids]
    expected = [
        item * 100 + i for item in items for i, n in enumerate(sizes[item]) for _ in range(n)
    ]
    assert sample.tensor("input_ids").tolist() == expected
    assert sample.lengths["input_ids"] == [sizes[item] for item in items]
    assert len(sample.tensor("rewards")) == sum(len(sizes[item]) for item in items)
    return items, sample.lengths["input_ids"]


def check(sample: SequenceSample, plan: CallPlan, parts: list[tuple[int, ...]]) -> None:
    """Check that all inputs belong to this part, in its order."""
    check_inputs(sample, plan, [f"{item}@0" for part in parts for item in part])


def check_inputs(sample: SequenceSample, plan: CallPlan, ids: list[str]) -> None:
    """Check that all inputs belong to the items ``ids``."""
    assert sample.ids == tuple(ids)
    assert sample.keys == plan.inputs
    expected = made(sample, tuple(key for key in plan.inputs if key != "prompt_ids"))
    for key in expected.keys:
        assert sample.lengths[key] == expected.lengths[key], key
        assert sample.tensor(key).dtype == expected.tensor(key).dtype
        assert torch.equal(sample.tensor(key), expected.tensor(key)), key
    assert [row["number"] for row in sample.metadata["row"]] == [
        int(name.partition("@")[0]) for name in sample.ids
    ]

"""Messages as JSON, which both ends of a channel check."""

from __future__ import annotations

from typing import Any

import pytest

from slurmrl.data.ledger import LeasedItems, StoredGroup
from slurmrl.errors import CorruptFileError
from slurmrl.run.channel import message_log
from slurmrl.run.channel.wakeups import WakeupAddress
from slurmrl.run.hang import PendingCollective, RankProgress
from slurmrl.run.reports import Failure, Identity, Warned
from slurmrl.tensors.checkpoint.tensors import SavedFile
from slurmrl.workers.messages import (
    AGENT_LOG,
    CONTROL_LOG,
    FROM_WORKER,
    TO_ROLLOUT_WORKER,
    CollectStacks,
    Done,
    Exit,
    HeldOut,
    Hello,
    LoadBatch,
    MessageSet,
    Over,
    Pulse,
    Ready,
    Retire,
    RunCall,
    Save,
    Saved,
    Serve,
    Stacked,
    StartRollout,
    WakeMaster,
    WriteVersion,
)
from slurmrl.workers.rollout_messages import (
    REQUEST_LOG,
    RESULT_LOG,
    Abort,
    Confirm,
    GaveBack,
    GroupsFinished,
    Holds,
    Joined,
    Leave,
    Leaving,
    RolloutCounts,
    WakeTask,
)

SAMPLE = StoredGroup(
    item=5, task="rollout.0.1", lease="1.7", file="0.samples", offset=8, length=9,
    checksum="xxh3_128:0", versions=("4.1", "5.1"),
)  # fmt: skip
ADDRESS = WakeupAddress("10.0.0.1", 4711, "ab" * 16)
WAITS = PendingCollective(name="all_reduce", number=3, group="0", ranks=(0, 1), since_s=2.0)
DOING = RankProgress(rank=1, call="gen", step=4, since_s=3.5, collective=WAITS)
LEASE = LeasedItems(
    lease="1.7", holder="rollout.3.1", items=(5, 9), rows=((0, 3), (1, 3)), oldest="4.1"
)
TASK = Identity("rollout", 3, 1, "r3", "50.0.0", "50_3", 7)
MESSAGES: list[tuple[MessageSet[Any], Any]] = [
    (CONTROL_LOG, LoadBatch(seq=3, step=4, items=((0, 7), (1, 2)), evaluation=True)),
    (CONTROL_LOG, LoadBatch(step=4, items=((0, 7),), samples=(SAMPLE,))),
    (CONTROL_LOG, RunCall(step=4, name="gen", scalars={"kl_coef": 0.1})),
    (CONTROL_LOG, Save(seq=1, step=4, directory="step-4.1", asynchronous=True)),
    (CONTROL_LOG, WriteVersion(seq=1, step=4, version="4.1", base="3.1")),
    (CONTROL_LOG, Exit(seq=9)),
    (CONTROL_LOG, Over(stacks="rank 3 is silent")),
    (CONTROL_LOG, CollectStacks(seq=2, number=1, ranks=(0, 3))),
    (CONTROL_LOG, WakeMaster(wakeups=ADDRESS)),
    (CONTROL_LOG, RunCall(step=4, name="gen", scalars={}, evaluation=True, suite="gsm8k")),
    (AGENT_LOG, Ready(rank=1, size=9, fingerprint="f", held_out=(HeldOut(suite="a", size=3),))),
    (AGENT_LOG, Ready(rank=1, size=9, fingerprint="f", stop_tokens=((2, "</s>"), (7, "é")))),
    (AGENT_LOG, Done(rank=1, seq=0, seconds=0.5, stats={"loss": (1.5, 2)}, texts=({"id": 1},))),
    (AGENT_LOG, Saved(rank=1, seq=0, files=(SavedFile("a", 3, "sha256:0"),))),
    (AGENT_LOG, Saved(rank=1, seq=0, error="no space")),
    (AGENT_LOG, Hello(agent=Identity("trainer", 0, 1, "n0", "41.0.0", "41_0", 7), wakeups=ADDRESS)),
    (AGENT_LOG, Warned(signal="SIGTERM", cause="preemption", time_left_s=3.0)),
    (AGENT_LOG, Failure(cause="died", reason="x", host="", rank=0, exit_code=-9)),
    (AGENT_LOG, Stacked(group="trainer", task=0, number=0, file="logs/x", ranks=(DOING,))),
    (FROM_WORKER, Pulse(doing=DOING)),
    (TO_ROLLOUT_WORKER, StartRollout(world_size=2, agent=TASK)),
    (TO_ROLLOUT_WORKER, Serve(incarnation=3)),
    (TO_ROLLOUT_WORKER, Retire(reason="preemption", within_s=25.5)),
    (REQUEST_LOG, Confirm(wakeups=ADDRESS)),
    (REQUEST_LOG, Confirm(leases=(LEASE,))),
    (REQUEST_LOG, LEASE),
    (REQUEST_LOG, Abort(lease="1.7", items=(5,))),
    (REQUEST_LOG, Leave(within_s=30.0)),
    (RESULT_LOG, Joined(agent=TASK)),
    (RESULT_LOG, GroupsFinished(groups=(SAMPLE,))),
    (RESULT_LOG, GaveBack(lease="1.7", items=(5, 9), reason="leaving")),
    (RESULT_LOG, Leaving(reason="preemption")),
    (RESULT_LOG, Holds(version="5.1")),
    (RESULT_LOG, WakeTask(wakeups=ADDRESS)),
    (RESULT_LOG, RolloutCounts(counts={"tokens": 17.0}, problem="no space")),
]


@pytest.mark.parametrize(("channel", "message"), MESSAGES)
def test_messages_survive_a_round_trip(channel: MessageSet[Any], message: Any) -> None:
    [values], _ = message_log.decode(message_log.encode(channel.to_json(message)))
    assert channel.from_json(values) == message
    assert channel.from_json({**values, "of a newer version": 1}) == message


def test_non_finite_metrics_are_transmitted() -> None:
    """A loss that has diverged must reach the metrics."""
    done = Done(rank=0, seq=1, seconds=1.0, stats={"loss": (float("nan"), 1), "kl": (1e999, 1)})
    [values], _ = message_log.decode(message_log.encode(AGENT_LOG.to_json(done)))
    found = AGENT_LOG.from_json(values)
    assert isinstance(found, Done)
    assert str(found.stats) == "{'loss': (nan, 1), 'kl': (inf, 1)}"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"rank": "1"}, "has '1' in 'rank', expected an integer from 0"),
        ({"rank": None}, "has no 'rank'"),
        ({"seq": -1}, "has -1 in 'seq'"),
        ({"stats": {"loss": [1.0]}}, "in 'stats', expected an object, each value a list of"),
        ({"texts": ["text"]}, "in 'texts'"),
        ({"type": "sing"}, "has 'sing' in 'type', expected one of preparing, ready, done"),
        ({"type": ["done"]}, "has ['done'] in 'type'"),
        ({"type": None}, "has None in 'type'"),
    ],
)
def test_malformed_message_is_rejected_on_one_line(change: dict[str, Any], problem: str) -> None:
    done = AGENT_LOG.to_json(Done(rank=1, seq=0, seconds=0.5))
    with pytest.raises(CorruptFileError) as caught:
        AGENT_LOG.from_json({**done, **change})
    assert str(caught.value).startswith("the log of an agent ")
    assert problem in str(caught.value)
    assert "same version of slurmrl" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("items", [[[0]], [[0, True]], {"0": 1}, [0, 1]])
def test_items_must_be_pairs_of_integers(items: Any) -> None:
    load = CONTROL_LOG.to_json(LoadBatch(step=1, items=((0, 1),)))
    with pytest.raises(CorruptFileError, match=r"in 'items', expected a list, each item \[epoch"):
        CONTROL_LOG.from_json({**load, "items": items})


def test_channel_rejects_messages_of_another_channel() -> None:
    with pytest.raises(CorruptFileError, match="the control log has 'done' in 'type'"):
        CONTROL_LOG.from_json(AGENT_LOG.to_json(Done(rank=1, seq=0, seconds=0.5)))


def test_wakeup_address_of_an_older_version_is_ignored() -> None:
    """A resumed trial reads the results of attempts that an older version of slurmrl ran."""
    old = {"type": "hears", "bell": {"host": "127.0.0.1", "port": 4000, "token": "0" * 32}}
    assert RESULT_LOG.from_json(old) == WakeTask()

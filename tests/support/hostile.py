"""A run directory with one damaged or foreign file, and the readers of that file.

``python -m tests.support.hostile [--seed N] [--examples N]`` makes a long test of what
``unit/cli/test_cli_hostile.py`` tests briefly: every reader either works or ends with one clear
message, without a traceback and in limited time.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from slurmrl.cli import status_text
from slurmrl.cli.main import main
from slurmrl.config.load import dump
from slurmrl.desk import trial_code
from slurmrl.desk.proposal import trial_uuid
from slurmrl.errors import SlurmrlError
from slurmrl.name_resolve.store import NameStore
from slurmrl.plan.build import make_plan
from slurmrl.plan.model import Plan
from slurmrl.plan.settings import load_run_settings, load_settings
from slurmrl.run import keys, metrics
from slurmrl.run.channel.message_log import LogReader, LogWriter
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import fold
from slurmrl.run.lease import Lease, LeaseObserver
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler import extensions, submission
from slurmrl.scheduler.base import JobState
from slurmrl.scheduler.chain import Link, committed, continues
from slurmrl.scheduler.local_chain import ChainState
from slurmrl.scheduler.submission import ProcessId
from slurmrl.tensors.checkpoint.manifest import verify, write_manifest
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint, RoleSnapshot, ShardHeader
from slurmrl.tensors.checkpoint.tensors import TensorEntry
from slurmrl.tensors.layout import Box, Layout, Shard, TensorSpec
from slurmrl.watch import published
from slurmrl.watch.overview import collect
from slurmrl.workers.link import reason_to_leave
from slurmrl.workers.master.__main__ import restore
from slurmrl.workers.master.committer import choose
from slurmrl.workers.master.futility import futile_start
from slurmrl.workers.master.progress import Progress
from tests.fake_runs import FakeRun, FakeScheduler, task, write_config

SECONDS = 60.0
"""Time limit for one reader, which finds hangs."""
NO_PROCESS = "local-4194399-77"
COMMANDS = (
    ("status",),
    ("status", "--json"),
    ("status", "add/1"),
    ("status", "add/1", "--json"),
    ("events", "add/1"),
    ("events", "add/1", "--json"),
    ("logs", "add/1"),
    ("logs", "add/1", "--incarnation", "1"),
    ("checkpoints", "add/1"),
    ("export", "add/1", "--out", "exported"),
    ("resume", "add/1", "--dry-run"),
    ("cancel", "add/1"),
)


def build(folder: Path) -> RunPaths:
    """Make an interrupted trial with every kind of file of a run directory."""
    run = FakeRun(folder / "runs")
    paths = run.paths
    settings = load_settings(write_config(folder), ())
    (folder / "tokenizer.json").write_text("{}")
    paths.config.write_text(dump(settings.config))
    paths.plan.write_text(make_plan(settings, scheduler="local").to_json())
    run.submission(signal_lead_s=None, snapshot=1, **{"continue": "chain"})
    script = "#!/bin/bash\n#SBATCH --job-name=slurmrl-1\n#SBATCH --array=0-7%1\n"
    submission.write_scripts(paths, 1, {"trainer": script})
    submission.write_jobs(paths, 1, {"trainer": (NO_PROCESS,)})
    submission.write_environment(paths, 1, {"PATH": "/bin"})
    ChainState.of(ProcessId(4194399, 77), 2).write(paths.local_chain(1, "trainer"))
    claim = extensions.Claim(index=1, first=8, count=2, by="me", records=3)
    extensions.take(paths, 1, "trainer", claim)
    extensions.note(paths, 1, "trainer", 1, NO_PROCESS)
    run.begin(job="7.0.0", submission=1, link=0, base=None, host="n0")
    run.attempt("7_0", job="7.0.0")
    _commit(paths, 4)
    run.commit(4)
    run.append(Kind.EXPORT, step=4, directory="step-00000004")
    run.begin(job="8.0.0", submission=1, link=1, base=paths.checkpoint(4, 1).name, host="n0")
    run.attempt("8_0", number=1, job="8.0.0")
    (paths.exports / "step-00000004").mkdir()
    run.name(keys.failure(1), cause="exception", reason="x", rank=0, step=5, traceback="t")
    run.name(keys.warned(1), signal="SIGUSR2", cause="time_limit", time_left_s=60.0)
    waiting = {"for": [0], "what": "to load", "since_s": 1.0}
    tasks = {"trainer/0": {"lease_age_s": 0.1, "host": "n0", "attempt": 1, "job_id": "8_0"}}
    checkpoint = {"step": 4, "age_s": 1.0}
    run.say(
        2, step=5, phase="running", checkpoint=checkpoint, tasks=tasks, waiting=waiting, time=1e9
    )
    run.event("master.1", "ready", step=0, seconds=1.5)
    run.event("master.1", "commit", step=4, seconds=0.5, stall_s=0.1)
    run.event("agent.trainer.0.0", "join", incarnation=1)
    run.event("supervisor.trainer.7.0", "round", round=0, hosts=["n0"])
    run.metrics({"step": 4, "reward": 0.5, "time/total": 1.0}, {"step": 5, "reward": 0.6})
    run.log("0.0.log", "one\ntwo\n")
    run.log("0.1.log", "three\n")
    Lease(paths.lease("trainer", 0, 1)).beat()
    LogWriter(paths.agent_log(2, "trainer", 0)).append({"type": "hello", "group": "trainer"})
    return paths


def _commit(paths: RunPaths, step: int) -> None:
    directory = paths.checkpoint(step, 1)
    directory.mkdir()
    spec = TensorSpec((3, 4), "float32")
    piece = Shard.contiguous("lm_head.weight", Box.whole(spec.shape))
    layout = Layout.of({"lm_head.weight": spec}, [[piece]])
    entry = TensorEntry("lm_head.weight", spec, lambda: np.full(spec.shape, step, dtype="<f4"))
    saved = RoleSnapshot(ShardHeader("actor", 0, 1, step), (entry,), layout).write(directory)
    state = {
        "step": step,
        "ledger": {"settled": 8, "next": 8},
        "dataset": {"size": 1, "fingerprint": "f"},
        "metrics": {"step": step},
        "controller": {},
        "commits": {"step": 4, "epoch": 0},
        "evaluations": None,
    }
    write_manifest(directory, step=step, files=saved, state=state)


def files(paths: RunPaths) -> list[Path]:
    return sorted(path for path in paths.run.rglob("*") if path.is_file())


# -- the damage done to a file --------------------------------------------------------------------

DEEP, LONG, HUGE = "@deep@", "@long@", "@huge@"
RAW = {
    DEEP: "[" * 5000 + "]" * 5000,
    LONG: "9" * 5000,
    HUGE: "1" + "0" * 400 + ".0",
}
VALUES = (
    *(None, True, -1, 0, 2**63, 10**400, 0.5, 1e300, float("nan"), float("inf"), -1e18),
    *("", "x", "../../../etc/passwd", "\ud800", "\0\x1b[31m", "9" * 300, "x" * 100_000),
    *([], [None], [[1]], {}, {"a": 1}, DEEP, LONG, HUGE),
)


def _fifo(path: Path, chance: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _directory(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _loop(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.symlink_to(path)


def _missing(path: Path, chance: random.Random) -> None:
    path.unlink()


def _zeros(path: Path, chance: random.Random) -> None:
    os.truncate(path, 80 << 20)


def _empty(path: Path, chance: random.Random) -> None:
    os.truncate(path, 0)


def _truncated(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(max(path.stat().st_size, 1)))


def _noise(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(chance.choice((1, 7, 200, 5000))))


def _flipped(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes()) or bytearray(b"x")
    for _ in range(chance.randint(1, 8)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    path.write_bytes(data)


def _deep(path: Path, chance: random.Random) -> None:
    path.write_text(RAW[DEEP] if chance.random() < 0.5 else '{"a":' * 5000 + "1" + "}" * 5000)


def _bomb(path: Path, chance: random.Random) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    path.write_text("\n".join(lines))


def _value(path: Path, chance: random.Random) -> None:
    """Return JSON with one value of another type."""
    text = path.read_bytes().decode(errors="replace")
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    chosen = chance.randrange(len(lines) or 1)
    try:
        values = json.loads(lines[chosen])
        inner = json.loads(values["value"]) if "nonce" in values and "value" in values else None
    except (ValueError, IndexError, TypeError):
        _flipped(path, chance)
        return
    if isinstance(inner, dict) and chance.random() < 0.8:
        values["value"] = _with_raw(_changed(inner, chance))
    else:
        values = _changed(values, chance)
    lines[chosen] = _with_raw(values)
    path.write_text("\n".join(lines) + "\n", errors="surrogatepass")


def _changed(values: Any, chance: random.Random) -> Any:
    """Return JSON with one value replaced or removed, at any depth."""
    if not isinstance(values, dict | list) or not values or chance.random() < 0.05:
        return chance.choice(VALUES)
    keys_ = list(values) if isinstance(values, dict) else list(range(len(values)))
    key = chance.choice(keys_)
    if isinstance(values[key], dict | list) and chance.random() < 0.7:
        values[key] = _changed(values[key], chance)
    elif isinstance(values, dict) and chance.random() < 0.15:
        del values[key]
    else:
        values[key] = chance.choice(VALUES)
    return values


def _with_raw(values: Any) -> str:
    text = json.dumps(values)
    for mark, raw in RAW.items():
        text = text.replace(f'"{mark}"', raw)
    return text


MUTATIONS: dict[str, Callable[[Path, random.Random], None]] = {
    "fifo": _fifo,
    "directory": _directory,
    "loop": _loop,
    "missing": _missing,
    "zeros": _zeros,
    "empty": _empty,
    "truncated": _truncated,
    "noise": _noise,
    "flipped": _flipped,
    "deep": _deep,
    "bomb": _bomb,
    "value": _value,
}


@contextmanager
def mutated(paths: RunPaths, path: Path, mutation: str, chance: random.Random) -> Iterator[None]:
    """Damage one file; restore everything afterwards."""
    content, before = path.read_bytes(), set(os.listdir(paths.history))
    MUTATIONS[mutation](path, chance)
    try:
        yield
    finally:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        path.write_bytes(content)
        for name in set(os.listdir(paths.history)) - before:
            (paths.history / name).unlink()


# -- its readers ----------------------------------------------------------------------------------


class HangError(Exception):
    """A reader did not finish in time."""


@contextmanager
def bounded() -> Iterator[None]:
    def expire(number: int, frame: FrameType | None) -> None:
        raise HangError(f"no end after {SECONDS:.0f} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def command(paths: RunPaths, words: tuple[str, ...]) -> None:
    """Run a command, and check that its output and its exit code are consistent."""
    out, errors = io.StringIO(), io.StringIO()
    root = paths.run.parents[2]
    target = root.parent / "exported"
    arguments = [str(target) if word == "exported" else word for word in words]
    try:
        with bounded(), redirect_stdout(out), redirect_stderr(errors):
            code = main([*arguments, "--root", str(root)])
    finally:
        shutil.rmtree(target, ignore_errors=True)
    said = errors.getvalue()
    assert "Traceback" not in said, said
    assert code == 0 or out.getvalue() or said.strip(), f"{words} ended with {code} and no word"
    assert said.count("\nError: ") + said.startswith("Error: ") <= 1, said
    assert len(said) < 5000, f"{len(said)} characters of messages: {said[:500]}"


def _master(paths: RunPaths) -> None:
    names = NameStore(paths.names)
    records = History(paths.history).read()
    futile_start(records, names, "9.0.0", 3)
    state = fold(records)
    choose(paths, names, state, lambda seconds: None)
    published.failure(names, 1)
    Progress(load_run_settings(paths), restore(paths, state))


def _scheduler(paths: RunPaths) -> None:
    link = Link(paths, 1, "trainer", "7", 0)
    continues(link)
    committed(link)
    extensions.read(paths, 1, "trainer")
    extensions.length(paths, 1, "trainer")
    submission.read_jobs(paths, 1)
    submission.read_environment(paths, 1)
    submission.job_names(paths, 1)
    ChainState.read(paths.local_chain(1, "trainer"))
    reason_to_leave(paths, 1)


def _checkpoint(paths: RunPaths) -> None:
    directory = paths.checkpoint(4, 1)
    RoleCheckpoint(directory, "actor").read("lm_head.weight")
    verify(directory)


def _files(paths: RunPaths) -> None:
    Plan.read(paths.plan)
    trial_uuid(paths)
    trial_code.current_snapshot(paths)
    LogReader(paths.agent_log(2, "trainer", 0)).read()
    LeaseObserver(paths.lease("trainer", 0, 1)).observe()


def _running(paths: RunPaths) -> None:
    """Return the status of a trial whose second link runs."""
    fake = FakeScheduler([task(1, JobState.RUNNING, job="8", hosts=("n0",))])
    fake.jobs[paths.run, 1] = {"trainer": ("8",)}
    clock = itertools.count(step=0.05)
    statuses = collect(
        [paths], lambda kind: fake, detailed=True, sleep=lambda s: None, clock=lambda: next(clock)
    )
    json.dumps(statuses)
    status_text.one(statuses[0], 80)
    status_text.many(statuses, 80)


def _cut(paths: RunPaths) -> None:
    metrics.cut(paths.metrics, 4)


READERS: dict[str, Callable[[RunPaths], None]] = {
    "master": _master,
    "scheduler": _scheduler,
    "checkpoint": _checkpoint,
    "files": _files,
    "running": _running,
    "cut": _cut,
}


def reader(paths: RunPaths, name: str) -> None:
    """Read all files that the processes of a run read. Damage must raise errors of slurmrl."""
    said = "nothing"
    try:
        with bounded():
            READERS[name](paths)
    except SlurmrlError as error:
        said = str(error).strip()
    assert said, f"{name} ended without a word"


def attempt(paths: RunPaths, path: Path, mutation: str, seed: int) -> None:
    """Damage one file and run all its readers."""
    for words in COMMANDS:
        with mutated(paths, path, mutation, random.Random(seed)):
            command(paths, words)
    for name in READERS:
        with mutated(paths, path, mutation, random.Random(seed)):
            reader(paths, name)


def soak(seed: int, examples: int) -> int:
    """Return the number of examples that found a problem."""
    chance = random.Random(seed)
    found = 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        paths = build(Path(folder))
        known = files(paths)
        pairs = [(path, mutation) for path in known for mutation in MUTATIONS]
        for number in range(examples):
            path, mutation = pairs[number] if number < len(pairs) else chance.choice(pairs)
            mutation = mutation if number < len(pairs) else chance.choice(("value", mutation))
            one = chance.randrange(2**32)
            try:
                attempt(paths, path, mutation, one)
            except Exception:  # noqa: BLE001 - any exception is a finding
                found += 1
                print(f"{path.relative_to(paths.run)} {mutation} seed {one}", file=sys.stderr)
                traceback.print_exc()
    print(f"{examples} examples, {found} found something (seed {seed})")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=int, default=2000)
    options = parser.parse_args()
    sys.exit(bool(soak(options.seed, options.examples)))

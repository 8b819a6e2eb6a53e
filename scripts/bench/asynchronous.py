"""What rollout tasks bring and cost the trainers: scripts/bench/asynchronous.py [OPTIONS]

Whole GRPO trials of the local scheduler, in rounds; each round runs every trial once, one after the
other, with the same number of completions, most of which have the greatest length:

- synchronous: two trainer ranks that generate;
- published: the same, with a weight version of each step;
- asynchronous: one trainer rank and one rollout task, so as many processes compute;
- undisturbed: one trainer rank and two rollout tasks;
- killed: the same, and a task is killed every so many seconds, each one in turn.

Ratios are of two trials of a round, in seconds per token that was trained. Times are those of the
master's steps (`time/total`, monotonic) without the first ones, so the start of a trial does not
count. Waiting is `rollout/waited_s`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from spread import Spread

from slurmrl.monitor import events
from tests.support.trials import REPOSITORY, Site, processes, sft_config

WARM_UP = 3
"""Steps that do not count."""
POLL_S = 0.005
BATCH, GROUP = 8, 8
MODEL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
REWARD = """
def different(prompts, completions, rows):
    return [float(len(set(completion))) for completion in completions]
"""


@dataclass(frozen=True)
class Kind:
    """A trial of the table above."""

    name: str
    ranks: int
    tasks: int = 0
    publish: bool = False
    killed: bool = False


SYNCHRONOUS = Kind("synchronous", 2)
PUBLISHED = Kind("published", 2, publish=True)
ASYNCHRONOUS = Kind("asynchronous", 1, tasks=1)
UNDISTURBED = Kind("undisturbed", 1, tasks=2)
KILLED = Kind("killed", 1, tasks=2, killed=True)
KINDS = (SYNCHRONOUS, PUBLISHED, ASYNCHRONOUS, UNDISTURBED, KILLED)


@dataclass(frozen=True)
class Run:
    """What a trial has told."""

    lines: tuple[Mapping[str, Any], ...]
    """Metrics of the steps that count."""
    events: tuple[Mapping[str, Any], ...]
    ends: Mapping[int, float]
    """When each step was known to be over, in seconds of the monotonic clock."""
    taken: Mapping[int, float]
    """When a task was first known to draw with the weights of each step."""
    kills: tuple[float, ...]

    @cached_property
    def wall_s(self) -> float:
        return float(sum(line["time/total"] for line in self.lines))

    @property
    def token_s(self) -> float:
        return self.wall_s / float(sum(line["tokens"] for line in self.lines))

    def share(self, metric: str) -> float:
        """Of the wall time."""
        return float(sum(line[metric] for line in self.lines)) / self.wall_s

    @property
    def first_tokens_s(self) -> list[float]:
        """From the end of each step that counts to the first task that draws with its weights."""
        counted = {line["step"] for line in self.lines}
        both = self.taken.keys() & self.ends.keys() & counted
        return [max(self.taken[step] - self.ends[step], 0.0) for step in sorted(both)]

    @property
    def stalls_s(self) -> list[float]:
        """Of each publication, from the master's events."""
        return [event["stall_s"] for event in self.events if event["kind"] == "weights"]

    @property
    def busy_s(self) -> list[float]:
        """Of each step: all but the waiting for samples."""
        return [line["time/total"] - line["rollout/waited_s"] for line in self.lines]

    @property
    def disturbed_s(self) -> list[float]:
        """`busy_s` of the steps in which a task was killed, and of those after them."""
        found = []
        for line, busy_s in zip(self.lines, self.busy_s, strict=True):
            end = self.ends.get(line["step"])
            since = end - 2 * line["time/total"] if end is not None else float("inf")
            if end is not None and any(since <= kill <= end for kill in self.kills):
                found.append(busy_s)
        return found


# -- one trial -----------------------------------------------------------------------------------


class Watch:
    """Notes when steps end and when tasks take their weights, and kills tasks; in a thread."""

    def __init__(self, site: Site, trial: str, kill_every_s: float | None) -> None:
        self._paths = site.paths(trial)
        self._kill_every_s = kill_every_s
        self.ends: dict[int, float] = {}
        self.taken: dict[int, float] = {}
        self.kills: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _follow(self) -> None:
        lines, folders, victims = 0, list[Path](), itertools.count()
        look_at = 0.0
        while not self._over.wait(POLL_S):
            now = time.monotonic()
            if now >= look_at:
                folders, look_at = list(self._folders()), now + 1.0
            lines = self._note_steps(lines, now)
            for folder in folders:
                self._note_weights(folder, now)
            if self._is_kill_due(now):
                self._kill(next(victims), now)

    def _note_steps(self, known: int, now: float) -> int:
        with suppress(FileNotFoundError):
            lines = self._paths.metrics.read_bytes().count(b"\n")
            self.ends.update(dict.fromkeys(range(known + 1, lines + 1), now))
            return lines
        return known

    def _note_weights(self, models: Path, now: float) -> None:
        """A task has one model folder, but for the moment in which it takes the next."""
        with suppress(FileNotFoundError):
            names = os.listdir(models)
            if len(names) == 1:
                self.taken.setdefault(int(names[0].partition(".")[0]), now)

    def _is_kill_due(self, now: float) -> bool:
        if self._kill_every_s is None or WARM_UP not in self.ends:
            return False
        return now >= (self.kills[-1] if self.kills else self.ends[WARM_UP]) + self._kill_every_s

    def _kill(self, number: int, now: float) -> None:
        """SIGKILL the agent of a task. Its worker ends with it."""
        agents = list(_of_tasks(self._paths.run, "agent"))
        if agents:
            self.kills.append(now)
            with suppress(ProcessLookupError):
                os.kill(agents[number % len(agents)], signal.SIGKILL)

    def _folders(self) -> Iterator[Path]:
        """Where each rollout worker keeps its models: it holds its folder in the host's memory
        open."""
        for pid in _of_tasks(self._paths.run, "worker"):
            with suppress(OSError):
                for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                    target = descriptor.readlink()
                    if target.parent.name.startswith("slurmrl-"):
                        yield target / "models"


def _of_tasks(run: Path, role: str) -> Iterator[int]:
    """The processes of a role that belong to rollout tasks."""
    for pid in processes(run)[role]:
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if any(word.partition("/")[0] == "rollout" for word in words):
                yield pid


def train(site: Site, kind: Kind, number: int, options: argparse.Namespace) -> Run:
    config = config_of(kind, number, options)
    trial = f"{config['experiment']}/{config['trial']}"
    path = site.write(f"{config['trial']}.json", config)
    with Watch(site, trial, options.kill_every_s if kind.killed else None) as watch:
        site.slurmrl("submit", str(path), "--scheduler", "local", "--wait", timeout_s=3600)
    lines = tuple(line for line in site.metrics(trial) if line["step"] > WARM_UP)
    told = tuple(events.read_all(site.paths(trial)))
    return Run(lines, told, watch.ends, watch.taken, tuple(watch.kills))


def config_of(kind: Kind, number: int, options: argparse.Namespace) -> dict[str, Any]:
    config = sft_config(
        experiment="bench",
        trial=f"{kind.name}-{number}",
        total_steps=WARM_UP + options.steps,
        algorithm={"name": "grpo", "batch_size": BATCH, "n_minibatches": 1, "kl": {"coef": 0}},
        rollout={"n": GROUP, "max_new_tokens": options.tokens},
        reward={"name": "reward_of_bench:different"},
        checkpoint={"every_steps": 1000},
    )
    actor = config["actor"]
    actor["architecture"] = {**actor["architecture"], **MODEL}
    actor["backend"] = f"fsdp:d{kind.ranks}"
    actor["optimizer"] = {"lr": 1e-5}
    config["dataset"]["type"] = "prompt"
    if kind.publish:
        config["rollout"]["publish"] = {}
    if kind.tasks:
        config["rollout"]["tasks"] = {"max": kind.tasks, "max_staleness": options.staleness}
    return config


# -- the table -----------------------------------------------------------------------------------


def rows(rounds: list[dict[str, Run]]) -> Iterator[tuple[str, str, str]]:
    """What was measured, the goal, and the median with the least and the most."""

    def of(value: Callable[[dict[str, Run]], float], form: str = ".2f") -> str:
        return Spread.of(map(value, rounds)).text(form)

    def all_of(kind: Kind, values: Callable[[Run], list[float]], form: str = ".3f") -> str:
        known = [one for found in rounds for one in values(found[kind.name])]
        return f"{Spread.of(known).text(form)}, {len(known)} values" if known else "none"

    def ratio(above: Kind, below: Kind) -> str:
        return of(lambda found: found[above.name].token_s / found[below.name].token_s)

    def share(kind: Kind, metric: str) -> str:
        return of(lambda found: found[kind.name].share(metric))

    yield (
        "synchronous / asynchronous, wall time per token",
        "> 1",
        ratio(SYNCHRONOUS, ASYNCHRONOUS),
    )
    yield (
        "share of the steps in which trainers generate, synchronous",
        "",
        share(SYNCHRONOUS, "time/actor_gen"),
    )
    yield (
        "share of the steps in which trainers wait, asynchronous",
        "",
        share(ASYNCHRONOUS, "rollout/waited_s"),
    )
    yield "… with two tasks", "", share(UNDISTURBED, "rollout/waited_s")
    yield "… with two tasks that are killed", "", share(KILLED, "rollout/waited_s")
    yield "kills in a trial", "", of(lambda found: len(found[KILLED.name].kills), ".0f")
    yield (
        "effective training time: undisturbed / killed, wall time per token",
        "≥ 0.95",
        ratio(UNDISTURBED, KILLED),
    )
    yield (
        "a step without its waiting, s, undisturbed",
        "",
        all_of(UNDISTURBED, lambda run: run.busy_s),
    )
    yield (
        "… a step with a kill, or after one",
        "the same",
        all_of(KILLED, lambda run: run.disturbed_s),
    )
    yield "published / not, wall time per token", "1", ratio(PUBLISHED, SYNCHRONOUS)
    yield (
        "stall of the trainers for a publication, s",
        "",
        all_of(ASYNCHRONOUS, lambda run: run.stalls_s),
    )
    yield (
        "from the end of a step to the first task that draws with its weights, s",
        "",
        all_of(ASYNCHRONOUS, lambda run: run.first_tokens_s),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="that count, of each trial")
    parser.add_argument("--tokens", type=int, default=96, help="of each completion")
    parser.add_argument("--staleness", type=int, default=1, help="rollout.tasks.max_staleness")
    parser.add_argument("--kill-every-s", type=float, default=20.0)
    options = parser.parse_args()
    loads, found = [], []
    with tempfile.TemporaryDirectory(prefix="slurmrl-bench-") as made:
        folder = Path(made)
        (folder / "reward_of_bench.py").write_text(REWARD)
        path = os.pathsep.join((str(folder), str(REPOSITORY)))
        site = Site(folder, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
        for number in range(1, options.rounds + 1):
            runs = {}
            for kind in KINDS:
                runs[kind.name] = train(site, kind, number, options)
                loads.append(os.getloadavg()[0])
                text = f"round {number}, {kind.name}: {runs[kind.name].wall_s:.1f} s"
                print(text, file=sys.stderr, flush=True)
            found.append(runs)
    print(
        f"{os.cpu_count()} CPUs, load average {Spread.of(loads).text('.1f')}; {BATCH} x {GROUP} "
        f"completions of {options.tokens} tokens, {options.rounds} rounds of {options.steps} "
        f"steps, max_staleness {options.staleness}, a kill every {options.kill_every_s:.0f} s\n"
    )
    print("| | goal | median (least to most) |\n|---|---|---|")
    for row in rows(found):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()

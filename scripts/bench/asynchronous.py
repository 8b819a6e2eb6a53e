"""Compare asynchronous with synchronous GRPO trials: scripts/bench/asynchronous.py [OPTIONS]

Whole GRPO trials run with the local scheduler, in rounds. Each round runs every trial once, one
after the other, with the same number of trained completions. Most completions have the maximum
length; with fewer ``--words``, lengths vary. With ``--dynamic``, groups whose completions are all
wrong or all right are generated but not trained on.

- synchronous: two trainer ranks that generate;
- published: the same, with a weight version of each step;
- asynchronous: one trainer rank and one rollout task, so the same number of processes compute;
- undisturbed: one trainer rank and two rollout tasks;
- killed: the same, but the script kills a task at regular intervals, each task in turn.

A ratio compares the seconds per trained token of two trials of a round. Times are the master's step
times (`time/total`, monotonic) without the first steps, so the start of a trial does not count.
Waiting is `rollout/waited_s`.
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
from functools import cached_property, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from spread import Spread

from slurmrl.run import events
from tests.support.trials import REPOSITORY, Site, processes, sft_config

WARM_UP = 3
"""Number of first steps that do not count."""
POLL_S = 0.005
BATCH, GROUP = 8, 8
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
REWARD = """
import zlib


def drawn(prompts, completions, rows):
    # 1 for a share of the completions, which depends on their texts alone.
    return [float(zlib.crc32(text.encode()) < SOLVED * 2**32) for text in completions]
"""


@dataclass(frozen=True)
class Kind:
    """A kind of trial; the docstring of this module lists the kinds."""

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
    """The measured values of a trial."""

    lines: tuple[Mapping[str, Any], ...]
    """Metrics of the steps that count."""
    events: tuple[Mapping[str, Any], ...]
    ends: Mapping[int, float]
    """Time at which each step was known to be over, in seconds of the monotonic clock."""
    taken: Mapping[int, float]
    """Time at which a task was first known to sample with the weights of each step."""
    kills: tuple[float, ...]

    @cached_property
    def wall_s(self) -> float:
        return float(sum(line["time/total"] for line in self.lines))

    @property
    def token_s(self) -> float:
        return self.wall_s / float(sum(line["tokens"] for line in self.lines))

    def share(self, metric: str) -> float:
        """Return the share of the wall time that a metric in seconds has."""
        return float(sum(line[metric] for line in self.lines)) / self.wall_s

    @property
    def first_tokens_s(self) -> list[float]:
        """Return the seconds from the end of each counted step to the first task that samples with
        its weights.
        """
        counted = {line["step"] for line in self.lines}
        both = self.taken.keys() & self.ends.keys() & counted
        return [max(self.taken[step] - self.ends[step], 0.0) for step in sorted(both)]

    @property
    def stalls_s(self) -> list[float]:
        """Return the stall of each publication, from the master's events."""
        return [event["stall_s"] for event in self.events if event["kind"] == "weights"]

    @property
    def busy_s(self) -> list[float]:
        """Return the seconds of each step without the wait for samples."""
        return [line["time/total"] - line["rollout/waited_s"] for line in self.lines]

    @property
    def disturbed_s(self) -> list[float]:
        """Return `busy_s` of the steps in which a task was killed and of the next steps."""
        found = []
        for line, busy_s in zip(self.lines, self.busy_s, strict=True):
            end = self.ends.get(line["step"])
            since = end - 2 * line["time/total"] if end is not None else float("inf")
            if end is not None and any(since <= kill <= end for kill in self.kills):
                found.append(busy_s)
        return found


# -- one trial -----------------------------------------------------------------------------------


class Watch:
    """Record in a thread when steps end and when tasks load weights; kill tasks."""

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
        """Note the weights of each task. A task has two model folders only while it loads new
        weights.
        """
        with suppress(FileNotFoundError):
            names = os.listdir(models)
            if len(names) == 1:
                self.taken.setdefault(int(names[0].partition(".")[0]), now)

    def _is_kill_due(self, now: float) -> bool:
        if self._kill_every_s is None or WARM_UP not in self.ends:
            return False
        return now >= (self.kills[-1] if self.kills else self.ends[WARM_UP]) + self._kill_every_s

    def _kill(self, number: int, now: float) -> None:
        """Send SIGKILL to the agent of a task. The task's worker ends with it."""
        agents = list(_of_tasks(self._paths.run, "agent"))
        if agents:
            self.kills.append(now)
            with suppress(ProcessLookupError):
                os.kill(agents[number % len(agents)], signal.SIGKILL)

    def _folders(self) -> Iterator[Path]:
        """Return the model folder in host memory that each rollout worker holds open."""
        for pid in _of_tasks(self._paths.run, "worker"):
            with suppress(OSError):
                for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                    target = descriptor.readlink()
                    if target.parent.name.startswith("slurmrl-"):
                        yield target / "models"


def _of_tasks(run: Path, role: str) -> Iterator[int]:
    """Return the processes of a role that belong to rollout tasks."""
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
        algorithm={
            "name": "grpo",
            "batch_size": BATCH,
            "n_minibatches": 1,
            "kl": {"coef": 0},
            "zero_variance": "drop" if options.dynamic else "keep",
        },
        rollout={"n": GROUP, "max_new_tokens": options.tokens},
        reward={"name": "reward_of_bench:drawn"},
        checkpoint={"every_steps": 1000},
    )
    actor = config["actor"]
    actor["architecture"] = {**actor["architecture"], **MODEL, "vocab_size": options.words}
    actor["backend"] = f"fsdp:d{kind.ranks}"
    actor["optimizer"] = {"lr": 1e-5}
    config["dataset"]["type"] = "prompt"
    if kind.publish:
        config["rollout"]["publish"] = {}
    if kind.tasks:
        config["rollout"]["tasks"] = {"max": kind.tasks, "max_staleness": options.staleness}
    return config


# -- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A row of the table, and the trials that it needs."""

    what: str
    goal: str
    measured: Callable[..., str]
    kinds: tuple[Kind, ...]


class Table:
    """Measured values and goals, as medians with the minimum and the maximum."""

    def __init__(self, rounds: list[dict[str, Run]]) -> None:
        self._rounds = rounds

    def print(self) -> None:
        """Print the rows for which all trials were run."""
        print("| | goal | median (least to most) |\n|---|---|---|")
        for row in self._rows():
            if all(kind.name in self._rounds[0] for kind in row.kinds):
                print(f"| {row.what} | {row.goal} | {row.measured(*row.kinds)} |")

    def _rows(self) -> Iterator[Row]:
        waited = partial(self._share, "rollout/waited_s")
        yield Row(
            "synchronous / asynchronous, wall time per token",
            "> 1",
            self._ratio,
            (SYNCHRONOUS, ASYNCHRONOUS),
        )
        yield Row(
            "… with two tasks, so that no core waits",
            "> 1",
            self._ratio,
            (SYNCHRONOUS, UNDISTURBED),
        )
        yield Row(
            "share of the steps in which trainers generate, synchronous",
            "",
            partial(self._share, "time/actor_gen"),
            (SYNCHRONOUS,),
        )
        yield Row(
            "share of the steps in which trainers wait, asynchronous", "", waited, (ASYNCHRONOUS,)
        )
        yield Row("… with two tasks", "", waited, (UNDISTURBED,))
        yield Row("… with two tasks that are killed", "", waited, (KILLED,))
        yield Row("kills in a trial", "", self._kills, (KILLED,))
        yield Row(
            "effective training time: undisturbed / killed, wall time per token",
            "≥ 0.95",
            self._ratio,
            (UNDISTURBED, KILLED),
        )
        yield Row(
            "a step without its waiting, s, undisturbed",
            "",
            partial(self._all, "busy_s"),
            (UNDISTURBED,),
        )
        yield Row(
            "… a step with a kill, or after one",
            "the same",
            partial(self._all, "disturbed_s"),
            (KILLED,),
        )
        yield Row(
            "published / not, wall time per token", "1", self._ratio, (PUBLISHED, SYNCHRONOUS)
        )
        yield Row(
            "stall of the trainers for a publication, s",
            "",
            partial(self._all, "stalls_s"),
            (ASYNCHRONOUS,),
        )
        yield Row(
            "from the end of a step to the first task that samples with its weights, s",
            "",
            partial(self._all, "first_tokens_s"),
            (ASYNCHRONOUS,),
        )

    def _of(self, value: Callable[[dict[str, Run]], float], form: str = ".2f") -> str:
        return Spread.of(map(value, self._rounds)).text(form)

    def _ratio(self, above: Kind, below: Kind) -> str:
        return self._of(lambda found: found[above.name].token_s / found[below.name].token_s)

    def _share(self, metric: str, kind: Kind) -> str:
        return self._of(lambda found: found[kind.name].share(metric))

    def _kills(self, kind: Kind) -> str:
        return self._of(lambda found: len(found[kind.name].kills), ".0f")

    def _all(self, values: str, kind: Kind) -> str:
        known = [one for found in self._rounds for one in getattr(found[kind.name], values)]
        return f"{Spread.of(known).text('.3f')}, {len(known)} values" if known else "none"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="that count, of each trial")
    parser.add_argument("--tokens", type=int, default=96, help="of each completion")
    parser.add_argument(
        "--words", type=int, default=512, help="one in so many words ends a completion"
    )
    parser.add_argument(
        "--solved", type=float, default=0.5, help="share of the completions that earn the reward"
    )
    parser.add_argument(
        "--dynamic", action="store_true", help="drop prompts with equal rewards (zero_variance)"
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=[kind.name for kind in KINDS], help="default: all"
    )
    parser.add_argument("--staleness", type=int, default=1, help="rollout.tasks.max_staleness")
    parser.add_argument("--kill-every-s", type=float, default=20.0)
    options = parser.parse_args()
    kinds = [kind for kind in KINDS if not options.kinds or kind.name in options.kinds]
    loads, found = [], []
    with tempfile.TemporaryDirectory(prefix="slurmrl-bench-") as made:
        folder = Path(made)
        (folder / "reward_of_bench.py").write_text(f"SOLVED = {options.solved}\n{REWARD}")
        path = os.pathsep.join((str(folder), str(REPOSITORY)))
        site = Site(folder, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
        for number in range(1, options.rounds + 1):
            runs = {}
            for kind in kinds:
                runs[kind.name] = train(site, kind, number, options)
                loads.append(os.getloadavg()[0])
                text = f"round {number}, {kind.name}: {runs[kind.name].wall_s:.1f} s"
                print(text, file=sys.stderr, flush=True)
            found.append(runs)
    print(
        f"{os.cpu_count()} CPUs, load average {Spread.of(loads).text('.1f')}; {BATCH} x {GROUP} "
        f"completions of up to {options.tokens} tokens, one in {options.words} ends one, "
        f"{options.solved:.0%} earn the reward{', dynamic sampling' * options.dynamic}; "
        f"{options.rounds} rounds of {options.steps} steps, "
        f"max_staleness {options.staleness}, a kill every {options.kill_every_s:.0f} s\n"
    )
    Table(found).print()


if __name__ == "__main__":
    main()

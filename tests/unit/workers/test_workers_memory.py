"""The kernel's count of processes that it killed for lack of memory, on each kind of machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmrl.workers.agent.loss_detection import OomKills

V2 = "0::/system.slice/slurmstepd.scope/job_41/step_0/user/task_0\n"
V1 = "5:devices:/slurm\n4:cpuacct,memory:/slurm/uid_0/job_41/step_0\n1:name=systemd:/\n"
EVENTS = "low 0\nhigh 0\nmax 12\noom 1\noom_kill {}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


class Machine:
    def __init__(self, root: Path, cgroups: str, counter: str, text: str) -> None:
        self.root = root
        self.counter = root / counter
        self.text = text
        self.write("proc/self/cgroup", cgroups)
        self.write("proc/vmstat", "nr_free_pages 5\noom_kill 7\n")
        self.kills(3)

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def kills(self, number: int) -> None:
        self.counter.parent.mkdir(parents=True, exist_ok=True)
        self.counter.write_text(self.text.format(number))


@pytest.mark.parametrize(
    ("cgroups", "counter", "text"),
    [
        (V2, f"sys/fs/cgroup/{V2[4:-1]}/memory.events", EVENTS),
        (V1, "sys/fs/cgroup/memory/slurm/uid_0/job_41/step_0/memory.oom_control", CONTROL),
        (V1 + V2, "sys/fs/cgroup/memory/slurm/uid_0/job_41/step_0/memory.oom_control", CONTROL),
        ("0::/\n", "sys/fs/cgroup/memory.events", EVENTS),
        ("", "proc/vmstat", "nr_free_pages 5\noom_kill {}\n"),
        (V2, "proc/vmstat", "nr_free_pages 5\noom_kill {}\n"),
    ],
)
def test_oom_kill_is_reported_once(tmp_path: Path, cgroups: str, counter: str, text: str) -> None:
    machine = Machine(tmp_path, cgroups, counter, text)
    oom = OomKills(tmp_path)
    assert not oom.happened()
    machine.kills(5)
    assert oom.happened()
    assert not oom.happened()


def test_oom_kills_of_other_processes_are_ignored(tmp_path: Path) -> None:
    Machine(tmp_path, V2, f"sys/fs/cgroup/{V2[4:-1]}/memory.events", EVENTS)
    oom = OomKills(tmp_path)
    (tmp_path / "proc/vmstat").write_text("oom_kill 99\n")
    assert not oom.happened()


def test_machine_without_an_oom_counter_reports_none(tmp_path: Path) -> None:
    assert not OomKills(tmp_path).happened()


def test_oom_counter_of_this_machine_is_readable() -> None:
    assert OomKills().happened() in (False, True)

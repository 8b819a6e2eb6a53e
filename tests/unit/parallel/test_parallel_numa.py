"""CPU affinity near a GPU, with real affinities and a stand-in for sysfs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, threading
from pathlib import Path
from types import SimpleNamespace
from slurmrl.tensors.parallel.gpu import bind_cpus_near

ready, end = threading.Event(), threading.Event()
tid = []
def run():
    tid.append(threading.get_native_id())
    ready.set()
    end.wait()
thread = threading.Thread(target=run)
thread.start()
ready.wait()
gpu = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=0)
bound = bind_cpus_near(gpu, int(sys.argv[2]), Path(sys.argv[1]))
child = os.popen(f"{sys.executable} -c 'import os; print(sorted(os.sched_getaffinity(0)))'").read()
print(bound and sorted(bound), sorted(os.sched_getaffinity(tid[0])), child.strip(), sep="|")
end.set()
"""


def bound(sysfs: Path, least: int = 1) -> list[str]:
    """Return the bound CPUs, and the affinities of an older thread and of a child process."""
    command = [sys.executable, "-c", SCRIPT, str(sysfs), str(least)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip().split("|")


def tree(folder: Path, cpus: str) -> Path:
    device = folder / "bus" / "pci" / "devices" / "0001:3b:00.0"
    device.mkdir(parents=True)
    (device / "local_cpulist").write_text(f"{cpus}\n")
    return folder


needs_two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU cannot be divided")


@needs_two
def test_threads_and_children_are_bound_to_allowed_cpus_of_the_node(tmp_path: Path) -> None:
    """CPUs of the NUMA node that this process may not use are left out."""
    first = min(os.sched_getaffinity(0))
    for cpus in (f"{first}", f"{first},4096-4100"):
        expected = str([first])
        assert bound(tree(tmp_path / cpus, cpus)) == [expected] * 3


@pytest.mark.parametrize("cpus", ["4096-8191", "", "a-b", None])
def test_affinity_is_unchanged_without_a_near_cpu(tmp_path: Path, cpus: str | None) -> None:
    everywhere = str(sorted(os.sched_getaffinity(0)))
    sysfs = tmp_path if cpus is None else tree(tmp_path, cpus)
    assert bound(sysfs) == ["None", everywhere, everywhere]


@needs_two
def test_affinity_is_unchanged_if_the_node_has_too_few_or_all_cpus(tmp_path: Path) -> None:
    """A worker never gets fewer CPUs than the plan gives it."""
    allowed = sorted(os.sched_getaffinity(0))
    assert bound(tree(tmp_path / "few", str(allowed[0])), least=2)[0] == "None"
    assert bound(tree(tmp_path / "all", "0-4095"))[0] == "None"

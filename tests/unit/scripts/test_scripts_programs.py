"""The small Python programs beside the package."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
LONG = '<properties><property name="long" value="True"/></properties>'
RESULTS = f"""<testsuites><testsuite>
<testcase classname="tests.unit.scheduler.test_x" name="a"/>
<testcase classname="tests.unit.scheduler.test_x" name="at length">{LONG}</testcase>
<testcase classname="tests.gpu.test_x" name="fast only"/>
<testcase classname="tests.unit.scheduler.test_x" name="b"><failure message="no"/></testcase>
<testcase classname="tests.slurm.test_y" name="c"><skipped message="no munged"/></testcase>
<testcase classname="tests.faults.test_z" name="d"><error message="no"/></testcase>
<testcase classname="" name="tests.engines.test_w"><skipped message="no triton"/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("lanes", "said"),
    [
        (["unit"], []),
        (["unit", "slurm"], ["no fast test of lane slurm", "no munged"]),
        (["faults"], ["no fast test of lane faults", "no long test of lane faults"]),
        (["engines"], ["no fast test of lane engines", "no triton"]),
        (["gpu"], ["no long test of lane gpu"]),
        (["distributed"], ["no fast test of lane distributed", "none was found"]),
    ],
)
def test_a_lane_without_a_passed_test_is_a_failure(
    tmp_path: Path, lanes: list[str], said: list[str]
) -> None:
    results = tmp_path / "results.xml"
    results.write_text(RESULTS)
    command = [sys.executable, str(ROOT / ".ci" / "check-lanes"), str(results), *lanes]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == (1 if said else 0)
    assert all(words in done.stderr for words in said)
    assert done.stdout == ""
    assert bool(done.stderr) == bool(said)


def test_summary(tmp_path: Path) -> None:
    rewards = [0.1, 0.5, 0.7, 0.8, 0.9]
    metrics = [
        {"step": 10 * index, "eval/reward": reward, "tokens_per_s": 1000 + index}
        for index, reward in enumerate(rewards)
    ]
    lines = [json.dumps(line) for line in [*metrics, {"step": 41, "reward": 0.9}]]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    status = {
        "trial": "addition-ppo/1",
        "state": "COMPLETED",
        "step": 60,
        "total_steps": 60,
        "run": str(tmp_path),
        "export": "/the/export",
    }
    command = [sys.executable, str(ROOT / "scripts" / "summary")]
    done = subprocess.run(
        command, input=json.dumps(status), capture_output=True, text=True, check=True
    )
    for words in ("0.100 before, 0.800 after", "1,002 tokens/s", "/the/export", "COMPLETED"):
        assert words in done.stdout


def module_of(name: str) -> ModuleType:
    """A program of scripts/bench, imported."""
    path = ROOT / "scripts" / "bench" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up their types
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def learning() -> ModuleType:
    return module_of("learning")


def entry_of(learning: ModuleType, name: str) -> Any:
    return next(entry for entry in learning.TABLE if entry.name == name)


def test_learning_curves_are_those_of_all_seeds(learning: ModuleType, tmp_path: Path) -> None:
    """Only steps that every seed has reached count, a seed that has not begun is left out, and a
    line that is being written is not read."""
    scores = {1: {0: 0.4, 10: 0.7, 20: 0.9}, 2: {0: 0.5, 10: 0.8}}
    rloo = entry_of(learning, "rloo")
    for seed, rewards in scores.items():
        run = learning.run_of(tmp_path, rloo, seed).metrics
        run.parent.mkdir(parents=True)
        lines = [{"step": step, "eval/reward": reward} for step, reward in rewards.items()]
        whole = "".join(f"{json.dumps(line)}\n" for line in [*lines, {"step": 21}])
        run.write_text(whole + '{"step": 22, "eval/rew')
    command = [sys.executable, learning.__file__, "--report"]
    command += ["--root", str(tmp_path), "--seeds", "1,2,3", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row = "| `rloo` | 1, 2 | 0: 0.45 (0.40 to 0.50), 10: 0.75 (0.70 to 0.80) | 0.8, not met |"
    assert done.stdout.splitlines()[2:] == [row]
    (curve,) = json.loads((tmp_path / "out.json").read_text())
    assert (curve["name"], curve["scores"]["10"]) == ("rloo", {"1": 0.7, "2": 0.8})


def test_a_learning_trial_of_other_settings_is_another_trial(
    learning: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A changed table, example or start model never reports what earlier settings reached."""
    cispo, dpo = entry_of(learning, "cispo"), entry_of(learning, "dpo")
    others = [replace(cispo, overrides=(*cispo.overrides, "seed=9")), replace(dpo, sampled="")]
    names = [entry.trial(seed) for entry in (cispo, dpo, *others) for seed in (1, 2)]
    assert len(set(names)) == len(names)
    for entry in learning.TABLE:
        assert learning.START.trial(1) in " ".join(entry.overrides), entry.name
    example = (ROOT / "examples" / "dpo.yaml").read_text()
    (tmp_path / "dpo.yaml").write_text(f"# a comment\n{example}")
    monkeypatch.setattr(learning, "EXAMPLES", tmp_path)
    assert dpo.trial(1) in names
    (tmp_path / "dpo.yaml").write_text(example.replace("beta: 3.0", "beta: 4.0"))
    assert dpo.trial(1) not in names


@pytest.mark.parametrize("name", ["cli", "plan", "train"])
def test_benchmarks_explain_themselves(name: str) -> None:
    """``--help`` prints the description, and an unknown argument is an error of usage."""
    command = [sys.executable, str(ROOT / "scripts" / "bench" / f"{name}.py")]
    for arguments, code, words in ((["--help"], 0, "--rounds"), (["10"], 2, "unrecognized")):
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert (done.returncode, words in done.stdout + done.stderr) == (code, True), done.stderr
        assert "Traceback" not in done.stderr


CHILD = """
import sys, time
memory = bytearray(int(sys.argv[1]) << 20)
while time.process_time() < float(sys.argv[2]):
    pass
print("ready", flush=True)
sys.stdin.read()
"""


def test_usage_counts_a_child_while_it_runs_and_once_it_has_ended() -> None:
    """A server's CPU time and memory are in its row, however its processes end."""
    tree = module_of("process_tree")
    before = tree.usage()
    command = [sys.executable, "-c", CHILD, "64", "0.3"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        alive = tree.usage()
        child.communicate()
    ended = tree.usage()
    assert min(alive.cpu_s, ended.cpu_s) - before.cpu_s >= 0.25
    assert alive.peak_kib - before.peak_kib >= 64 << 10
    assert ended.resident_kib - before.resident_kib < 64 << 10


def test_help_of_the_tests_is_printed_without_a_setup(tmp_path: Path) -> None:
    folder = tmp_path / "clone" / "scripts"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "test", folder)
    done = subprocess.run([folder / "test", "--help"], capture_output=True, text=True, check=True)
    assert "scripts/test --all" in done.stdout
    assert [path.name for path in folder.parent.iterdir()] == ["scripts"]

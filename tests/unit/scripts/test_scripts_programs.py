"""The small Python programs in scripts/."""

from __future__ import annotations

import ast
import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BENCH = ROOT / "scripts" / "bench"
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
def test_ci_fails_if_a_lane_has_no_passed_test(
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


def test_summary_gives_rewards_speed_and_end_state(tmp_path: Path) -> None:
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
    for words in ("0.100 before, 0.900 after", "1,002 tokens/s", "/the/export", "COMPLETED"):
        assert words in done.stdout


@pytest.mark.parametrize("name", ["cli", "plan", "train"])
def test_benchmarks_print_help_and_reject_unknown_arguments(name: str) -> None:
    command = [sys.executable, str(ROOT / BENCH / f"{name}.py")]
    for arguments, code, words in ((["--help"], 0, "--rounds"), (["10"], 2, "unrecognized")):
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert (done.returncode, words in done.stdout + done.stderr) == (code, True), done.stderr
        assert "Traceback" not in done.stderr


def module_file(name: str) -> Path | None:
    places = [folder.joinpath(*name.split(".")) for folder in (ROOT, BENCH)]
    files = [file for one in places for file in (one.with_suffix(".py"), one / "__init__.py")]
    return next((file for file in files if file.is_file()), None)


@functools.cache
def names_in(file: Path) -> set[str]:
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = {node.name for node in nodes if isinstance(node, kinds)}
    stores = [
        node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    found |= {node.id for node in stores}
    return found | {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}


def test_benchmarks_import_names_that_exist() -> None:
    """The benchmarks themselves run for minutes, or need a GPU."""
    missing = []
    for path in sorted(BENCH.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            file = module_file(node.module)
            ours = file is not None or node.module.startswith(("slurmrl", "tests"))
            for name in (alias.name for alias in node.names if ours):
                known = file is not None and name in names_in(file)
                if not known and module_file(f"{node.module}.{name}") is None:
                    missing.append((path.name, node.module, name))
    assert missing == []


def test_help_of_the_tests_is_printed_without_a_setup(tmp_path: Path) -> None:
    folder = tmp_path / "clone" / "scripts"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "test", folder)
    done = subprocess.run([folder / "test", "--help"], capture_output=True, text=True, check=True)
    assert "scripts/test --all" in done.stdout
    assert [path.name for path in folder.parent.iterdir()] == ["scripts"]

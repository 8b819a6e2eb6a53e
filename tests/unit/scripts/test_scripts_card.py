"""Tests of scripts/test-gpu on a machine on which nobody can repair a failure."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEST_GPU = ROOT / "scripts" / "test-gpu"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from card import environment

    return environment


RUN = """
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from card.sections import Section, adopt_orphans, run
from card import sections
sections.ENDING = tuple((number, 1.0) for number, _ in sections.ENDING)
adopt_orphans()
work = Path(sys.argv[2])
detached = f'''
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
    start_new_session=True)
open({str(work / "pid")!r}, "w").write(str(child.pid))
'''
deaf = '''
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("waiting for the GPU", flush=True)
time.sleep(600)
'''
for name, program, limit in (
    ("detached", detached, 60), ("deaf", deaf, 5), ("wrong", "print(1); raise SystemExit(4)", 60),
    ("long", "print('first'); print('x\\\\n' * 200_000); print('last')", 60),
):
    section = Section(name, "", (sys.executable, "-X", "faulthandler", "-c", program), 1)
    done = run(section, limit, work, os.environ)
    print(json.dumps([name, done.status, done.failed, done.last_line, done.output[:3000]]))
skipped = run(Section("skipped", "", ("nothing",), 1, "no nvcc"), 1, work, {})
print(json.dumps(["skipped", skipped.status, skipped.failed, "", ""]))
"""


def test_failing_or_hanging_section_does_not_stop_others(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(ROOT / "scripts"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = {name: rest for name, *rest in map(json.loads, done.stdout.splitlines())}
    assert found["detached"][:2] == ["passed", False]
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()
    assert found["deaf"][:2] == ["TIMED OUT after 5 s", True]
    assert "waiting for the GPU" in found["deaf"][3]
    assert "most recent call first" in found["deaf"][3]
    assert found["wrong"][:3] == ["FAILED (exit 4)", True, "1"]
    assert found["skipped"][:2] == ["skipped: no nvcc", False]
    status, _, last, output = found["long"]
    assert (status, last, output[:5]) == ("passed", "last", "first")


WHOLE = """
import runpy, sys, time
from pathlib import Path
scripts, out = map(Path, sys.argv[1:])
sys.path.insert(0, str(scripts))
from card.environment import Environment
from card.sections import Section
test_gpu = runpy.run_path(str(scripts / "test-gpu"))
report = out / test_gpu["REPORT"]
seen = f"print('seen: ' + open({str(report)!r}).read())"
chosen = [
    Section("first", "prints", (sys.executable, "-c", "print('a | b')"), 60),
    Section("absent", "cannot run", ("nothing",), 60, "no nvcc"),
    Section("second", "fails", (sys.executable, "-c", seen + "; raise SystemExit(3)"), 60),
]
torch = {"torch": "2.11.0", "cuda": "13.0", "gpus": ["H200"], "python": "3.12.3"}
found = Environment(Path(sys.executable), torch, ["numpy>=1.26"])
test_gpu["run_all"](chosen, time.monotonic() + 300, report, found, "")
"""


def test_report_is_complete_after_each_section(tmp_path: Path) -> None:
    """If the machine is taken away during the run, the results of the finished sections remain."""
    done = subprocess.run(
        [sys.executable, "-c", WHOLE, ROOT / "scripts", tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "gpu-report.md").read_text()
    assert "| first | passed |" in report
    assert "| a \\| b |" in report
    assert "| absent | skipped: no nvcc |" in report
    assert "| second | FAILED (exit 3) |" in report
    assert "| cannot be had | numpy>=1.26 |" in report
    earlier = report.partition("seen: ")[2]
    assert "| first | passed |" in earlier
    assert "**1 more sections had not run when this report was written.**" in earlier
    assert "more sections" not in report.partition("seen: ")[0]


MAIN = """
import runpy, sys
from pathlib import Path
from types import SimpleNamespace
scripts, out, status = sys.argv[1:]
sys.path.insert(0, scripts)
from card.environment import Environment
from card.sections import Section
main = runpy.run_path(f"{scripts}/test-gpu")["main"]
torch = {"torch": "2.11.0", "cuda": "13.0", "gpus": ["H200"], "python": "3.12.3"}
python = Path(sys.executable)
exits = (sys.executable, "-c", f"raise SystemExit({status})")
main.__globals__["sections"] = lambda *_: [
    Section("lane", "", exits, 60), Section("mfu", "", (sys.executable, "-c", ""), 60)
]
main.__globals__["environment"] = SimpleNamespace(
    find_torch=lambda named: (python, torch), prepare=lambda *_: Environment(python, torch)
)
sys.argv = ["test-gpu", "--out", out]
sys.exit(main())
"""


@pytest.mark.parametrize("status", [0, 1])
def test_exit_status_reports_failed_sections(tmp_path: Path, status: int) -> None:
    command = [sys.executable, "-c", MAIN, ROOT / "scripts", tmp_path, str(status)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    assert ("failed: lane" in done.stdout) == bool(status)
    assert "| mfu | passed |" in (tmp_path / "gpu-report.md").read_text()


def test_sections_name_existing_programs_and_fit_into_nine_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a wrong name would be noticed only on the GPU machine."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    sections = runpy.run_path(str(TEST_GPU))["sections"](sys.executable, "nvcc", "sanitizer")
    assert sum(section.seconds for section in sections) <= 9 * 60
    for section in sections:
        words = section.command[1:]
        if words[:2] == ("-m", "pytest"):
            for node in (word.partition("=")[2] or word for word in words if "tests/" in word):
                file, _, test = node.partition("::")
                assert (ROOT / file).exists()
                assert not test or f"def {test}(" in (ROOT / file).read_text()
            continue
        module = ROOT.joinpath(*words[1].split(".")) if words[0] == "-m" else None
        program = ROOT / words[0] if module is None else module / "__main__.py"
        source = program.read_text()
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert f'"{option}"' in source, (section.name, option)


def test_nested_venv_has_packages_of_the_outer_venv_and_the_wheels(  # type: ignore[no-untyped-def]
    environment, tmp_path: Path
) -> None:
    """--system-site-packages alone would use the packages of the first Python, without torch."""
    outer = tmp_path / "outer"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", outer], check=True)
    python = outer / "bin" / "python"
    (packages,) = outer.glob("lib/*/site-packages")
    (packages / "only_here.py").write_text("")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "carried-1.0-py3-none-any.whl", "w") as wheel:
        about = "carried-1.0.dist-info"
        wheel.writestr("carried.py", "")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    made = environment.make_venv(python, [str(packages)], tmp_path / "made")
    missing = environment.install(made, ["carried>=1", "nowhere>=2"], wheels)
    assert missing == ["nowhere>=2"]
    program = "import carried, only_here, slurmrl; print(slurmrl.__file__)"
    done = subprocess.run([made, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == str(ROOT / "slurmrl" / "__init__.py"), done.stderr


def fake_python(path: Path, **facts: object) -> Path:
    path.write_text(f"#!/bin/sh\necho '{json.dumps(facts)}'\n")
    path.chmod(0o700)
    return path


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (
            {"torch": "2.13.0+cpu", "cuda": None, "gpus": [], "reason": "no CUDA in it"},
            "torch 2.13.0+cpu: no CUDA in it",
        ),
        ({"torch": "2.10.1+cu130", "cuda": "13.0", "gpus": ["H200"]}, "torch 2.10.1+cu130: too"),
        ({"torch": "2.13.0", "cuda": "13.0", "gpus": []}, "torch 2.13.0: it sees no GPU"),
        ({"reason": "no module named torch"}, "python: no module named torch"),
    ],
)
def test_script_without_a_gpu_prints_the_reason_and_runs_nothing(
    facts: dict[str, object], said: str, tmp_path: Path
) -> None:
    python = fake_python(tmp_path / "python", **facts)
    done = subprocess.run(
        [sys.executable, TEST_GPU, "--python", python, "--out", tmp_path / "out"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 3
    assert f"{tmp_path}/" in done.stderr
    assert said in done.stderr
    assert not os.listdir(tmp_path / "out")

"""The wheel works without the repository, in a separate environment."""

from __future__ import annotations

import json
import re
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest

from slurmrl import __version__
from tests.support.clone import call, checkout

ROOT = Path(__file__).parents[2]
RUN = ("total_steps=2", "stop_when=null", "evaluation=null", "cluster.gpus_per_worker=0")


def contents(package: Path) -> dict[Path, tuple[int, int]]:
    """Return a value that changes if anything except bytecode is written to an installed
    package.
    """
    files = (path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


@pytest.mark.long
def test_wheel_works_in_a_clean_environment(tmp_path: Path) -> None:
    tree, place, work = tmp_path / "tree", tmp_path / "venv", tmp_path / "work"
    commit = checkout(tree)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", tree, "-w", tmp_path]
    call(build, tmp_path)
    (wheel,) = tmp_path.glob("slurmrl-*.whl")
    call([sys.executable, "-m", "venv", "--without-pip", place], tmp_path)
    (packages,) = place.glob("lib/python*/site-packages")
    # Link the wheel's dependencies, but not their .pth files, which lead to this checkout.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    call([*pip, "--python", place / "bin/python", "install", "-q", "--no-deps", wheel], tmp_path)
    package = packages / "slurmrl"
    for path in [package, *package.rglob("*")]:
        path.chmod(path.stat().st_mode & 0o555)
    before = contents(package)
    work.mkdir()
    program = place / "bin/slurmrl"

    def slurmrl(*words: str) -> str:
        return call([program, *words], work, HOME=str(tmp_path / "home"), XDG_CONFIG_HOME="")

    assert slurmrl("--version") == f"slurmrl {__version__} (commit {commit})\n"
    assert "wrote grpo.yaml, grpo.jsonl, grpo_reward.py" in slurmrl("init", "grpo")
    assert slurmrl("init", "site", "--yes").count("slurmrl-runs") == 1
    assert re.search(r"^grpo\.yaml +GRPO", slurmrl("examples"), re.MULTILINE)
    pages = call(["git", "ls-files", "docs"], tree).split()
    assert [name for name in pages if not (package / name).is_file()] == []
    assert slurmrl("docs", "install") == (tree / "docs/howto/install.md").read_text()
    assert "## " in slurmrl("docs", "changelog")
    slurmrl("examples", "--output", "examples")
    tracked = call(["git", "ls-files", "examples"], tree).split()
    copied = [str(path.relative_to(work)) for path in (work / "examples").rglob("*")]
    assert set(tracked) <= set(copied)
    rows = "examples/addition/train.jsonl"
    slurmrl("train-tokenizer", rows, "--key", "prompt", "--key", "answer", "--output", "tokenizer")
    own = "actor.tokenizer=tokenizer"
    assert "10+10=" in slurmrl("data", "show", "examples/sft.yaml", own, "--rows", "1")
    slurmrl("submit", "examples/sft.yaml", *RUN, "--scheduler", "local", "--root", "runs")
    slurmrl("report", "addition-sft/1", "--output", "report.html", "--root", "runs")
    assert "uPlot" in (work / "report.html").read_text()
    (run,) = (work / "runs").glob("*/addition-sft/1")
    assert json.loads((run / "code/environment.json").read_text())["slurmrl_commit"] == commit
    with ZipFile(run / "code/slurmrl/modules.zip") as archive:
        folders = {name.partition("/")[0] for name in archive.namelist()}
    assert "cuda" in folders
    assert not folders & {"examples", "docs", "CHANGELOG.md"}
    assert contents(package) == before, "something was written to the installed package"

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import pytest

from slurmrl import __version__
from slurmrl.cli import main as module
from slurmrl.cli.main import COMMANDS, Invocation, main
from slurmrl.errors import (
    ConfigError,
    EnvironmentFailure,
    Problem,
    RunFailedError,
    UsageError,
)
from slurmrl.run.history.slots import Kind
from tests.fake_runs import FakeRun, write_config
from tests.unit.cli.conftest import Command

FREE = {"data", "completion", "init", "examples", "docs", "explain", "train-tokenizer"}
"""Commands that look at no trial and no configuration; the first has commands of its own."""
HEAVY = ("pydantic", "rich", "ruamel", "torch", "submitit", "numpy", "transformers")
SLOW = ("shutil", "subprocess", "tempfile", "asyncio")
"""Parts of the standard library that take milliseconds."""


def modules_after(*lines: list[str], cwd: Path, names: Sequence[str] = HEAVY) -> list[str]:
    """Return which of some packages these command lines import, in a separate process."""
    code = f"""
import sys
from slurmrl.cli.main import main
codes = [main(line) for line in {lines!r}]
found = [name for name in {tuple(names)!r} if name in sys.modules]
print("\\n", any(codes), found, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd)
    failed, _, found = done.stderr.strip().rpartition("\n")[2].strip().partition(" ")
    assert failed == "False", done.stderr
    result: list[str] = eval(found)
    return result


def test_help_status_and_logs_import_nothing_slow(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "runs")
    run.log("0.0.log", "hello\n")
    commands = [["status", "--json"], ["logs", "add/1"]]
    assert modules_after(*([name, "--help"] for name in COMMANDS), *commands, cwd=tmp_path) == []


def test_trial_status_imports_nothing_slow(tmp_path: Path) -> None:
    FakeRun(tmp_path / "runs").end(Kind.CANCELLED, reason="cancelled by me")
    names = [*HEAVY, *SLOW]
    assert modules_after(["status", "add/1"], cwd=tmp_path, names=names) == []


def test_submit_imports_no_torch(tmp_path: Path) -> None:
    arguments = ["submit", str(write_config(tmp_path)), "--dry-run", "--scheduler", "local"]
    found = modules_after(arguments, cwd=tmp_path)
    assert {"torch", "transformers", "numpy"}.isdisjoint(found)


def test_help_lists_all_commands_and_the_exit_codes(command: Command) -> None:
    output = " ".join(command("--help").out.split())
    assert all(f"{name} {entry.help}" in output for name, entry in COMMANDS.items())
    assert "3 environment error, 130 interrupted" in output


@pytest.mark.parametrize(
    ("name", "replacement"), [("graph", "slurmrl plan CONFIG --graph"), ("names", "slurmrl status")]
)
def test_removed_command_names_its_replacement(
    command: Command, name: str, replacement: str
) -> None:
    assert f"the command '{name}' was removed: {replacement}" in command(name, "add/1", code=2).err


def parsed(words: list[str], path: str, command: click.Command, parent: click.Context) -> str:
    """Return the command that a command line calls, after its arguments are parsed."""
    if not isinstance(command, click.Group):
        command.make_context(path, words, parent=parent, obj=parent.obj).close()
        return path
    child = command.get_command(parent, words[0])
    assert child is not None, words
    return parsed(words[1:], f"{path} {words[0]}".strip(), child, parent)


@pytest.mark.parametrize(
    "name", [*sorted(COMMANDS.keys() - {"data", "completion"}), "data show", "data check"]
)
def test_command_help_has_root_debug_and_valid_examples(command: Command, name: str) -> None:
    options, _, text = command(*name.split(), "--help").out.partition("Examples:\n")
    assert name in FREE or ("--root DIR" in options and "--debug" in options)
    lines = [shlex.split(line) for line in text.splitlines() if line.strip()]
    assert len(lines) >= 2
    context = click.Context(module.cli, obj=Invocation())
    called = [parsed(words[1:], "", module.cli, context) for words in lines]
    assert called[0] == name


def test_version_option_prints_the_version(command: Command) -> None:
    commit = r"( \(commit [0-9a-f]{40}(\+changes)?\))?"
    shown = command("--version").out
    assert re.fullmatch(f"slurmrl {re.escape(__version__)}{commit}\n", shown)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stauts"], "did you mean 'status'"),
        (["submit"], "Missing argument 'CONFIG'"),
        (["submit", "none.yaml"], "cannot be read: No such file"),
        (["submit", "x.yaml", "--scheduler", "ray"], "'ray' is not one of"),
        (["status", "--jsno"], "No such option '--jsno'"),
        (
            ["submit", "x.yaml", "--rollout.n=4"],
            "'. A setting is written without dashes: rollout.n=",
        ),
        (["resume", "add/1", "--seed", "3"], "'. A setting is written without dashes: seed=VALUE"),
        (["resume", "add"], "expected EXPERIMENT/TRIAL"),
        (["try-reward", "x.yaml", "--completions", "."], "completions': File '.' is a directory"),
        (["simulate", "x.yaml", "--trace", "."], "'--trace': File '.' is a directory"),
        (["cancel", "add/1"], "there are no trials"),
    ],
)
def test_wrong_usage_exits_with_2(
    command: Command,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    captured = command(*arguments, code=2)
    assert message in captured.err
    assert captured.out == ""


def test_all_configuration_problems_are_printed_at_once(command: Command, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    config.write_text(config.read_text() + "seeed: 3\n")
    message = command("submit", str(config), "total_steps=none", "actor.lr=1", code=2).err
    assert "Error: 3 problems in the configuration" in message
    assert f"{config}:9: seeed: unknown key; did you mean 'seed'?" in message
    assert "command line: total_steps" in message
    assert "command line: actor.lr" in message


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UsageError("not so"), 2, "Error: not so"),
        (
            ConfigError((Problem("a.yaml:1", "seed", "is wrong"),)),
            2,
            "Error: 1 problem in the configuration\n  a.yaml:1: seed: is wrong",
        ),
        (EnvironmentFailure("no sbatch"), 3, "Error: no sbatch"),
        (PermissionError(13, "Permission denied", "/root"), 3, "/root: Permission denied"),
        (RunFailedError("NaN"), 1, "Error: NaN"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
@pytest.mark.parametrize("debug", [False, True])
def test_errors_have_documented_exit_codes(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    message: str,
    debug: bool,
) -> None:
    def fail(root: Path) -> None:
        raise error

    monkeypatch.setattr("slurmrl.desk.trials.all_trials", fail)
    said = command("status", *(["--debug"] if debug else []), code=code).err
    if code == 130:
        return
    assert ("Traceback" in said) is debug
    assert debug or message in said


def test_internal_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(root: Path) -> None:
        raise KeyError("bug")

    monkeypatch.setattr("slurmrl.desk.trials.all_trials", fail)
    with pytest.raises(KeyError):
        main(["status"])


def test_unwritable_root_exits_with_3(command: Command, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    blocked = tmp_path / "file"
    blocked.touch()
    arguments = ["submit", str(config), "--scheduler", "local", "--root", str(blocked / "runs")]
    assert str(blocked) in command(*arguments, code=3).err


def test_missing_sbatch_exits_with_3(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    where = ["--scheduler", "slurm", "--root", str(tmp_path / "runs")]
    arguments = [str(config), "cluster.gpus_per_worker=0", "--no-check", *where]
    assert "sbatch is not on PATH" in command("submit", *arguments, code=3).err
    assert "#SBATCH --array=0-7%1" in command("submit", *arguments, "--dry-run").out
    assert not (tmp_path / "runs").exists()


def test_submit_without_slurm_controller_exits_with_3(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` must not train on a login node while the controller is down."""
    config = write_config(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    for name in ("sbatch", "scontrol", "sinfo"):
        file = tmp_path / name
        file.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
        file.chmod(0o755)
    arguments = [str(config), "cluster.gpus_per_worker=0", "--root", str(tmp_path / "runs")]
    told = command("submit", *arguments, "cluster.slurm.time=1:00:00", "--no-check", code=3).err
    assert "Unable to contact slurm controller" in told
    assert "--scheduler local" in told
    assert not (tmp_path / "runs").exists()


INTERRUPTED_IMPORT = """
import sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "slurmrl.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
from slurmrl.__main__ import main
sys.exit(main())
"""


def test_ctrl_c_during_imports_exits_with_130(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_closed_pipe_ends_the_command_silently(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "runs")
    run.log("0.0.log", "line\n" * 100_000)
    command = f"set -o pipefail; '{sys.executable}' -m slurmrl logs add/1 | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (141, "line\n", "")

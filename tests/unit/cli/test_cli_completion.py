"""Completion in the real shells; zsh and fish where they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slurmrl.env import user_name

ASK = {
    "bash": """
eval "$(slurmrl completion bash)"
COMP_WORDS=(%s); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
$(complete -p slurmrl | sed 's/.*-F \\([^ ]*\\) .*/\\1/') slurmrl
printf '%%s\\n' "${COMPREPLY[@]}"
""",
    "zsh": """
compdef() { asked=$1 }
eval "$(slurmrl completion zsh)"
compadd() { print -l -- $completions }
_describe() { print -l -- ${completions_with_descriptions%%%%:*} }
commands[slurmrl]=1
words=(%s); CURRENT=$#words
$asked
""",
    "fish": """
slurmrl completion fish | source
set line %s
complete -C "$line" | string replace -r '\\t.*' ''
""",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a configuration, three trials, and a slurmrl of this Python on its path."""
    for trial in ("add/2", "add/10", "other/1"):
        (tmp_path / "runs" / user_name() / trial).mkdir(parents=True)
    (tmp_path / "ppo.yaml").touch()
    program = tmp_path / "bin" / "slurmrl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m slurmrl "$@"\n')
    program.chmod(0o755)
    return tmp_path


def completed(shell: str, words: list[str], folder: Path) -> set[str]:
    """What the shell offers in place of the last word; fish has an order of its own."""
    line = " ".join(repr(word) for word in words) if shell != "fish" else repr(" ".join(words))
    environ = os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "HOME": str(folder),
    }
    environ.pop("SLURMRL_ROOT", None)
    flags = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    done = subprocess.run(
        [shell, *flags, "-c", ASK[shell] % line],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_options_and_trials(shell: str, folder: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert completed(shell, ["slurmrl", "st"], folder) == {"stacks", "status", "stop"}
    assert completed(shell, ["slurmrl", "logs", "--fol"], folder) == {"--follow"}
    assert completed(shell, ["slurmrl", "cancel", "add/"], folder) == {"add/2", "add/10"}
    assert completed(shell, ["slurmrl", "unknown", "x"], folder) == set()


def test_a_root_that_is_named_before_the_trial_counts(folder: Path) -> None:
    (folder / "elsewhere" / user_name() / "far" / "7").mkdir(parents=True)
    words = ["slurmrl", "status", "--root", "elsewhere", ""]
    assert completed("bash", words, folder) == {"far/7"}


def test_answers_import_nothing_heavy_and_leave_files_to_the_shell(folder: Path) -> None:
    code = (
        "import sys; from slurmrl.cli.main import main; main([]); "
        "print([one for one in ('pydantic', 'rich', 'torch', 'ruamel') if one in sys.modules])"
    )
    environ = os.environ | {"_SLURMRL_COMPLETE": "bash_complete"}
    for words, answer in (("slurmrl submit pp", "file,pp"), ("slurmrl cancel o", "plain,other/1")):
        asking = environ | {"COMP_WORDS": words, "COMP_CWORD": "2"}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, env=asking, capture_output=True, text=True
        )
        assert done.stdout.split() == [answer, "[]"], done.stderr

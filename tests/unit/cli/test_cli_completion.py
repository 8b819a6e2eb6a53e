"""Completion in the real shells; zsh and fish where they are installed."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurmrl.env import user_name
from slurmrl.run.paths import RunPaths

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
    """Return a folder with a configuration, three trials, and a command slurmrl of this Python."""
    for trial in ("add/2", "add/10", "other/1"):
        (tmp_path / "runs" / user_name() / trial).mkdir(parents=True)
    (tmp_path / "ppo.yaml").touch()
    program = tmp_path / "bin" / "slurmrl"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\n[ -n "$_SLURMRL_COMPLETE" ] || [ "$1" != submit ] || exec echo "ran <$*>"\n'
        f'exec {sys.executable} -m slurmrl "$@"\n'
    )
    program.chmod(0o755)
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a shell that finds the folder's slurmrl and none of the user's
    files.
    """
    environ = os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "HOME": str(folder),
    }
    environ.pop("SLURMRL_ROOT", None)
    return environ


def completed(shell: str, words: list[str], folder: Path) -> set[str]:
    """Return the replacements that the shell offers for the last word; fish sorts them
    differently.
    """
    line = " ".join(repr(word) for word in words) if shell != "fish" else repr(" ".join(words))
    environ = environment(folder)
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


def start_trial(folder: Path) -> None:
    """Make the files of add/10 that completion reads: two steps, two checkpoints."""
    paths = RunPaths.of(folder / "runs", user_name(), "add", "10")
    paths.identity.parent.mkdir(parents=True, exist_ok=True)
    paths.identity.write_text("{}")
    lines = ({"step": 1, "time": 0.0, "reward": 0.1}, {"step": 2, "eval/reward": 0.5, "loss": 1})
    paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in (20, 140):
        paths.checkpoint(step, 1).mkdir(parents=True)
    paths.samples.mkdir()
    (paths.samples / "step-00000007.jsonl").write_text("{}\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_keys_values_metrics_and_steps(shell: str, folder: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    start_trial(folder)

    def offered(*words: str) -> set[str]:
        return completed(shell, ["slurmrl", *words], folder)

    submit = ("submit", "ppo.yaml")
    assert offered(*submit, "actor.opt") == {"actor.optimizer."}
    assert offered(*submit, "trial=2", "actor.optimizer.w") == {
        "actor.optimizer.weight_decay=",
        "actor.optimizer.warmup_steps=",
    }
    # bash splits words at "=" and replaces only the value
    for key, value, values in (
        ("actor.optimizer.schedule", "co", {"constant", "cosine"}),
        ("rollout.greedy", "", {"true", "false"}),
        ("algorithm.name", "d", {"dr_grpo", "dapo", "dpo", "distill"}),
        ("reward.name", "m", {"math", "model"}),
    ):
        if shell == "bash":
            typed, expected = [key, "=", *([value] if value else [])], values
        else:
            typed, expected = [f"{key}={value}"], {f"{key}={one}" for one in values}
        assert offered(*submit, *typed) == expected
    assert offered("explain", "rollout.pub") == {"rollout.publish", "rollout.publish."}
    assert offered("explain", "--algorithm", "gs") == {"gspo"}
    assert offered("plot", "add/10", "e") == {"eval/reward"}
    assert offered("export", "add/10", "--step", "") == {"20", "140"}
    assert offered("samples", "add/10", "--step", "") == {"7"}
    assert offered("eval", "ppo.yaml", "--checkpoint", "add/10@1") == {"add/10@140"}


INTERACTIVE = {
    "bash": (["--norc", "-i"], 'eval "$(slurmrl completion bash)"'),
    "zsh": (["-f", "-i"], 'autoload -U compinit; compinit -u -D; eval "$(slurmrl completion zsh)"'),
    "fish": (["--no-config", "-i"], "slurmrl completion fish | source"),
}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completed_key_is_followed_by_no_space(shell: str, folder: Path) -> None:
    """Type into a shell in a terminal: Tab completes a section, and its key follows.

    The program prints its arguments, because shells write only what changes on the screen.
    """
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    flags, begin = INTERACTIVE[shell]
    environ = environment(folder) | {"TERM": "xterm" if shell == "fish" else "dumb"}
    master, terminal = pty.openpty()
    with subprocess.Popen(
        ["setsid", "--ctty", shell, *flags],
        cwd=folder,
        env=environ,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    ) as process:
        os.close(terminal)
        try:
            type_until(master, f"{begin}; echo rea''dy\n", "ready\r")
            type_until(master, "slurmrl submit ppo.yaml actor.opt\t", "actor.optimizer.")
            type_until(master, "lr\n", "ran <submit ppo.yaml actor.optimizer.lr>")
        finally:
            process.kill()
            os.close(master)


def type_until(terminal: int, text: str, wanted: str) -> None:
    """Write to a terminal, and read until it shows ``wanted``."""
    shown = ""
    os.write(terminal, text.encode())
    end = time.monotonic() + 60
    while wanted not in shown:
        assert time.monotonic() < end, f"waited for {wanted!r}: {shown!r}"
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")


def test_completion_of_trials_uses_an_earlier_root_option(folder: Path) -> None:
    (folder / "elsewhere" / user_name() / "far" / "7").mkdir(parents=True)
    words = ["slurmrl", "status", "--root", "elsewhere", ""]
    assert completed("bash", words, folder) == {"far/7"}


def test_completion_imports_nothing_slow_and_leaves_files_to_the_shell(folder: Path) -> None:
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

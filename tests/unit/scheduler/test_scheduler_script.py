"""The text of batch scripts."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurmrl import child
from slurmrl.errors import UsageError
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler import batch_script
from slurmrl.scheduler.base import GroupRequest, SubmissionRequest
from slurmrl.scheduler.local_chain import LocalScheduler
from slurmrl.scheduler.slurm import SlurmScheduler
from tests.support.trials import wait_until

OPTIONS: dict[str, Any] = {
    "slurm": {
        "account": "a b",
        "partition": None,
        "time": "1:00:00",
        "signal_lead_s": 120,
        "extra_lines": ["--exclusive"],
        "setup": ["module load cuda"],
        "gpu_directive": "gres",
        "gpu_type": "h100",
    },
}
GROUP = GroupRequest(
    name="trainer",
    hosts=2,
    workers_per_host=2,
    gpus_per_worker=1,
    cpus_per_worker=4,
    mem_per_worker="16G",
    links=8,
)


def request(options: dict[str, Any] | None = None, **slurm: Any) -> SubmissionRequest:
    options = options or {}
    return SubmissionRequest(
        number=3,
        uuid="0123456789abcdef",
        trial="experiment/trial",
        run=RunPaths(Path("/shared/it's 100% mine")),
        python="/opt/my python",
        groups=(GROUP,),
        options={**options, "slurm": {**options.get("slurm", {}), **slurm}},
    )


CHAIN = Path(__file__).with_name("golden").joinpath("chain.sh").read_text()
"""The script of `OPTIONS` and `GROUP`."""
ONE_LINK = ("#SBATCH --array=0-7%1", "#SBATCH --array=0-0%1")
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "chain": ({}, {}, "", ""),
    "everything": (
        {
            "partition": "gpu,long",
            "qos": "high",
            "constraint": "a100|h100",
            "nodelist": "n[0-3,7]",
            "exclude": "n9",
            "reservation": "spring school",
            "licenses": "sim:2",
            "signal_lead_s": 600,
            "setup": ["module load cuda", 'export GREETING="Grüße, $USER"'],
        },
        {},
        "#SBATCH --signal=B:USR2@120\nslurmrl_exclude=''",
        "#SBATCH --constraint='a100|h100'\n#SBATCH --exclude=n9\n#SBATCH --licenses=sim:2\n"
        "#SBATCH --nodelist='n[0-3,7]'\n#SBATCH --partition=gpu,long\n#SBATCH --qos=high\n"
        "#SBATCH --reservation='spring school'\n#SBATCH --signal=B:USR2@600\n"
        'slurmrl_exclude=n9\nexport GREETING="Grüße, $USER"',
    ),
    "gpus_per_node": (
        {"gpu_directive": "gpus-per-node"},
        {},
        "#SBATCH --gres=gpu:h100:2",
        "#SBATCH --gpus-per-node=h100:2",
    ),
    "no_gpu_names": (
        {"gpu_directive": "none", "constraint": "gpu"},
        {},
        "#SBATCH --gres=gpu:h100:2",
        "#SBATCH --constraint=gpu",
    ),
    "spares": (
        {"spares": 1},
        {"spares": 1},
        "#SBATCH --nodes=2",
        "#SBATCH --no-kill\n#SBATCH --nodes=3",
    ),
    "requeue": ({"continue": "requeue"}, {"links": 1}, *ONE_LINK),
    "single": (
        {"continue": "none"},
        {"links": 1},
        f"{ONE_LINK[0]}\n#SBATCH --requeue",
        f"{ONE_LINK[1]}\n#SBATCH --no-requeue",
    ),
    "elastic": (
        {"partition": "main", "continue": "none"},
        {
            "elastic": True,
            "hosts": 4,
            "links": 32,
            "slurm": {
                **OPTIONS["slurm"],
                "partition": "preemptible",
                "setup": ["module load cuda"],
            },
        },
        "#SBATCH --array=0-7%1\n#SBATCH --nodes=2",
        "#SBATCH --array=0-31%4\n#SBATCH --nodes=1\n#SBATCH --partition=preemptible",
    ),
}
"""Options of ``cluster.slurm``, shape of the group, the lines of `CHAIN` that the script lacks, and
the lines that it has in addition."""


def without_functions(script: str) -> str:
    """Return the script with one line in place of the lines of ``leave.sh``."""
    first, last = script.index("# How a job leaves"), script.index("trap 'slurmrl_told=1")
    return f"{script[:first]}# leave.sh\n{script[last:]}"


def rendered(name: str) -> SubmissionRequest:
    slurm, shape, _, _ = VARIANTS[name]
    found = request(OPTIONS, **slurm)
    return dataclasses.replace(found, groups=(dataclasses.replace(GROUP, **shape),))


@pytest.mark.parametrize("name", VARIANTS)
def test_script_has_the_directives_of_its_options(tmp_path: Path, name: str) -> None:
    (script,) = SlurmScheduler().scripts(rendered(name)).values()
    lines, chain = without_functions(script).splitlines(), CHAIN.splitlines()
    lacks, adds = VARIANTS[name][2:]
    assert "\n".join(line for line in chain if line not in lines) == lacks
    assert "\n".join(line for line in lines if line not in chain) == adds
    assert [one for one in lines if one in chain] == [one for one in chain if one in lines]
    (tmp_path / "script.sh").write_text(script)
    subprocess.run(["bash", "-n", str(tmp_path / "script.sh")], check=True)


def test_local_script_has_a_different_launcher_and_no_requeue() -> None:
    local = LocalScheduler().scripts(rendered("chain"))["trainer"]
    lines = CHAIN.replace("--launcher srun", "--launcher direct").splitlines()
    assert [line for line in lines if line in local.splitlines()] == local.splitlines()


STAND_IN = """\
#!{python}
import pathlib, signal, sys, time
if "-c" in sys.argv:
    sys.exit()  # the script tries its interpreter
here = pathlib.Path({folder!r})
(here / "python").touch()
time.sleep({import_s})
def handler(number, frame):
    (here / "warned").touch()
signal.signal(signal.SIGUSR2, handler)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
deadline = time.monotonic() + 60
while not (here / "warned").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
"""


@pytest.mark.parametrize(("sent_in", "import_s"), [("setup", 0.0), ("python", 0.5)])
def test_warning_before_the_supervisor_starts_is_not_lost(
    tmp_path: Path, sent_in: str, import_s: float
) -> None:
    """Covers a warning during the set-up lines (with ``set -eu``), and during Python's imports."""
    stand_in = tmp_path / "python3"
    stand_in.write_text(
        STAND_IN.format(python=sys.executable, folder=str(tmp_path), import_s=import_s)
    )
    stand_in.chmod(0o700)
    setup = ["set -eu", f"touch '{tmp_path}/setup'", "sleep 0.5"]
    asked = dataclasses.replace(request(setup=setup), python=str(stand_in))
    script = tmp_path / "script.sh"
    script.write_text(SlurmScheduler().scripts(asked)["trainer"])
    with subprocess.Popen(["bash", str(script)], stdout=subprocess.DEVNULL) as process:
        wait_until(f"the script to come to {sent_in}", (tmp_path / sent_in).exists)
        process.send_signal(signal.SIGUSR2)
        assert process.wait(60) == 0
    assert (tmp_path / "warned").exists()


@pytest.mark.parametrize(
    ("how", "kind", "expected"),
    [
        ("gres", None, {"gres": "gpu:2"}),
        ("gpus-per-node", None, {"gpus-per-node": "2"}),
        ("none", "a100", {}),
    ],
)
def test_gpu_directives_follow_the_settings(
    how: str, kind: str | None, expected: dict[str, str]
) -> None:
    table = batch_script.directives(request(gpu_directive=how, gpu_type=kind), GROUP)
    assert {key: value for key, value in table.items() if "g" in key[:1]} == expected


@pytest.mark.parametrize("key", batch_script.PASSED)
@pytest.mark.parametrize("value", ["a\n#SBATCH --wrap=x", "back\\slash", "nul\0"])
def test_values_invalid_in_a_directive_are_rejected(key: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"--{key}="):
        batch_script.script(request(**{key: value}), GROUP, "srun")


@pytest.mark.parametrize(
    "line",
    [
        "--array=0-9",
        "#SBATCH --job-name=x",
        "-J x",
        "-Jx",
        "-HJx",
        "-a1-3",
        "-vk",
        "--arra=0-3",
        "--cluster=other",
        "--test-only",
        "--export=ALL,TOKEN",
        "--no-requeue",
        "-N 4",
        "#SBATCH --signal=B:TERM@5",
        "--exclusive --array=0-3",
        "-t 5 -J x",
    ],
)
def test_extra_lines_cannot_change_the_protocol(line: str) -> None:
    with pytest.raises(UsageError, match="slurmrl itself sets"):
        batch_script.script(request(extra_lines=[line]), GROUP, "srun")


@pytest.mark.parametrize(
    "line",
    [
        "-H",
        "-vv",
        "-t 5",
        "-pArray",
        "--nodelist=n[0-1]",
        "--ntasks-per-core=1",
        "--hold",
        "--comment='a --array'",
        "-A a -t 5 # --array",
    ],
)
def test_extra_lines_may_set_all_other_options(line: str) -> None:
    text = batch_script.script(request(extra_lines=[line]), GROUP, "srun")
    assert f"#SBATCH {line}" in text.splitlines()


def test_setup_lines_must_be_complete_shell_code() -> None:
    batch_script.script(request(setup=["for i in 1 2", "do echo $i", "done"]), GROUP, "srun")
    with pytest.raises(UsageError, match=r"setup: bash cannot parse the lines: .*unexpected EOF"):
        batch_script.script(request(setup=['echo "a']), GROUP, "srun")
    with pytest.raises(UsageError, match=r"line 2: syntax error near .*`done'$"):
        batch_script.script(request(setup=["set -e", "done"]), GROUP, "srun")


@pytest.mark.parametrize(
    "lines",
    [
        ["shopt -s extglob", "rm -rf /tmp/x/!(keep)"],
        ["case $HOSTNAME in ?(a|b)) true;; esac"],
        ["cat <<END > file", "a", "END"],
        ["true \\\\", "# comment \\"],
    ],
)
def test_setup_lines_may_use_all_syntax_of_bash(lines: list[str]) -> None:
    assert "\n".join(lines) in batch_script.script(request(setup=lines), GROUP, "srun")


@pytest.mark.parametrize("line", ["cat <<END", "export A=1 \\"])
def test_setup_lines_must_not_include_next_lines_of_the_script(line: str) -> None:
    with pytest.raises(UsageError, match="setup: the lines would include the script's next lines"):
        batch_script.script(request(setup=[line]), GROUP, "srun")


def test_setup_lines_are_in_no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """All users of a login node can read the arguments of its processes."""
    commands: list[str] = []
    run = child.run

    def record(command: list[str], **options: Any) -> child.ChildEnd:
        commands.append(" ".join(command))
        return run(command, **options)

    monkeypatch.setattr(child, "run", record)
    batch_script.script(request(setup=["export KEY=secret"]), GROUP, "srun")
    assert commands
    assert not any("secret" in command for command in commands)


@pytest.mark.parametrize("line", ["rm -rf /", "--x\nrm -rf /", ""])
def test_extra_lines_are_directives(line: str) -> None:
    with pytest.raises(UsageError, match="not a directive"):
        batch_script.script(request(extra_lines=[line]), GROUP, "srun")


def test_memory_needs_a_unit_that_slurm_knows() -> None:
    group = dataclasses.replace(GROUP, mem_per_worker="16 apples")
    with pytest.raises(UsageError, match="16 apples"):
        batch_script.script(request(), group, "srun")


def test_memory_is_requested_for_all_workers_of_a_host() -> None:
    group = dataclasses.replace(GROUP, mem_per_worker="500MB")
    assert batch_script.directives(request(), group)["mem"] == "1000M"
    assert "mem" not in batch_script.directives(
        request(), dataclasses.replace(group, mem_per_worker=None)
    )


@pytest.mark.parametrize("known", [False, True], ids=["unknown", "known"])
def test_environment_modules_are_initialized_if_the_site_has_them(
    tmp_path: Path, known: bool
) -> None:
    """The code equals the batch script, except for the place of the site's file."""
    site = tmp_path / "profile"
    site.write_text("PATH=/usr/bin:/bin; module() { echo site $* $PATH; }\n")
    lines = [batch_script.MODULES.replace("/etc/profile", str(site)), "module load cuda"]
    if known:
        lines.insert(0, "module() { echo ours $*; }")
    done = subprocess.run(
        ["/bin/bash", "-c", "\n".join(lines)],
        env={"PATH": "/opt/venv/bin:/usr/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    ours, sites = "ours load cuda\n", "site load cuda /opt/venv/bin:/usr/bin:/usr/bin:/bin\n"
    assert done.stdout == (ours if known else sites)

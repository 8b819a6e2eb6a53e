"""Run every command on a run directory with an unreadable file or folder.

``python -m tests.support.forbidden FOLDER`` makes the run directory and prints each command that
did not end with success or with one message. Root can read every file, so the program must run
without the capabilities that allow this.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from slurmrl.cli.main import main
from slurmrl.run.paths import RunPaths
from tests.support import hostile

COMMANDS = (
    ("status",),
    ("status", "add/1"),
    ("events", "add/1"),
    ("logs", "add/1"),
    ("checkpoints", "add/1"),
    ("report", "add/1"),
    ("resume", "add/1", "--dry-run", "--no-check"),
    ("stop", "add/1"),
)
SILENT = "found nothing"


def outcome(paths: RunPaths, target: Path, words: tuple[str, ...]) -> str:
    """Return the problem of a command's output or exit code if a path is unreadable, or ""."""
    mode = target.stat().st_mode
    out, err = io.StringIO(), io.StringIO()
    target.chmod(0)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = main([*words, "--root", str(paths.run.parents[2])])
    except Exception as error:  # noqa: BLE001 - of whatever kind: the command must report it
        return f"raised {error!r}"
    finally:
        target.chmod(mode)
    said = err.getvalue()
    if words[0] == "checkpoints" and code == 1:
        return "" if "Permission denied" in out.getvalue() else f"printed {out.getvalue()}"
    if code not in (0, 2, 3) or "Traceback" in said:
        return f"ended with {code}: {said}"
    if code and ("Error: " not in said or "[Errno" in said):
        return f"has no message: {said}"
    if words[0] == "logs" and target == paths.logs and not code:
        return SILENT
    return ""


def problems(folder: Path) -> list[str]:
    """Try each command with each unreadable file and folder; return the problems."""
    os.chdir(folder)
    paths = hostile.build(folder)
    targets = [paths.run, *sorted(paths.run.rglob("*"))]
    paths.report.touch(mode=0)
    assert not os.access(paths.report, os.R_OK), "this process reads everything"
    paths.report.unlink()
    return [
        f"{target.relative_to(paths.run)}, {' '.join(words)}: {wrong}"
        for target in targets
        for words in COMMANDS
        if (wrong := outcome(paths, target, words))
    ]


if __name__ == "__main__":
    print("\n".join(problems(Path(sys.argv[1]))))

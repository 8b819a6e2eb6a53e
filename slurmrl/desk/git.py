"""The git state of a folder: commit, status and changes.

git runs read-only (no lock, no refreshed index). Where it fails, a note gives the reason.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmrl import package, version

TIMEOUT_S = 20.0
MOST_STATUS_BYTES = 256 * 2**10
MOST_DIFF_BYTES = 4 * 2**20


@dataclass
class GitAnswer:
    """The output of one command, truncated."""

    text: bytes
    note: str = ""
    failed: bool = False


@dataclass
class Repository:
    """The work tree that contains a folder."""

    root: Path
    commit: str
    """Empty before the first commit."""
    branch: str
    status: str
    diff: bytes
    """Against the commit, staged changes included; untracked files are only in ``status``."""
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "root": str(self.root),
            "commit": self.commit,
            "branch": self.branch,
            "status": self.status.splitlines(),
            "diff_bytes": len(self.diff),
            "notes": self.notes,
        }


def look(folder: Path) -> Repository | str:
    """Return the repository of a folder, or why there is none."""
    root = _ask(folder, "rev-parse", "--show-toplevel")
    if root.failed:
        return root.note
    top = Path(os.fsdecode(root.text).rstrip("\n"))
    commit, branch = (
        _ask(top, "rev-parse", "--verify", "HEAD"),
        _ask(top, "branch", "--show-current"),
    )
    status = _ask(
        top, "status", "--porcelain=v1", "--untracked-files=normal", most=MOST_STATUS_BYTES
    )
    against = [] if commit.failed else ["HEAD"]
    options = ("--no-color", "--no-ext-diff", "--no-textconv")
    diff = _ask(top, "diff", *options, *against, "--", most=MOST_DIFF_BYTES)
    return Repository(
        root=top,
        commit="" if commit.failed else _text(commit),
        branch="" if branch.failed else _text(branch),
        status=status.text.decode(errors="replace"),
        diff=diff.text,
        notes=[answer.note for answer in (status, diff) if answer.note],
    )


def commit_of_package() -> str:
    """The commit of this slurmrl, with ``+changes`` if it has any; empty if that is unknown.

    A repository that only has the environment below it, where slurmrl is installed, says nothing.
    """
    if commit := version.built_commit():
        return commit
    repository = look(package.FOLDER)
    if isinstance(repository, str) or repository.root != package.FOLDER.parent.resolve():
        return ""
    return repository.commit + ("+changes" if repository.diff else "")


def untracked(repository: Repository, paths: Iterable[Path]) -> list[Path]:
    """Return the files in the work tree that git does not track."""
    inside = [path for path in paths if path.is_file() and path.is_relative_to(repository.root)]
    if not inside:
        return []
    tracked = _ask(repository.root, "ls-files", "-z", "--", *map(str, inside))
    names = set(os.fsdecode(tracked.text).split("\0"))
    return [path for path in inside if str(path.relative_to(repository.root)) not in names]


def _text(answer: GitAnswer) -> str:
    return answer.text.decode(errors="replace").strip()


def _ask(folder: Path, *words: str, most: int = 2**20) -> GitAnswer:
    """Run one command; truncate its output to ``most`` bytes, with a note."""
    command = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", *words]
    with tempfile.TemporaryFile() as output:
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,
                timeout=TIMEOUT_S,
                check=False,
            )
        except FileNotFoundError:
            return GitAnswer(b"", "git is not installed", failed=True)
        except subprocess.TimeoutExpired:
            return GitAnswer(b"", f"git {words[0]} took more than {TIMEOUT_S:.0f} s", failed=True)
        if done.returncode != 0:
            errors = done.stderr.decode(errors="replace").strip().splitlines()
            reason = errors[0] if errors else "failed"
            return GitAnswer(b"", f"git {words[0]}: {reason}", failed=True)
        size = output.tell() or output.seek(0, os.SEEK_END)
        output.seek(0)
        note = f"git {words[0]}: truncated to {most} of {size} bytes" if size > most else ""
        return GitAnswer(output.read(most), note)

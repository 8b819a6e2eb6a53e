"""First configurations with the files that they name, and the examples that come with slurmrl."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slurmrl import package
from slurmrl.desk import copying
from slurmrl.errors import EnvironmentFailure, UsageError
from slurmrl.fsio import atomic
from slurmrl.plan.algorithms import POLICY_GRADIENTS
from slurmrl.registry import near

REWARD: Final = "reward.txt"
PLAIN: Final = re.compile(r"[\w.][\w.+-]*(?: [\w.+-]+)*")
RULE: Final = "its name may have letters, digits, '.', '_', '-', '+' and single spaces"
"""The configuration names the files next to it without quotes."""
EXAMPLES: Final = package.FOLDER / "examples"
FETCHED: Final = ("data",)
"""Files that the user of a checkout has put there."""


@dataclass(frozen=True)
class Starter:
    """One kind of training."""

    template: str
    """File name of the configuration's template."""
    data: str
    """Lines of data as it reads them."""
    rewards: bool = False
    """Whether it needs a reward."""


STARTERS: Final[dict[str, Starter]] = {
    "sft": Starter("sft.yaml", "answers.jsonl"),
    "ppo": Starter("ppo.yaml", "answers.jsonl", rewards=True),
    **{
        name: Starter("grpo.yaml", "answers.jsonl", rewards=True)
        for name in POLICY_GRADIENTS
        if name != "ppo"
    },
    "dpo": Starter("dpo.yaml", "pairs.jsonl"),
    "kto": Starter("kto.yaml", "labels.jsonl"),
    "reward_model": Starter("reward_model.yaml", "pairs.jsonl"),
    "distill": Starter("distill.yaml", "answers.jsonl", rewards=True),
}
"""By name of the algorithm."""


def starter_files(kind: str, output: Path) -> dict[Path, str]:
    """The content of the files to write, the configuration ``output`` first.

    The others are next to it and contain its name in theirs. Raises UsageError for an unknown kind
    and an unusable name.
    """
    starter = STARTERS.get(kind)
    if starter is None:
        raise UsageError(f"'{kind}' is not a kind of configuration; {near(kind, list(STARTERS))}")
    if output.suffix not in (".yaml", ".yml"):
        raise UsageError(f"--output {output}: the name of a configuration ends with .yaml")
    if not PLAIN.fullmatch(output.stem):
        raise UsageError(f"--output {output}: {RULE}")
    stem = re.sub(r"\W", "_", output.stem, flags=re.ASCII)
    module = f"{stem}_reward" if stem[:1].isalpha() else f"reward_{stem}"
    words = {
        "FILE": output.name,
        "NAME": re.sub(r"[^A-Za-z0-9._-]|^[._-]+|\.\.+", "-", output.stem).strip("-")[:64] or kind,
        "DATA": f"{output.stem}.jsonl",
        "REWARD": module,
        "ALGORITHM": kind,
    }
    made = {
        output: _filled(starter.template, words),
        output.with_name(words["DATA"]): _filled(starter.data, {}),
    }
    if starter.rewards:
        made[output.with_name(f"{module}.py")] = _filled(REWARD, words)
    return made


def _filled(template: str, words: dict[str, str]) -> str:
    text = package.read(f"desk/templates/{template}").decode()
    for name, value in words.items():
        text = text.replace(f"@{name}@", value)
    return text


def write_files(files: Mapping[Path, str], *, force: bool) -> list[Path]:
    """Write all files or none; without ``force``, reject an existing file with another content.

    Return the files that are new or changed.

    Raises UsageError, and EnvironmentFailure for files that cannot be written. Each file appears as
    a whole. The first one is written last, so that its existence implies the others.
    """
    data = {path: text.encode() for path, text in files.items()}
    taken = [str(path) for path in data if path.exists() and not _has(path, data[path])]
    if taken and not force:
        verb = "exist" if len(taken) > 1 else "exists"
        raise UsageError(f"{', '.join(taken)} {verb}: --force replaces, --output changes the name")
    for path in data:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a file: choose another name with --output")
    needed = [path for path in data if not _has(path, data[path])]
    for path in reversed(needed):
        if force:
            atomic.replace(path, data[path])
        elif not atomic.exclusive_create(path, data[path]):
            raise UsageError(f"{path} was created by another process just now and stays unchanged")
    return needed


def _has(path: Path, data: bytes) -> bool:
    """Whether a file has this content already."""
    return path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data


def examples() -> Iterator[tuple[str, str]]:
    """The configurations, each with its description. Raises EnvironmentFailure."""
    if not EXAMPLES.is_dir():
        raise EnvironmentFailure(
            f"{EXAMPLES} is missing: this slurmrl was copied without its examples; install it"
        )
    for path in sorted(EXAMPLES.rglob("*.yaml")):
        if path.relative_to(EXAMPLES).parts[0] not in FETCHED:
            yield str(path.relative_to(EXAMPLES)), _summary(path)


def copy_examples(target: Path) -> None:
    """Copy all examples with their data into a new folder, which appears as a whole.

    Raises UsageError for one that exists, EnvironmentFailure.
    """
    list(examples())
    if target.exists() and not (target.is_dir() and not os.listdir(target)):
        raise UsageError(f"{target} exists: --output names another folder")
    made = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    try:
        copying.copy(EXAMPLES.resolve(), made, FETCHED)
        os.rename(made, target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    atomic.sync_directory(target.parent)


def _summary(path: Path) -> str:
    """Beginning of the comment at its top, up to a colon or the end of the sentence."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# "):
            break
        lines.append(line.removeprefix("# "))
    return re.split(r"[.:] ", " ".join(lines))[0].rstrip(".:")

"""A first configuration with the files that it names: data, and a reward where one is needed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slurmrl import package
from slurmrl.errors import UsageError
from slurmrl.plan.algorithms import POLICY_GRADIENTS
from slurmrl.registry import near

REWARD: Final = "reward.txt"
PLAIN: Final = re.compile(r"[\w.][\w.+-]*(?: [\w.+-]+)*")
RULE: Final = "its name may have letters, digits, '.', '_', '-', '+' and single spaces"
"""The configuration names the files beside it without quotes."""


@dataclass(frozen=True)
class Starter:
    """One kind of training."""

    template: str
    """Of the configuration."""
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


def files(kind: str, output: Path) -> dict[Path, str]:
    """The content of the files to write, the configuration ``output`` first.

    The others lie beside it and have its name in theirs. Raises UsageError for an unknown kind and
    an unusable name.
    """
    starter = STARTERS.get(kind)
    if starter is None:
        raise UsageError(f"'{kind}' is no kind of configuration; {near(kind, list(STARTERS))}")
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
    text = package.read(f"desk/init/templates/{template}").decode()
    for name, value in words.items():
        text = text.replace(f"@{name}@", value)
    return text

"""Every example can be planned without its data files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slurmrl.config.load import dump, load
from slurmrl.config.schema.roles import TRIAL_PREFIX
from slurmrl.env import user_name
from slurmrl.plan.settings import load_settings
from slurmrl.run.paths import RunPaths

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
MODEL = (
    '{"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 16,'
    ' "num_hidden_layers": 1, "num_attention_heads": 2}'
)

MADE = "data/"
"""Where an example expects files that the repository lacks."""


def overrides(example: Path, folder: Path) -> list[str]:
    """Return settings with stand-ins for files that are made or downloaded at run time."""
    data, tokenizer = folder / "data.jsonl", folder / "tokenizer"
    data.touch()
    tokenizer.mkdir()
    values = load(example).values
    section = values.get("evaluation", {})
    suites = [f"suites.{name}.dataset" for name in section.get("suites", ())]
    held_out = suites or (["dataset"] if section else [])
    evaluation = [f"evaluation.{key}.path={data}" for key in held_out]
    python = [f"rollout.python={sys.executable}"] if "server" in example.read_text() else []
    model = []
    if str(values["actor"].get("path", "")).startswith(MADE):
        (tokenizer / "config.json").write_text(MODEL)
        model = [f"actor.path={tokenizer}"]
    return [f"dataset.path={data}", f"actor.tokenizer={tokenizer}", *model, *evaluation, *python]


def export_of(example: Path, root: Path) -> None:
    """Make the exports of the trials from which an example starts."""
    sections = [part for part in load(example).values.values() if isinstance(part, dict)]
    paths = [str(section.get("path")) for section in sections]
    for path in (path for path in paths if path.startswith(TRIAL_PREFIX)):
        experiment, trial = path.removeprefix(TRIAL_PREFIX).split("/")
        folder = RunPaths.of(root, user_name(), experiment, trial).export(7)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(MODEL)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_resumed_trial_passes_the_checks_again(example: Path, tmp_path: Path) -> None:
    """The stored configuration contains every default. No check may treat a default as the user's
    choice.
    """
    export_of(example, tmp_path)
    settings = load_settings(example, overrides(example, tmp_path), root=tmp_path)
    resolved = tmp_path / "config.yaml"
    resolved.write_text(dump(settings.config))
    assert load_settings(resolved, root=tmp_path).config == settings.config

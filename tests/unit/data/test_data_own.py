"""Custom dataset types: ``package.module:Class``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from slurmrl.config.schema import Dataset
from slurmrl.data.sample import SequenceSample
from slurmrl.errors import ConfigError, UnreadableInputError, UsageError
from tests.support.chaos.preparations import Characters
from tests.support.datasets import prepared

CODE = """
from slurmrl.data.types.prompt import Prompts


class Sums(Prompts):
    def convert(self, row):
        return {"id": row["name"], "prompt": f"{row['a']}+{row['b']}=", "answer": str(row["a"])}


class Nothing(Prompts):
    def convert(self, row):
        return [row]


class Plain:
    pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a module next to a file of rows."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "sums", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it is changed within its second
    (tmp_path / "sums.py").write_text(CODE)
    (tmp_path / "rows.jsonl").write_text('{"name": "x", "a": 1, "b": 2}\n')
    return tmp_path / "sums.py"


def sample(module: Path, name: str = "Sums", **settings: Any) -> SequenceSample:
    path = module.with_name("rows.jsonl")
    values = {"type": f"{module.stem}:{name}", "like": "prompt", "path": str(path), **settings}
    config = Dataset(**values)
    made = prepared(config, Characters(module.parent), module.with_name("data"))
    return made.sample([(0, 0)])


def test_custom_class_makes_rows_of_a_built_in_type(module: Path) -> None:
    """The result of the class is checked, tokenized and passed to the reward."""
    made = sample(module)
    assert made.ids == ("x@0",)
    assert bytes(made.tensor("prompt_ids").tolist()) == b"1+2="
    assert made.metadata["row"] == [{"id": "x", "prompt": "1+2=", "answer": "1"}]


def test_exception_of_a_custom_class_is_a_problem_of_the_row(module: Path) -> None:
    module.with_name("rows.jsonl").write_text('{"name": "x", "a": 1, "b": 2}\n{"name": "y"}\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: convert failed: KeyError: 'a'"):
        sample(module)
    with pytest.raises(ConfigError, match=r":1: convert must return a dict, but returned list"):
        sample(module, "Nothing")


def test_changed_code_prepares_the_data_again(module: Path) -> None:
    sample(module)
    module.write_text(CODE.replace("+{row", "-{row"))
    del sys.modules["sums"]
    assert bytes(sample(module).tensor("prompt_ids").tolist()) == b"1-2="


def test_unusable_custom_class_is_rejected(module: Path) -> None:
    with pytest.raises(UsageError, match=r"must be a subclass of slurmrl\.data\.types\.prompt"):
        sample(module, "Plain")
    with pytest.raises(UsageError, match="dataset type 'sums:Sms': sums has no 'Sms'; did you"):
        sample(module, "Sms")
    with pytest.raises(UnreadableInputError, match="there is no module 'summs'"):
        sample(module, type="summs:Sums")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "sums:Sums"}, "type sums:Sums needs the key like"),
        ({"type": "prompt", "like": "prompt"}, "like needs your own type"),
        ({"type": "prompt", "label_key": "good"}, "label_key is not allowed with type prompt"),
        ({"type": "kto", "max_pairs_per_prompt": 1}, "allowed with type: preference"),
        ({"type": "prompt", "answer_template": "{a}"}, "with type: prompt_answer, preference, kto"),
        ({"type": "promt"}, "did you mean 'prompt'"),
    ],
)
def test_custom_type_needs_exactly_one_built_in_type(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        Dataset(path="/x", **settings)

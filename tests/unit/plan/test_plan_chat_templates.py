"""Datasets whose first row decides whether the chat template applies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmrl.config.load import dump, load_resolved
from slurmrl.errors import ConfigError
from tests.unit.plan.conftest import Load

MESSAGES = '{"id": "1", "prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}\n'
TEXT = '{"id": "1", "prompt": "1+1=", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("content", "given", "decision"),
    [
        (MESSAGES, "null", True),
        (f"\n5\n{MESSAGES}", "null", True),
        (f"[\n {MESSAGES}]", "null", True),
        (TEXT, "null", False),
        (MESSAGES, "false", False),
        (TEXT, "true", True),
        ("\n", "null", None),
        ("\x1f\x8b", "null", None),
    ],
)
def test_first_row_decides_if_chat_template_is_not_set(
    load_ppo: Load, folder: Path, content: str, given: str, decision: bool | None
) -> None:
    (folder / "train.jsonl").write_text(content, encoding="latin-1")
    config = load_ppo(f"dataset.chat_template={given}").config
    assert config.dataset.chat_template is decision
    assert config.held_out.chat_template is False


def test_trial_keeps_the_decision_if_its_file_changes(
    load_ppo: Load, folder: Path, tmp_path: Path
) -> None:
    (folder / "train.jsonl").write_text(MESSAGES)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump(load_ppo().config))
    (folder / "train.jsonl").write_text(TEXT)
    assert load_resolved(resolved).dataset.chat_template is True
    text = resolved.read_text()
    assert load_ppo(text=text).config.dataset.chat_template is True


def test_rows_of_a_suite_decide_its_chat_template(load_ppo: Load, folder: Path) -> None:
    (folder / "chat.jsonl").write_text(MESSAGES)
    suites = {
        "a": {"dataset": {"type": "prompt", "path": str(folder / "chat.jsonl")}},
        "b": {"dataset": {"type": "prompt", "path": str(folder / "held_out.jsonl")}},
    }
    overrides = ("evaluation.dataset=", f"evaluation.suites={json.dumps(suites)}")
    config = load_ppo(*overrides).config
    found = {name: own.held_out.chat_template for name, own in config.evaluations.items()}
    assert found == {"a": True, "b": False}
    notes = load_ppo(*overrides, f"dataset.path={folder / 'chat.jsonl'}").notes
    told = [note for note in notes if "chat template" in note]
    assert [note.partition(":")[0] for note in told] == ["evaluation.suites.b.dataset"]


def test_differing_sources_need_an_explicit_setting(load_ppo: Load, folder: Path) -> None:
    (folder / "chat.jsonl").write_text(MESSAGES)
    sources = json.dumps({"old": {"path": "train.jsonl"}, "new": {"path": "chat.jsonl"}})
    text = (folder / "ppo.yaml").read_text().replace("path: train.jsonl", f"sources: {sources}")
    with pytest.raises(ConfigError) as caught:
        load_ppo(text=text)
    (problem,) = caught.value.problems
    assert problem.key == "dataset.chat_template"
    assert problem.message.startswith("is required: source 'new' has messages and 'old' has")
    assert load_ppo("dataset.chat_template=true", text=text).config.dataset.is_chat


@pytest.mark.parametrize(("content", "allowed"), [(MESSAGES, True), (TEXT, False)])
def test_system_prompt_needs_messages_if_chat_template_is_not_set(
    load_ppo: Load, folder: Path, content: str, allowed: bool
) -> None:
    (folder / "train.jsonl").write_text(content)
    if allowed:
        assert load_ppo("dataset.system_prompt=Add.").config.dataset.is_chat
        return
    with pytest.raises(ConfigError, match="system_prompt: is not allowed without a chat template"):
        load_ppo("dataset.system_prompt=Add.")


def test_older_text_trials_keep_their_chat_template_rules(load_ppo: Load) -> None:
    """The fingerprint of a dataset must not change, or a resumed trial would be refused."""
    decided = load_ppo().config.dataset
    undecided = decided.model_copy(update={"chat_template": None})
    assert "chat_template" not in decided.rules()
    assert decided.rules() == undecided.rules()
    chat = decided.model_copy(update={"chat_template": True})
    assert chat.rules() == {**decided.rules(), "chat_template": True}

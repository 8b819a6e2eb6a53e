from __future__ import annotations

from pathlib import Path

import pytest

from slurmrl.desk import trials
from slurmrl.errors import UnknownNameError, UsageError
from tests.fake_runs import FakeRun


@pytest.mark.parametrize(
    ("name", "taken", "free"),
    [
        ("1", [], "1"),
        ("1", ["1"], "2"),
        ("1", ["1", "2", "3"], "4"),
        ("9", ["9"], "10"),
        ("abc", ["abc"], "abc-2"),
        ("abc", ["abc", "abc-2"], "abc-3"),
        ("abc-9", ["abc-9"], "abc-10"),
        ("v2", ["v2"], "v2-2"),
    ],
)
def test_next_free_name_counts_up(name: str, taken: list[str], free: str) -> None:
    assert trials.next_free(name, taken.__contains__) == free


def test_root_comes_from_option_then_environment_then_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURMRL_ROOT", raising=False)
    assert trials.chosen_root(None) is None
    assert trials.root_folder(None) == tmp_path / "runs"
    monkeypatch.setenv("SLURMRL_ROOT", "there")
    assert trials.root_folder(None) == tmp_path / "there"
    assert trials.root_folder("/here/../x") == Path("/x")


def test_dollar_is_literal_in_name_of_existing_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUDGET", "/elsewhere")
    root = tmp_path / "$BUDGET"
    assert trials.root_folder(str(root)) == tmp_path / "elsewhere"
    root.mkdir()
    assert trials.root_folder(str(root)) == root


def test_trials_are_listed_in_numeric_order(tmp_path: Path) -> None:
    for name in ("10", "2", "b", "a-10", "a-9"):
        FakeRun(tmp_path, trial=name)
    (tmp_path / "note").touch()
    assert [paths.trial for paths in trials.trials(tmp_path, "add")] == [
        "2",
        "10",
        "a-9",
        "a-10",
        "b",
    ]
    assert len(trials.all_trials(tmp_path)) == 5


def test_directory_without_an_identity_is_no_trial(tmp_path: Path) -> None:
    FakeRun(tmp_path).paths.identity.unlink()
    assert trials.all_trials(tmp_path) == []


def test_missing_root_has_no_trials(tmp_path: Path) -> None:
    assert trials.all_trials(tmp_path / "runs") == []


def test_trial_and_experiment_are_found_by_name(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    assert trials.find(tmp_path, "add/1") == run.paths
    assert trials.find_experiment(tmp_path, "add") == [run.paths]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("add", UsageError, "expected EXPERIMENT/TRIAL; existing trials: add/1"),
        ("add/1/2", UsageError, "expected EXPERIMENT/TRIAL"),
        ("add/", UsageError, "expected EXPERIMENT/TRIAL"),
        ("adt/1", UnknownNameError, "did you mean 'add/1'"),
    ],
)
def test_message_about_a_missing_trial_lists_existing_trials(
    tmp_path: Path, name: str, error: type[Exception], message: str
) -> None:
    FakeRun(tmp_path)
    with pytest.raises(error, match=message):
        trials.find(tmp_path, name)


def test_unknown_experiment_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="there are no trials in"):
        trials.find_experiment(tmp_path, "add")
    FakeRun(tmp_path)
    with pytest.raises(UnknownNameError, match="did you mean 'add'"):
        trials.find_experiment(tmp_path, "ad")

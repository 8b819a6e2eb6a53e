from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from slurmrl.desk import copying, provenance, trial_code
from slurmrl.desk.proposal import Proposal, propose, propose_resume
from slurmrl.desk.provenance import ProvenanceWriter, recorded_folders
from slurmrl.desk.submitting import submit
from slurmrl.errors import ConfigError, EnvironmentFailure, UsageError
from slurmrl.package import ARCHIVE
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import begin, end
from slurmrl.run.paths import RunPaths
from tests.fake_runs import FakeScheduler, write_config

REWARD = "import helper\nclass Mine:\n    score = helper.SCORE\n"


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with a configuration and a reward that imports a neighboring module."""
    folder = tmp_path / "user"
    folder.mkdir()
    write_config(folder)
    (folder / "my_reward.py").write_text(REWARD)
    (folder / "helper.py").write_text("SCORE = 1\n")
    (folder / "unrelated.py").write_text("raise RuntimeError\n")
    monkeypatch.chdir(tmp_path)
    return folder


def proposed(user: Path, *overrides: str) -> Proposal:
    root = str(user.parent / "runs")
    return propose(user / "sft.yaml", overrides, root=root, scheduler="local")


def copied(snapshot_folder: Path) -> set[str]:
    """Return the names in a snapshot that belong neither to this package nor to the changes of its
    checkout.
    """
    return {path.name for path in snapshot_folder.iterdir()} - {"slurmrl", "slurmrl.diff"}


def record(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "environment.json").read_text())
    return found


MINE = "reward={name: 'my_reward:Mine'}"


def test_reward_module_and_its_imports_are_copied(user: Path, scheduler: FakeScheduler) -> None:
    paths = submit(proposed(user, MINE)).paths
    assert {"my_reward.py", "helper.py", "environment.json", "submitted.yaml"} == copied(paths.code)
    assert (paths.code / "my_reward.py").read_text() == REWARD
    assert (paths.code / "my_reward.py").stat().st_mode & 0o777 == 0o600
    assert (paths.code / "submitted.yaml").read_text() == (user / "sft.yaml").read_text()


def test_modules_of_an_episode_are_copied(user: Path, scheduler: FakeScheduler) -> None:
    """The modules of the environment and of each tool are copied, with their imports."""
    (user / "my_world.py").write_text("import helper\nclass World: ...\n")
    (user / "my_tool.py").write_text("def look(word): return word\n")
    tools = "tools: {look: {name: 'my_tool:look'}}"
    episode = f"{{name: multi_turn, environment: {{name: 'my_world:World'}}, {tools}}}"
    paths = submit(proposed(user, f"rollout.episode={episode}")).paths
    assert {"my_world.py", "my_tool.py", "helper.py"} < copied(paths.code)


def test_listed_code_is_copied_without_files_that_are_not_imported(
    user: Path, scheduler: FakeScheduler
) -> None:
    package = user / "package"
    (package / "part" / "__pycache__").mkdir(parents=True)
    (package / ".git").mkdir()
    (package / "part" / "__pycache__" / "x.pyc").touch()
    (package / "part" / "table.json").write_text("{}")
    (package / "__init__.py").write_text("import helper\n")
    (package / "part" / "loop").symlink_to(package)
    os.mkfifo(package / "pipe")  # reading it would block
    paths = submit(proposed(user, f"code=[{package}]")).paths
    assert {"package", "helper.py"} < copied(paths.code)
    found = {str(p.relative_to(paths.code)) for p in (paths.code / "package").rglob("*")}
    assert found == {"package/part", "package/__init__.py", "package/part/table.json"}


def test_only_reachable_modules_are_parsed(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = user / "large"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner" / "__init__.py").write_text("from . import deep\n")
    (package / "inner" / "deep.py").write_text("from ..other import thing\nimport json\n")
    (package / "other.py").write_text("def thing():\n    import helper\n")
    for number in range(50):
        (package / f"never{number}.py").write_text("import unrelated\n")
    (package / "score.py").write_text("import large.inner\n")
    (user / "unrelated.py").write_text("")
    parsed: list[bytes] = []
    parse = ast.parse
    monkeypatch.setattr(ast, "parse", lambda text: parsed.append(text) or parse(text))
    code = proposed(user, "reward={name: 'large.score:Score'}").recorder.code
    assert [path.name for path in code.paths] == ["large", "helper.py"]
    assert len(parsed) < 10


def test_paths_of_code_are_relative_to_the_configuration(user: Path) -> None:
    with (user / "sft.yaml").open("a") as file:
        file.write("code: [helper.py]\n")
    assert proposed(user).recorder.code.paths == (user / "helper.py",)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing.py", "there is no such file or folder"),
        ("notes.txt", "it is not a Python file"),
        ("json.py", "would hide the standard library's json"),
        ("slurmrl", "would hide slurmrl"),
    ],
)
def test_code_that_cannot_be_copied_is_rejected(user: Path, name: str, reason: str) -> None:
    for there in ("notes.txt", "json.py"):
        (user / there).touch()
    (user / "slurmrl").mkdir()
    with pytest.raises(ConfigError, match=reason) as caught:
        proposed(user, f"code=[{user / 'helper.py'}, {user / name}]")
    assert [problem.key for problem in caught.value.problems] == ["code.1"]
    assert not (user.parent / "runs").exists()


def test_two_code_entries_with_one_name_are_rejected(user: Path) -> None:
    (user / "other").mkdir()
    shutil.copy(user / "helper.py", user / "other")
    with pytest.raises(ConfigError, match="another entry has the same name"):
        proposed(user, f"code=[{user / 'helper.py'}, {user / 'other' / 'helper.py'}]")


def test_data_files_are_not_copied_as_code(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "LARGEST_BYTES", 8)
    with pytest.raises(ConfigError, match="keep data out of its folder"):
        proposed(user, MINE)


def test_missing_module_is_reported(user: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert proposed(user, "reward={name: 'no_such_module_here:R'}").recorder.code.paths == ()
    assert "module 'no_such_module_here' was not found" in caplog.text


def test_installed_packages_are_not_copied(user: Path) -> None:
    assert proposed(user, "reward={name: 'pytest:Item'}").recorder.code == trial_code.OwnCode(
        folders=(user, user.parent)
    )


def test_changed_file_does_not_affect_a_snapshot(user: Path, scheduler: FakeScheduler) -> None:
    paths = submit(proposed(user, MINE)).paths
    assert submit(proposed(user, MINE)).notes == ()
    (user / "helper.py").write_text("SCORE = 2\n")
    (note,) = submit(proposed(user, MINE)).notes
    assert note.startswith(f"keeps its copy of {user / 'helper.py'}, which has changed: slurmrl")
    again = submit(propose_resume(paths, []))
    assert again.notes == ()
    assert (paths.code / "helper.py").read_text() == "SCORE = 1\n"
    assert [request.code for request in scheduler.requests] == [paths.code] * 4


def test_three_changed_files_are_named_and_the_others_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, copy = tmp_path / "mine", tmp_path / "code" / "mine"
    source.mkdir()
    copy.mkdir(parents=True)
    for number in range(6):
        (source / f"{number}.py").write_text("1")
        if number:
            (copy / f"{number}.py").write_text("2")
    code = trial_code.OwnCode(paths=(source,))
    assert trial_code.edited(code, copy.parent) == [
        f"runs without {source / '0.py'}, which is new",
        f"keeps its copy of {source / '1.py'}, which has changed",
        f"keeps its copy of {source / '2.py'}, which has changed",
        "3 other files have changed or are new",
    ]

    def fail(*arguments: object, **options: object) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(trial_code, "cmp", fail)
    with pytest.raises(EnvironmentFailure, match=r"cannot compare .*1\.py: Permission denied"):
        trial_code.edited(code, copy.parent)


def test_trial_of_another_version_is_not_modified(user: Path, scheduler: FakeScheduler) -> None:
    """Jobs of another version could not read the files of this version."""
    paths = submit(proposed(user)).paths
    end(History(paths.history), Kind.CANCELLED, {})
    scheduler.tasks = []
    (paths.code / "slurmrl" / "log.py").write_text("NEW = 1\n")
    assert not trial_code.is_this_code(paths.code)
    before = paths.config.read_bytes(), paths.plan.read_bytes()
    for proposal in (proposed(user, "total_steps=9"), propose_resume(paths, ["total_steps=9"])):
        with pytest.raises(UsageError, match="was submitted with another version of slurmrl"):
            submit(proposal)
    assert (paths.config.read_bytes(), paths.plan.read_bytes()) == before
    updated = propose_resume(paths, ["total_steps=9"], update_code=True)
    assert submit(updated).jobs is not None
    assert trial_code.is_this_code(paths.snapshot(2))


def test_trial_of_another_version_ignores_new_settings(
    user: Path, scheduler: FakeScheduler
) -> None:
    """The trial's version may not know a new setting, so the checks ignore it."""
    paths = submit(proposed(user)).paths
    end(History(paths.history), Kind.CANCELLED, {})
    scheduler.tasks = []
    (paths.code / "slurmrl" / ARCHIVE).write_bytes(b"not readable")
    proposal = proposed(user)
    assert proposal.check(60.0) == []
    with pytest.raises(UsageError, match="was submitted with another version of slurmrl"):
        submit(proposal)


@pytest.mark.parametrize("how", ["written", "vanished"])
def test_snapshot_never_mixes_two_versions(
    user: Path, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Code that changes during the copy is copied again. If it changes each time, the submission is
    rejected and leaves no files.
    """
    mine, copy, copies = user / "helper.py", copying.copy, 0
    changes = 1

    def copy_while_it_changes(source: Path, target: Path, *without: tuple[str, ...]) -> None:
        nonlocal copies
        if source == mine:
            copies += 1
            if copies <= changes and how == "vanished":
                mine.unlink()
        try:
            copy(source, target, *without)
        finally:
            if source == mine and copies <= changes:
                mine.write_text(f"SCORE = {copies + 1}\n")

    monkeypatch.setattr(trial_code, "PAUSE_S", 0.0)
    monkeypatch.setattr(copying, "copy", copy_while_it_changes)
    paths = submit(proposed(user, MINE)).paths
    assert (paths.code / "helper.py").read_text() == "SCORE = 2\n"
    copies, changes = 0, 100
    with pytest.raises(UsageError, match=r"the code changed during 3 copies.*helper\.py"):
        submit(propose_resume(paths, [], update_code=True))
    assert [path.name for path in paths.run.glob("*code*")] == ["code"]


def test_update_code_takes_the_current_code(
    user: Path, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = submit(proposed(user, MINE)).paths
    (user / "helper.py").write_text("SCORE = 2\n")
    elsewhere = user.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    proposal = propose_resume(paths, [], update_code=True)
    second = paths.run / "code.2"
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "scripts", lambda request: {"trainer": str(request.code)})
        assert proposal.scripts() == {"trainer": str(second)}, "a dry run shows what will run"
    updated = submit(proposal)
    assert updated.notes == (f"runs the current code: {second}",)
    assert (second / "helper.py").read_text() == "SCORE = 2\n"
    assert (paths.code / "helper.py").read_text() == "SCORE = 1\n"
    assert recorded_folders(second) == [user, user.parent, elsewhere]
    submit(propose_resume(paths, []))
    assert [request.code for request in scheduler.requests] == [paths.code, second, second]
    assert trial_code.current_snapshot(paths) == 2


@pytest.mark.parametrize(
    ("algorithm", "lacks", "value", "difference"),
    [
        (
            "{name: grpo, batch_size: 8, kl: {coef: 0.0}}",
            "  mask_truncated: false\n",
            "algorithm.mask_truncated=true",
            "mask_truncated: False in the trial, True now",
        ),
        (  # its default follows from the reward
            "{name: evaluate, batch_size: 8}",
            "  pass_score: 1.0\n",
            "algorithm.pass_score=0.5",
            "pass_score: 1.0 in the trial, 0.5 now",
        ),
    ],
    ids=["constant", "derived"],
)
def test_update_code_adds_a_missing_setting(
    user: Path,
    scheduler: FakeScheduler,
    algorithm: str,
    lacks: str,
    value: str,
    difference: str,
) -> None:
    """The current algorithm has a setting that was added after the trial's submission. The trial
    continues with the setting's default, and with no other value.
    """
    prompts = ("dataset.type=prompt", "reward={name: exact_match}")
    paths = submit(proposed(user, f"algorithm={algorithm}", *prompts)).paths
    log = History(paths.history)
    begin(log, {}).append(Kind.COMMIT, {"step": 1, "directory": "step-00000001.1"})
    end(log, Kind.CANCELLED, {})
    scheduler.tasks = []
    text = paths.config.read_text()
    assert lacks in text
    paths.config.write_text(text.replace(lacks, ""))
    (paths.code / "slurmrl" / "log.py").write_text("OLD = 1\n")
    with pytest.raises(UsageError, match=difference):
        submit(propose_resume(paths, [value], update_code=True))
    assert submit(propose_resume(paths, [], update_code=True)).resumed_step == 1
    assert paths.config.read_text() == text


def test_trial_without_a_commit_accepts_another_episode(
    user: Path, scheduler: FakeScheduler
) -> None:
    episode = "rollout.episode={{name: multi_turn, environment: {{name: '{}:World'}}}}"
    for module in ("first_world", "second_world"):
        (user / f"{module}.py").write_text("class World: ...\n")
    paths = submit(proposed(user, episode.format("first_world"))).paths
    end(History(paths.history), Kind.CANCELLED, {})
    scheduler.tasks = []
    submit(proposed(user, episode.format("second_world")))
    assert "second_world.py" in copied(paths.snapshot(trial_code.current_snapshot(paths)))


def test_code_is_changed_together_with_the_snapshot(user: Path, scheduler: FakeScheduler) -> None:
    paths = submit(proposed(user, MINE)).paths
    override = f"code=[{user / 'unrelated.py'}]"
    with pytest.raises(Exception, match="add --update-code"):
        propose_resume(paths, [override])
    submit(propose_resume(paths, [override], update_code=True))
    assert "unrelated.py" in copied(paths.snapshot(2))


@pytest.mark.parametrize("step", ["copying", "record", "rename"])
def test_snapshot_is_complete_or_absent(
    user: Path, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """If the disk is full during the copy, the record or the rename of an update, the old snapshot
    stays in use.
    """
    paths = submit(proposed(user, MINE)).paths

    def full(*arguments: object) -> None:
        raise EnvironmentFailure("no space left")

    update = propose_resume(paths, [], update_code=True)
    with monkeypatch.context() as patch:
        if step == "copying":
            patch.setattr(copying, "write_new", full)
        elif step == "record":
            patch.setattr(ProvenanceWriter, "__call__", full)
        else:
            patch.setattr(os, "rename", full)
        with pytest.raises(EnvironmentFailure, match="no space left"):
            submit(update)
    assert trial_code.current_snapshot(paths) == 1
    assert [path.name for path in paths.run.glob("*code*")] == ["code"]
    submit(update)
    assert trial_code.current_snapshot(paths) == 2


def test_update_of_a_killed_submitter_is_ignored(
    user: Path, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill(*arguments: object) -> None:
        raise Killed

    paths = submit(proposed(user, MINE)).paths
    with monkeypatch.context() as patch:
        patch.setattr("slurmrl.desk.submitting.claim_submission", kill)
        with pytest.raises(Killed):
            submit(propose_resume(paths, [], update_code=True))
    assert paths.snapshot(2).exists()
    assert trial_code.current_snapshot(paths) == 1
    submit(propose_resume(paths, [], update_code=True))
    assert trial_code.current_snapshot(paths) == 3


def test_code_record_contains_no_secret(
    user: Path, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_0123")
    paths = submit(proposed(user)).paths
    for path in paths.run.rglob("*"):
        assert not path.is_file() or b"hf_secret_0123" not in path.read_bytes()
    found = record(paths.code)
    assert isinstance(found["packages"], dict)
    assert found["packages"]["pytest"] == pytest.__version__
    assert found["directory"] == str(user.parent)


@pytest.fixture
def repository(user: Path) -> Path:
    def run(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(user), *identity, *words], check=True, capture_output=True)

    run("init", "-b", "trunk")
    run("add", "helper.py", "sft.yaml")
    run("commit", "-m", "first")
    (user / "helper.py").write_text("SCORE = 3\n")
    return user


def test_code_record_has_git_commit_state_and_changes(repository: Path) -> None:
    found = provenance.repository_of(repository)
    assert isinstance(found, provenance.Repository)
    assert (found.root, found.branch, len(found.commit)) == (repository, "trunk", 40)
    assert " M helper.py" in found.status.splitlines()
    assert "?? my_reward.py" in found.status.splitlines()
    assert b"+SCORE = 3" in found.diff
    named = [repository / "data.jsonl", repository / "helper.py", Path("/etc/hosts")]
    assert provenance.untracked_files(found, named) == [repository / "data.jsonl"]


def test_large_diff_is_truncated_with_a_note(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "MOST_DIFF_BYTES", 20)
    found = provenance.repository_of(repository)
    assert isinstance(found, provenance.Repository)
    assert len(found.diff) == 20
    assert any("truncated to 20 of" in note for note in found.notes)


def test_code_record_states_a_missing_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "not a git repository" in str(provenance.repository_of(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.repository_of(tmp_path) == "git is not installed"


def test_code_record_describes_a_repository(
    repository: Path, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes are recorded in a file, and configured files that git does not track are copied."""
    monkeypatch.chdir(repository)
    code = submit(proposed(repository)).paths.code
    assert b"+SCORE = 3" in (code / "directory.diff").read_bytes()
    assert (code / "untracked-files" / "data.jsonl").read_bytes() == (
        repository / "data.jsonl"
    ).read_bytes()
    repositories = record(code)["git"]
    assert isinstance(repositories, dict)
    assert repositories["directory"]["branch"] == "trunk"


def test_trial_of_an_older_version_has_one_snapshot(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.submission(1).mkdir(parents=True)
    paths.submission_request(1).write_text('{"scheduler": "local"}')
    assert trial_code.current_snapshot(paths) == 1
    assert recorded_folders(paths.code) == []


ALGORITHM = """
from slurmrl.algorithms.supervised_schema import SFT


class Mine(SFT):
    name: str
    strength: float = 1.0
"""


def test_trial_keeps_its_submitted_algorithm(user: Path, scheduler: FakeScheduler) -> None:
    """The file of the algorithm may have changed or be missing.

    ``--update-code`` uses the current file.
    """
    file = user / "algorithms" / "mine.py"
    file.parent.mkdir()
    file.write_text(ALGORITHM)
    override = f"algorithm={{name: '{file}:Mine', batch_size: 8}}"
    paths = submit(proposed(user, override)).paths
    assert "mine.py" in copied(paths.code)
    scheduler.tasks = []
    file.write_text(ALGORITHM.replace("1.0", "20.0"))

    def strength(proposal: Proposal) -> object:
        return proposal.settings.config.algorithm["strength"]

    assert strength(proposed(user, override)) == 1.0
    assert strength(propose_resume(paths, [])) == 1.0
    updated = propose_resume(paths, ["algorithm.strength=20.0"], update_code=True)
    submit(updated)
    assert "20.0" in (paths.snapshot(2) / "mine.py").read_text()
    file.unlink()
    assert strength(propose_resume(paths, [])) == 20.0

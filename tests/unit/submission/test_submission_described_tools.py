"""The schemas of an episode's tools in the configuration of a trial."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurmrl.cli.main import main
from slurmrl.config.load import dump, load_resolved
from slurmrl.config.schema import Config
from slurmrl.desk import inspector, trial_checks
from slurmrl.desk.doctor import examine
from slurmrl.desk.proposal import propose, propose_resume
from slurmrl.desk.submitting import submit
from slurmrl.desk.trial_checks import Code, Finding, described
from slurmrl.plan.build import make_plan
from slurmrl.plan.settings import Settings, load_settings
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import begin
from slurmrl.run.paths import RunPaths
from tests.fake_runs import CONFIG, FakeScheduler

TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }}={% endfor %}"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}<eos>"
CALCULATOR = "environment: {name: tools}, tools: {calculator: {}}"
HELD_OUT = "evaluation={suites: {sums: {dataset: {type: prompt, path: data.jsonl%s}}}}"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A trial whose policy may call a calculator."""
    (tmp_path / "data.jsonl").write_text('{"id": "1", "prompt": "a", "answer": "b"}\n')
    (tmp_path / "chat.jinja").write_text(TOOLS + PLAIN)
    text = CONFIG.replace("name: sft", "name: grpo").replace(
        "type: prompt_answer, path: data.jsonl",
        "type: prompt, path: data.jsonl, chat_template: chat.jinja",
    )
    path = tmp_path / "grpo.yaml"
    path.write_text(
        f"{text}reward: {{name: exact_match}}\n"
        f"rollout: {{episode: {{name: multi_turn, {CALCULATOR}}}}}\n"
    )
    return path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tool schemas in this process."""

    def made(settings: Settings, code: Code) -> dict[str, Any]:
        return inspector.schemas_by_dataset(settings.config)

    monkeypatch.setattr(trial_checks, "_made", made)


def of(path: Path, *overrides: str) -> Config:
    settings = load_settings(path, overrides, root=path.parent / "runs")
    return described(settings, Code()).config


def names(config: Config) -> dict[str, list[str] | None]:
    """The names of the tools by the first part of a dataset's key."""
    return {
        key[0]: None if part.tools is None else [each["function"]["name"] for each in part.tools]
        for key, part in config.datasets().items()
    }


def test_data_show_prints_the_tools_of_episodes(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One process makes the schemas and another one the prompts, as for users."""
    (config.parent / "data.jsonl").write_text(
        '{"prompt": "1+1=", "answer": "2"}\n'
        '{"prompt": "2+2=", "answer": "4", "tools": [{"function": {"name": "77"}}]}\n'
    )
    named = "rollout.episode.tools={'55': {name: calculator}}"
    assert main(["data", "show", str(config), named, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    shown = ["".join(run["text"] for run in row["sequences"][0]) for row in rows]
    assert shown == ["55=1+1=<eos>", "77=2+2=<eos>"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], {"dataset": ["calculator"]}),
        (["dataset.tools=[]"], {"dataset": []}),
        (["dataset.tools=[{function: {name: own}}]"], {"dataset": ["own"]}),
        (["dataset.chat_template=false"], {"dataset": None}),
        (["rollout.episode.environment.options.format=brackets"], {"dataset": None}),
        (
            [HELD_OUT % ", chat_template: chat.jinja"],
            {"dataset": ["calculator"], "evaluation": ["calculator"]},
        ),
        ([HELD_OUT % ""], {"dataset": ["calculator"], "evaluation": None}),
    ],
)
def test_datasets_get_schemas_if_the_template_writes_them(
    config: Path,
    overrides: list[str],
    expected: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(config.parent)
    assert names(of(config, *overrides)) == expected


@pytest.mark.usefixtures("quick")
def test_datasets_get_no_schemas_if_the_template_drops_tools(config: Path) -> None:
    (config.parent / "chat.jinja").write_text(PLAIN)
    assert names(of(config)) == {"dataset": None}


def test_recorded_trial_configuration_gets_no_new_schemas(config: Path) -> None:
    settings = load_settings(config, root=config.parent / "runs")
    file = config.parent / "config.yaml"
    file.write_text(dump(settings.config))
    assert names(of(file)) == {"dataset": None}


def test_failed_schema_process_gives_a_warning_and_prompts_without_tools(
    config: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trial_checks, "INSPECTOR", "no_such_module")
    assert names(of(config)) == {"dataset": None}
    assert "prompts do not describe the tools" in caplog.text
    assert "no_such_module" in caplog.text


@pytest.mark.usefixtures("quick")
def test_trial_with_a_commit_keeps_prompts_without_schemas(
    config: Path, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial was started by a release without schemas, and is submitted again and resumed."""
    root = str(config.parent / "runs")
    paths = _submitted(config, root, monkeypatch)
    assert names(propose(config, [], root=root, scheduler="local").settings.config) == {
        "dataset": ["calculator"]
    }
    commit = {"step": 1, "directory": "step-00000001.1"}
    begin(History(paths.history), {}).append(Kind.COMMIT, commit)
    again = propose(config, [], root=root, scheduler="local")
    resumed = propose_resume(paths, [], scheduler="local", update_code=True)
    for proposal in (again, resumed):
        assert names(proposal.settings.config) == {"dataset": None}
        assert "tools" not in proposal.settings.config.dataset.rules(), "the recipe is the same"


@pytest.mark.usefixtures("quick")
def test_doctor_checks_a_trial_with_schemas(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []

    def check(settings: Settings, *rest: Any, **more: Any) -> list[Finding]:
        checked.append(names(settings.config))
        return []

    monkeypatch.setattr(examine, "check_trial", check)
    settings = load_settings(config, root=config.parent / "runs", planning=True)
    examine.check_trial_files(settings, make_plan(settings, scheduler="local"), 1.0)
    assert checked == [{"dataset": ["calculator"]}]


def _submitted(config: Path, root: str, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """Submit a trial without schemas. Return its run directory."""
    with monkeypatch.context() as context:
        context.setattr(trial_checks, "_made", lambda settings, code: {})
        paths = submit(propose(config, [], root=root, scheduler="local")).paths
    assert load_resolved(paths.config).dataset.tools is None
    return paths

"""The checks before a trial is queued."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM

from slurmrl.cli.main import main
from slurmrl.cli.submit import carry_out
from slurmrl.config.schema import Lora
from slurmrl.data.tokenizer import save_tokenizer, vocabulary
from slurmrl.desk import input_checks, trial_checks, trial_code
from slurmrl.desk.proposal import Proposal, long_sequences
from slurmrl.desk.provenance import TorchBuild
from slurmrl.desk.trial_checks import Code, Finding, Weight, check_trial, reject
from slurmrl.env import user_name
from slurmrl.errors import ConfigError, UsageError
from slurmrl.models.adapters import trained_shapes
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.decoder import build
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_loading import misfits
from slurmrl.models.hf_model import HFModel
from slurmrl.plan.build import make_plan
from slurmrl.plan.own_algorithm import importable
from slurmrl.plan.settings import Settings, load_settings
from slurmrl.run.paths import RunPaths
from slurmrl.workers.master.exporting import pin_actor
from tests.fake_runs import write_config
from tests.support.committed import CommittedTrial, Weights
from tests.support.decoder_folders import to_hf
from tests.support.families import tiny
from tests.support.trials import ARCHITECTURE, alive, wait_until

EPISODE = "{name: multi_turn, environment: {name: guess_number}, max_tokens: 4}"
REWARD = """
class Good:
    def __init__(self, *, bonus: float = 0.0) -> None: ...
    def __call__(self, prompts, completions, rows):
        return [0.0 for _ in completions]
"""


def settings_of(folder: Path, *overrides: str) -> Settings:
    return load_settings(write_config(folder), overrides, root=folder / "runs")


def look(folder: Path, settings: Settings, timeout_s: float = 300.0) -> list[Finding]:
    code = trial_code.find_own_code(settings, [folder])
    plan = make_plan(settings, scheduler="local")
    return check_trial(settings, plan, Code(paths=code.paths), timeout_s=timeout_s)


def inputs(settings: Settings) -> list[Finding]:
    """Return the findings of the inspector, called in this process, because the code is trusted."""
    replies = input_checks.InputChecks(settings).run()
    return [Finding.from_json(reply) for reply in replies if "begins" not in reply]


def told(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(one.subject, str(one.weight)) for one in findings]


def write_rows(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_checks_pass_for_a_valid_configuration(tmp_path: Path) -> None:
    assert look(tmp_path, settings_of(tmp_path)) == []


def test_all_check_errors_are_reported_at_once_with_their_places(tmp_path: Path) -> None:
    rows = write_rows(
        tmp_path / "held.jsonl", {"prompt": "1", "answer": "2"}, {"prompt": None, "answer": "2"}
    )
    settings = settings_of(
        tmp_path,
        "dataset.prompt_template='{prmpt}'",
        f"evaluation={{dataset: {{type: prompt_answer, path: {rows}}}}}",
        "actor.architecture.vocab_size=15",
        f"cluster.variables_file={tmp_path / 'absent'}",
        "checkpoint.keep_last=1000000000000",
    )
    found = look(tmp_path, settings)
    places = {(one.where.rpartition("/")[2], one.key): one.message for one in found}
    assert all(one.weight is Weight.FAILED for one in found)
    assert "did you mean 'prompt'?" in places["command line", "dataset.prompt_template"]
    assert places["held.jsonl:2", "prompt"] == "must be a string, but is null"
    assert "largest token id is 15 " in places["sft.yaml:7", "actor.tokenizer"]
    assert "absent" in places["command line", "cluster.variables_file"]
    assert " are free in " in places["sft.yaml", "root"]
    with pytest.raises(ConfigError) as caught:
        reject(found)
    assert len(caught.value.problems) == 5


def test_webhook_variable_missing_in_jobs_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs do not get it from the shell that submits."""
    monkeypatch.setenv("HOOK", "https://hooks.org/x")
    (found,) = trial_checks.places(settings_of(tmp_path, "notify.webhook=HOOK"))
    assert (found.weight, found.key) == (Weight.WARNING, "notify.webhook")
    assert "cluster.variables_file does not set HOOK" in found.message
    file = tmp_path / "tokens"
    file.touch(mode=0o600)
    file.write_text("HOOK=https://hooks.org/x\n")
    named = ["notify.webhook=HOOK", f"cluster.variables_file={file}"]
    assert trial_checks.places(settings_of(tmp_path, *named)) == []


def test_cpu_build_of_torch_is_rejected_for_gpu_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set in the configuration or by default; a container has its own torch."""

    def problems(build: TorchBuild, *overrides: str, scheduler: str = "slurm") -> list[Finding]:
        monkeypatch.setattr(trial_checks, "torch_build", lambda: build)
        settings = settings_of(tmp_path, *overrides)
        plan = make_plan(settings, scheduler=scheduler)
        found = check_trial(settings, plan, Code(), timeout_s=0.01)
        return [one for one in found if one.subject == "torch"]

    cpu = TorchBuild("2.13.0+cpu", None, gpus=False)
    for overrides in ((), ("cluster.gpus_per_worker=1",)):
        (problem,) = problems(cpu, *overrides)
        assert problem.weight is Weight.FAILED
        for words in ("2.13.0+cpu", "--torch cuda", "gpus_per_worker: 0"):
            assert words in problem.message
        with pytest.raises(ConfigError, match="gpus_per_worker"):
            reject([problem])
        assert problems(TorchBuild("2.13.0", "13.0", gpus=True), *overrides) == []
    (problem,) = problems(cpu, "cluster.slurm.setup=['module load cuda']")
    assert (problem.weight, "--no-check" in problem.message) == (Weight.FAILED, True)
    assert problems(cpu, "cluster.gpus_per_worker=0") == []
    assert problems(cpu, "cluster.slurm.container=apptainer exec image.sif") == []


def test_torch_build_is_read_without_importing_torch() -> None:
    code = (
        "import sys; from slurmrl.desk.provenance import torch_build; "
        "print(*torch_build()); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    import torch

    expected = f"{torch.__version__} {torch.version.cuda} {torch.backends.cuda.is_built()}"
    assert (done.stdout.strip(), done.stderr) == (expected, "")


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        ("def broken(:", "mine:Good", "reward 'mine:Good': .* (mine.py, line 1)"),
        ("raise LookupError(3)", "mine:Good", "reward 'mine:Good': LookupError: 3 (mine.py:1)"),
        (REWARD, "mine:God", "mine has no 'God'; did you mean 'Good'?"),
        ("import only_in_my_shell", "mine:Good", "mine: No module named 'only_in_my_shell'"),
        ("import os; os._exit(3)", "mine:Good", "importing and making the reward ended the "),
        ("import sys; sys.exit('no')", "mine:Good", "SystemExit: no (mine.py:1)"),
    ],
)
def test_reward_that_cannot_be_created_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str, message: str
) -> None:
    """The submitting shell's PYTHONPATH does not apply, since a job does not have it."""
    (tmp_path / "shell").mkdir()
    (tmp_path / "shell" / "only_in_my_shell.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "shell"))
    (tmp_path / "mine.py").write_text(module)
    (found,) = look(tmp_path, settings_of(tmp_path, f"reward={{name: '{name}'}}"))
    assert (found.subject, found.weight) == ("reward", Weight.FAILED)
    for part in message.split(".*"):
        assert part in found.message
    assert "Traceback" not in found.message


@pytest.mark.parametrize(
    ("body", "weight", "message"),
    [
        ("open(__file__[:-7] + 'words.txt')", Weight.FAILED, "name the file by its absolute path"),
        ("open('words.txt')", Weight.FAILED, "No such file or directory: 'words.txt'"),
        ("raise LookupError(rows[0]['answer'])", Weight.WARNING, "LookupError: 2 (mine.py:"),
        ("pass", None, ""),
    ],
)
def test_reward_is_tried_on_one_row(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    weight: Weight | None,
    message: str,
) -> None:
    """A reward that reads a file next to the code, or in the current directory, fails, because a
    job lacks these files.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").touch()
    code = f"def judge(prompts, completions, rows):\n    {body}\n    return [1.0] * len(rows)\n"
    (tmp_path / "mine.py").write_text(code)
    path = write_rows(tmp_path / "rows.jsonl", {"id": "1", "prompt": "1+1=", "answer": "2"})
    held_out = f"evaluation={{dataset: {{type: prompt, path: {path}}}}}"
    found = look(tmp_path, settings_of(tmp_path, held_out, "reward={name: 'mine:judge'}"))
    assert [one.weight for one in found] == ([weight] if weight else [])
    assert all(message in one.message and "first row" in one.message for one in found)


def test_custom_reward_is_created_with_options_and_neighbor_modules(
    tmp_path: Path,
) -> None:
    (tmp_path / "beside.py").write_text("X = 1\n")
    (tmp_path / "mine.py").write_text(f"import beside\n{REWARD}")
    right = "reward={name: 'mine:Good', options: {bonus: 0.5}}"
    assert look(tmp_path, settings_of(tmp_path, right)) == []
    (found,) = look(tmp_path, settings_of(tmp_path, right.replace("bonus", "bonsu")))
    assert (found.subject, found.key) == ("reward", "reward")
    assert found.message == (
        "reward 'mine:Good' has no option 'bonsu'; did you mean 'bonus'? allowed: bonus"
    )
    assert not (tmp_path / "__pycache__").exists()


STATS = f"{REWARD}    def stats(self):\n        return {{'brief': (1.0, 2.0)}}\n"


@pytest.mark.parametrize(
    ("module", "pool", "metric", "weight", "message"),
    [
        (REWARD, "", "breif", Weight.FAILED, "no reward has a method stats(); allowed: "),
        (REWARD, "", "tokns", Weight.FAILED, "stats(); did you mean 'tokens'?"),
        (STATS, "", "breif", Weight.WARNING, "it records brief, not 'breif'"),
        (STATS, ", pool: {}", "breif", Weight.WARNING, "brief, reward_unjudged, not 'breif'"),
        (STATS, "", "eval/breif", Weight.WARNING, "brief, not 'eval/breif'"),
        (STATS.replace("brief", "step"), "", "tokens", Weight.FAILED, "stats() returned step, a "),
        (STATS, "", "brief", None, ""),
        (STATS, "", "eval/brief", None, ""),
    ],
)
def test_stop_condition_is_checked_with_metrics_of_a_custom_reward(
    tmp_path: Path, module: str, pool: str, metric: str, weight: Weight | None, message: str
) -> None:
    (tmp_path / "mine.py").write_text(module)
    path = write_rows(tmp_path / "rows.jsonl", {"id": "1", "prompt": "1+1=", "answer": "2"})
    held_out = f"evaluation={{every_steps: 1, dataset: {{type: prompt, path: {path}}}}}"
    settings = settings_of(
        tmp_path, held_out, f"reward={{name: 'mine:Good'{pool}}}", f"stop_when={metric} >= 1"
    )
    with importable([tmp_path]):
        checks = input_checks.InputChecks(settings).checks()
        assert list(checks["data"][1]()) == []
        found = list(checks["reward"][1]())
    sys.modules.pop("mine", None)
    key = "reward" if metric == "tokens" else "stop_when"
    assert [(one.key, one.weight) for one in found] == ([(key, weight)] if weight else [])
    assert all(message in one.message for one in found)


def test_episode_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Good:\n    async def __call__(self, policy, item, tools): ...\n"
    )
    low = "environment: {name: guess_number, options: {low: 9, high: 1}}"
    with importable([tmp_path]):
        for episode, message in (
            ("{name: 'mine:Good'}", None),
            ("{name: 'mine:Good', options: {wrong: 1}}", "wrong"),
            ("{name: 'mine:missing'}", "mine has no 'missing'"),
            (f"{{name: multi_turn, {low}}}", "low 9"),
            ("{name: 'mine:Good', tools: {t: {name: 'nowhere:t'}}}", "no module 'nowhere'"),
        ):
            found = inputs(settings_of(tmp_path, f"rollout.episode={episode}"))
            assert told(found) == ([("episode", "failed")] if message else [])
            assert (message or "") in "".join(one.message for one in found)
    del sys.modules["mine"]


def test_chat_template_without_tool_results_is_reported(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    tools = "environment: {name: tools}, tools: {calculator: {}}"
    settings = settings_of(
        tmp_path,
        f"rollout.episode={{name: multi_turn, {tools}}}",
        f"dataset.chat_template={template}",
    )
    found, unended = inputs(settings)
    assert found.subject == "episode"
    assert "the assistant or a message after it (roles: tool)" in found.message
    assert (unended.weight, unended.key) == (Weight.WARNING, "dataset.chat_template")
    assert "does not end a turn with a special token" in unended.message


def test_every_part_of_a_reward_is_created_and_checks_the_rows(tmp_path: Path) -> None:
    """A part in a pool is created in a separate process."""
    rows = [{"prompt": "1", "answer": "3", "kind": "sum"}, {"prompt": "2", "answer": "4"}]
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    (tmp_path / "mine.py").write_text(REWARD)
    part = "name: 'mine:Good', where: {kind: sum}, pool: {processes: 1}"
    evaluation = f"evaluation={{dataset: {{type: prompt, path: {path}}}}}"
    changes = [evaluation, f"reward={{parts: {{a: {{{part}}}}}}}"]
    (found,) = look(tmp_path, settings_of(tmp_path, *changes))
    assert found.where.endswith("rows.jsonl:2")
    assert "no part of the reward scores this row (kind: absent)" in found.message
    changes[1] = changes[1].replace("mine:Good", "mine:Better")
    (found,) = look(tmp_path, settings_of(tmp_path, *changes))
    assert "mine has no 'Better'" in found.message
    (tmp_path / "mine.py").write_text("def f(prompts, completions, rows, *, model_scores): ...\n")
    (found,) = look(tmp_path, settings_of(tmp_path, evaluation, "reward={name: 'mine:f'}"))
    assert "'mine:f' asks for model_scores: add a part with name: model" in found.message


def test_reward_model_needs_a_scalar_head_and_the_actors_tokenizer(tmp_path: Path) -> None:
    """Otherwise every score would be 0, or belong to other texts."""
    judge = tmp_path / "judge"
    judge.mkdir()
    settings = settings_of(tmp_path)
    architecture = settings.config.actor.architecture
    assert architecture is not None
    to_hf(build(ModelConfig.from_hf(architecture), "lm"), judge)
    known = vocabulary(Path(str(settings.config.actor.tokenizer)))
    assert known is not None
    symbols = {symbol: 15 - place for symbol, place in known.items()}
    core = Tokenizer(models.WordLevel(symbols, unk_token="<unk>"))
    save_tokenizer(core, judge, end="<eos>", pad="<pad>")
    held = write_rows(tmp_path / "held.jsonl", {"prompt": "1+1=", "answer": "2"})
    evaluation = f"evaluation={{dataset: {{type: prompt, path: {held}}}}}"
    overrides = (evaluation, f"reward_model.path={judge}")
    found = inputs(settings_of(tmp_path, *overrides, "reward={name: model}"))
    messages = {one.subject: one for one in found if one.key == "reward_model.path"}
    assert "has no score.weight: every score would be 0" in messages["weights"].message
    assert "another tokenizer" in messages["tokenizer"].message
    assert messages["tokenizer"].weight is messages["weights"].weight is Weight.FAILED
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    evaluate = (
        "algorithm={name: evaluate, measure: preferences, batch_size: 4}",
        f"dataset={{type: preference, path: {write_rows(tmp_path / 'pairs.jsonl', pair)}}}",
        "total_steps=null",
        "actor.architecture=null",
        f"actor.path={judge}",
    )
    found = inputs(settings_of(tmp_path, *evaluate))
    (silent,) = (one for one in found if one.weight is not Weight.NOTE)
    assert (silent.key, silent.weight) == ("actor.path", Weight.FAILED)
    assert "has no score.weight: every score would be 0" in silent.message


def test_slow_check_is_ended_and_reported_as_skipped(tmp_path: Path) -> None:
    """The child is killed with its processes; problems found before are reported."""
    module = f"""
import pathlib, subprocess, time
sleeper = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(sleeper.pid))
time.sleep(600)
"""
    (tmp_path / "mine.py").write_text(module)
    settings = settings_of(
        tmp_path, "reward={name: 'mine:Good'}", "dataset.prompt_template='{prmpt}'"
    )
    for timeout_s in (5.0, 20.0, 80.0):  # this machine may be busy
        found = look(tmp_path, settings, timeout_s=timeout_s)
        if (tmp_path / "pid").exists():
            break
    assert told(found) == [("data", "failed"), ("reward", "warning")]
    assert f"making the reward took longer than {timeout_s:g} s" in found[1].message
    sleeper = int((tmp_path / "pid").read_text())
    wait_until("the end of its process", lambda: not alive(sleeper))


def test_import_that_only_the_container_may_have_is_a_warning(tmp_path: Path) -> None:
    """Also covers an import in a process of the pool."""
    (tmp_path / "mine.py").write_text("import only_in_the_image\n")
    reward = "reward={name: 'mine:Good', pool: {}}"
    settings = settings_of(tmp_path, reward, "cluster.slurm.container=run --image x")
    assert told(look(tmp_path, settings)) == [("reward", "warning")]


def test_dropped_lines_are_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "1+2=", "answer": "3"}] * 3 + [{"prompt": "11+22=", "answer": "33"}]
    write_rows(tmp_path / "rows.jsonl", *rows)
    path = f"dataset.path={tmp_path / 'rows.jsonl'}"
    (found,) = inputs(settings_of(tmp_path, path, "dataset.max_prompt_tokens=4"))
    assert (found.weight, found.message[:41]) == (
        Weight.NOTE,
        "1 of 4 lines (25.0%) are longer than max_",
    )


def test_lines_beyond_the_model_positions_are_rejected(tmp_path: Path) -> None:
    """Otherwise the model would be trained at unknown positions, or could not generate after a
    prompt. Covers each dataset, including one of several sources.
    """
    rows = [{"prompt": "1" * n, "answer": "2"} for n in (1, 9, 10)]  # and the end of the text
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    settings = settings_of(
        tmp_path,
        "actor.architecture.max_position_embeddings=10",
        f"dataset={{sources: {{a: {{path: {path}}}}}, type: prompt_answer}}",
        f"evaluation={{dataset: {{type: prompt, path: {path}}}}}",
        *("reward={name: exact_match}", "rollout.max_new_tokens=1"),
    )
    refused = [one for one in inputs(settings) if one.weight is Weight.FAILED]
    assert [(one.key, one.message.partition(",")[0]) for one in refused] == [
        ("dataset.max_tokens", f"2 of 3 lines (66.7%) of {path} have more than 10 tokens"),
        (
            "evaluation.dataset.max_prompt_tokens",
            f"1 of 3 lines (33.3%) of {path} have more than 9 tokens",
        ),
    ]
    bounded = settings_of(
        tmp_path,
        "actor.architecture.max_position_embeddings=10",
        f"dataset={{type: prompt_answer, path: {path}, max_tokens: 10}}",
    )
    assert told(inputs(bounded)) == [("data", "warning")]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            [],
            "set dataset.max_prompt_tokens: 7 to leave out longer prompts, or lower max_new_tokens",
        ),
        (
            ["rollout.max_new_tokens=10"],
            "positions (max_position_embeddings); lower max_new_tokens",
        ),
        (["rollout.max_new_tokens=2"], ""),
        (["dataset.max_prompt_tokens=7"], ""),
        ([f"rollout.episode={EPISODE}"], ""),
    ],
)
def test_note_only_if_trainers_may_generate_beyond_the_positions(
    tmp_path: Path, overrides: list[str], said: str
) -> None:
    path = write_rows(
        tmp_path / "rows.jsonl", *({"prompt": "1" * n, "answer": "2"} for n in (1, 8))
    )
    settings = settings_of(
        tmp_path,
        "algorithm={name: grpo, batch_size: 2}",
        "actor.architecture.max_position_embeddings=10",
        f"dataset={{type: prompt, path: {path}}}",
        *("reward={name: exact_match}", "rollout={n: 2, max_new_tokens: 3}", *overrides),
    )
    notes = [one for one in inputs(settings) if one.subject == "positions"]
    assert [(one.weight, one.key) for one in notes] == [(Weight.NOTE, "dataset")] * bool(said)
    assert all(one.message.endswith(said) for one in notes)
    assert long_sequences(settings, []) == [f"dataset: {one.message}" for one in notes]


def test_steps_of_a_single_pass_are_counted(tmp_path: Path) -> None:
    """Skipped lines do not count. Lines of all sources count."""
    passes = "algorithm={name: evaluate, measure: likelihood, batch_size: 2}"
    rows = [{"prompt": "1+2=", "answer": "3"}] * 4 + [{"prompt": "11+22=", "answer": "33"}]
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    short = f"dataset={{type: prompt_answer, path: {path}, max_tokens: 8}}"
    found = inputs(settings_of(tmp_path, passes, "total_steps=9", short))
    assert [one.message for one in found if one.subject == "steps"] == [
        "one pass over 4 rows, 2 in a step: 2 steps (total_steps 9 is a limit)"
    ]
    sources = f"{{a: {{path: {path}}}, b: {{path: {path}}}}}"
    both = f"dataset={{type: prompt_answer, sources: {sources}}}"
    found = inputs(settings_of(tmp_path, passes, "total_steps=null", both))
    assert [one.message for one in found if one.subject == "steps"] == [
        "one pass over 10 rows, 2 in a step: 5 steps"
    ]


def test_built_in_reward_needs_answers(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "held.jsonl", {"prompt": "1"})
    evaluation = f"evaluation={{dataset: {{type: prompt, path: {rows}}}}}"
    settings = settings_of(tmp_path, evaluation, "reward={name: exact_match}")
    (found,) = inputs(settings)
    assert found.key == "evaluation.dataset.answer_key"
    assert "no answers under 'answer'" in found.message


def test_only_the_beginning_of_a_large_file_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_checks, "MOST_BYTES", 1024)
    settings = settings_of(tmp_path)
    rows = [{"id": str(n), "prompt": "1+2=", "answer": "3"} for n in range(100)]
    write_rows(Path(settings.config.dataset.path), *rows)
    (found,) = inputs(settings)
    assert (found.subject, found.weight, found.key) == ("data", Weight.WARNING, "dataset.path")
    assert "were checked" in found.message


def test_adapters_with_another_base_model_are_rejected_in_evaluations(
    tmp_path: Path,
) -> None:
    """A checkpoint of adapters has the fingerprint of the weights that they belong to."""
    base = tmp_path / "base"
    base.mkdir()
    torch.manual_seed(1)
    to_hf(build(ModelConfig.from_hf(ARCHITECTURE), "lm"), base)
    trial = CommittedTrial(tmp_path / "runs", path=str(base), lora={"rank": 2})
    shapes = trained_shapes(ModelConfig.from_hf(ARCHITECTURE), "lm", Lora(rank=2))
    adapters = {name: np.ones(shape, "<f4") for name, shape in shapes.items()}
    wrong = evaluated(tmp_path, trial, 4, adapters, frozen="0123456789abcdef")
    assert (wrong[0].key, wrong[0].weight) == ("actor.path", Weight.FAILED)
    own = re.search(r"have changed since .* was 0123456789abcdef and is (\w+)", wrong[0].message)
    assert own is not None
    assert evaluated(tmp_path, trial, 8, adapters, frozen=own[1]) == []
    settings = settings_of_evaluation(tmp_path, trial, 4)
    path = settings.config.actor.path
    assert path is not None
    compared: set[str] = set()
    plan = make_plan(settings, scheduler="local")
    assert "adapters" in {
        one.subject for one in check_trial(settings, plan, Code(), compared=compared)
    }
    assert compared == {path}
    checks = input_checks.InputChecks(settings, compared).checks()
    assert list(checks["adapters"][1]()) == [], "not again: the model may be large"


def test_suite_trials_compare_their_checkpoint_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known: list[set[str]] = []

    def checked(timeout_s: float, compared: set[str]) -> list[Finding]:
        known.append(set(compared))
        compared.add("checkpoint")
        return []

    proposals = [cast(Proposal, SimpleNamespace(check=checked)) for _ in range(3)]
    monkeypatch.setattr("slurmrl.cli.submit.show", lambda *_, **__: 0)
    monkeypatch.setattr("slurmrl.desk.submitting.rehearse", lambda _: None)
    assert carry_out(proposals, check_s=1.0, dry_run=True, wait=None, as_json=False) == 0
    assert known == [set(), {"checkpoint"}, {"checkpoint"}]


def evaluated(
    folder: Path, trial: CommittedTrial, step: int, adapters: Weights, *, frozen: str
) -> list[Finding]:
    """Return the findings of the last check before a checkpoint is evaluated without an export."""
    trial.commit(step, adapters, frozen=frozen)
    settings = settings_of_evaluation(folder, trial, step)
    return list(input_checks.InputChecks(settings).checks()["adapters"][1]())


def settings_of_evaluation(folder: Path, trial: CommittedTrial, step: int) -> Settings:
    return settings_of(
        folder,
        "algorithm={name: evaluate, batch_size: 8, measure: likelihood}",
        "evaluation=null",
        "total_steps=null",
        f"actor={{path: {pin_actor(trial.paths, step)}}}",
    )


def test_disk_space_check_counts_checkpoints_versions_and_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The space covers one more whole weight version than is kept, and the data of a trial without
    prepared data.
    """
    publish = ("actor.dtype=bfloat16", "rollout.publish={keep_whole: 3}")
    settings = settings_of(tmp_path, f"root={tmp_path / 'runs'}", *publish)
    matrices = 64 * 32 * 2 + 4 * 32 * 32 + 3 * 32 * 64 + 3 * 32
    assert trial_checks.checkpoint_bytes(settings) == matrices * 4 * 3
    versions, data = 4 * matrices * 2, 2 * Path(settings.config.dataset.path).stat().st_size
    free = SimpleNamespace(f_bavail=1, f_frsize=1)
    monkeypatch.setattr(trial_checks.os, "statvfs", lambda folder: free)
    (found,) = trial_checks.disk_space(settings)
    assert f", {versions / 2**20:.1f} MiB of full weight versions, " in found.message
    assert f", {data / 2**20:.1f} MiB of tokenized data; choose" in found.message
    config = settings.config
    paths = RunPaths.of(Path(config.root), user_name(), config.experiment, config.trial)
    (paths.data / "made").mkdir(parents=True)
    (found,) = trial_checks.disk_space(settings)
    assert "tokenized" not in found.message


def test_submit_rejects_bad_inputs_before_writing_unless_checks_are_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path)
    write_rows(tmp_path / "data.jsonl", {"prompt": "1", "answer": 42})
    arguments = ["submit", str(path), "--scheduler", "local", "--root", str(tmp_path / "runs")]
    for more in (["--dry-run"], ["--detach"]):
        assert main([*arguments, *more]) == 2
        said = capsys.readouterr().err
        assert 'data.jsonl:1: answer: must be a string, but is a number (42): write "42"' in said
        assert said.count("must be a string") == 1
    assert not (tmp_path / "runs").exists()
    assert main([*arguments, "--dry-run", "--no-check"]) == 0
    assert "not checked" in capsys.readouterr().err


def test_doctor_reports_the_same_problems_as_submit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path)
    write_rows(tmp_path / "data.jsonl", {"prompt": "1", "answer": 42})
    arguments = ["doctor", str(path), "--scheduler", "local", "--root", str(tmp_path / "runs")]
    assert main([*arguments, "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    (found,) = [one for one in checks if one["name"] == "data"]
    assert found["state"] == "failed"
    assert "data.jsonl:1: answer: must be a string" in found["measured"]


OWN_ALGORITHM = """
from slurmrl.algorithms.base import Interface
from slurmrl.algorithms.supervised_schema import SFT
from dataclasses import replace


class Mine(SFT):
    name: str
    interface: str = "mine:Good"

    def calls(self, config):
        return tuple(replace(call, interface=self.interface) for call in super().calls(config))


class Good(Interface):
    def train_step(self, engine, sample, context):
        import torch


class Idle(Interface):
    pass


class Eager(Good):
    def __init__(self, size): ...
"""


@pytest.mark.parametrize(
    ("interface", "message"),
    [
        ("mine:Good", ""),
        ("mine:Idle", "does not define train_step()"),
        ("mine:Mine", "is not a subclass of slurmrl.algorithms.base.Interface"),
        ("mine:Eager", "missing 1 required positional argument: 'size'"),
        ("mine:Godo", "mine has no 'Godo'"),
        ("elsewhere:Good", "there is no module 'elsewhere'"),
    ],
)
def test_code_of_a_custom_algorithm_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interface: str, message: str
) -> None:
    """Interfaces are imported as the ranks import them, and implement the method of their call."""
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(OWN_ALGORITHM)
    settings = settings_of(
        tmp_path,
        "algorithm.name=" + str(tmp_path / "mine.py") + ":Mine",
        f"algorithm.interface={interface}",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = list(input_checks.InputChecks(settings).checks()["algorithm"][1]())
    assert [(one.subject, one.weight) for one in found] == (
        [("algorithm", Weight.FAILED)] if message else []
    )
    assert message in "".join(one.message for one in found)


def test_rejection_of_nan_weights_names_file_and_tensor(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    decoder = build(ModelConfig.from_hf(ARCHITECTURE))
    with torch.no_grad():
        decoder.get_parameter("model.norm.weight")[3] = float("nan")
    to_hf(decoder, model)
    settings = settings_of(tmp_path, "actor.architecture=null", f"actor.path={model}")
    (found,) = (each for each in inputs(settings) if each.subject == "weights")
    assert (found.weight, found.key) == (Weight.FAILED, "actor.path")
    assert "model.safetensors: tensor 'model.norm.weight' has 1 NaN and" in found.message


@pytest.mark.parametrize("implementation", ["builtin", "hf"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tie_word_embeddings": True}, "set tie_word_embeddings to false in config.json"),
        ({"num_hidden_layers": 3}, "the files lack model.layers.2."),
        ({"vocab_size": 40}, "[16, 32] instead of [40, 32]"),
    ],
)
def test_model_that_the_files_do_not_fill_is_rejected(
    tmp_path: Path, implementation: str, changes: dict[str, Any], message: str
) -> None:
    """transformers would initialize missing tensors at random, and untie the projection."""
    model = tmp_path / "model"
    model.mkdir()
    to_hf(build(ModelConfig.from_hf({**ARCHITECTURE, "tie_word_embeddings": False})), model)
    values = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps(values))
    path = f"actor.path={model}"
    settings = settings_of(
        tmp_path, "actor.architecture=null", path, f"actor.implementation={implementation}"
    )
    (found,) = (each for each in inputs(settings) if each.subject == "weights")
    assert (found.weight, found.key) == (Weight.FAILED, "actor.path")
    assert message in found.message
    if implementation == "hf":
        with pytest.raises(UsageError, match=re.escape(message)):
            HFModel(HFConfig.from_hf(values), "lm", source=model, seed=0, dtype=torch.float32)


def test_quantized_tensors_of_transformers_model_are_rejected(tmp_path: Path) -> None:
    """Without their scales, such weights would be trained as they are."""
    model = tmp_path / "model"
    model.mkdir()
    decoder = build(ModelConfig.from_hf(ARCHITECTURE))
    to_hf(decoder, model)
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1)}
    save_file(tensors, model / "model.safetensors")
    settings = settings_of(
        tmp_path, "actor.architecture=null", f"actor.path={model}", "actor.implementation=hf"
    )
    (failed,) = (each for each in inputs(settings) if each.subject == "weights")
    assert (failed.weight, failed.key) == (Weight.FAILED, "actor.path")
    assert f"{name} is F8_E4M3, but only weights that are not quantized" in failed.message


def test_quantized_experts_of_transformers_model_are_rejected(tmp_path: Path) -> None:
    """The matrices of all experts are one tensor, whose name does not end with `weight`."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 4, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
    config = AutoConfig.for_model(
        "gpt_oss", **sizes, vocab_size=32, num_experts_per_tok=1, pad_token_id=0
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert misfits(values, "lm", tmp_path) == ([], [])
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (wrong,), _ = misfits(values, "lm", tmp_path)
    assert f"{name} is F8_E4M3, but only weights that are not quantized" in wrong


def test_transformers_model_larger_than_the_memory_limit_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither mapped files nor accelerate, which slurmrl does not require, are needed."""
    model = tmp_path / "model"
    model.mkdir()
    to_hf(build(ModelConfig.from_hf(ARCHITECTURE)), model)
    weights = model / "model.safetensors"
    size, rest = int.from_bytes(weights.read_bytes()[:8], "little"), weights.read_bytes()[8:]
    header, end = json.loads(rest[:size]), len(rest) - size + 9 * 2**30
    unused = {"dtype": "U8", "shape": [9 * 2**30], "data_offsets": [len(rest) - size, end]}
    text = json.dumps(header | {"mtp.weight": unused}).encode()
    weights.write_bytes(len(text).to_bytes(8, "little") + text + rest[size:])
    os.truncate(weights, 8 + len(text) + end)
    values = json.loads((model / "config.json").read_text())
    monkeypatch.setattr("transformers.integrations.accelerate.is_accelerate_available", bool)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (input_checks.MOST_MEMORY, before[1]))
    try:
        assert misfits(values, "lm", model) == ([], ["mtp.weight"])
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.parametrize("wrong", [{"num_attention_heads": 0}, {"hidden_size": "x"}])
def test_transformers_model_that_cannot_be_built_is_reported_once(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    to_hf(build(ModelConfig.from_hf(ARCHITECTURE)), model)
    settings = settings_of(
        tmp_path, "actor.architecture=null", f"actor.path={model}", "actor.implementation=hf"
    )
    values = json.loads((model / "config.json").read_text()) | wrong
    (model / "config.json").write_text(json.dumps(values))
    (found,) = (each for each in inputs(settings) if each.subject == "weights")
    assert (found.weight, found.key) == (Weight.FAILED, "actor.implementation")
    assert "transformers cannot build a " in found.message


def test_transformers_model_with_integer_constants_is_accepted(tmp_path: Path) -> None:
    """Experts of DeepSeek-V4's first layers come from a table of token ids."""
    architecture = f"actor.architecture={json.dumps(tiny('deepseek_v4'))}"
    settings = settings_of(tmp_path, "actor.implementation=hf", architecture)
    assert [one for one in inputs(settings) if one.subject == "weights"] == []

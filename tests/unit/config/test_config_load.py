from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmrl.algorithms.supervised_schema import SFT
from slurmrl.config import problems as config_problems
from slurmrl.config.load import dump, load, load_resolved, parse
from slurmrl.config.schema import Config
from slurmrl.config.source import RESOLVED
from slurmrl.errors import ConfigError, Problem

ALGORITHM_KEYS = ("batch_size", "n_minibatches", "clip_ratio", "discount", "gae_lambda")
VALUES: dict[str, Any] = {
    "experiment": "addition",
    "total_steps": 3,
    "algorithm": {"name": "ppo"},
    "actor": {"architecture": {"model_type": "llama"}},
    "dataset": {"type": "prompt", "path": "data/train.jsonl"},
}
TEXT = """\
experiment: addition
total_steps: 3
algorithm: {name: ppo}
actor:
  architecture: {model_type: llama}
dataset:
  type: prompt
  path: data/train.jsonl
"""


def write(folder: Path, text: str = TEXT) -> Path:
    path = folder / "a.yaml"
    path.write_text(text)
    return path


def problems(folder: Path, *overrides: str, text: str = TEXT) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        parse(load(write(folder, text), overrides))
    return list(caught.value.problems)


def test_minimal_file_gets_the_documented_defaults(tmp_path: Path) -> None:
    config = parse(load(write(tmp_path)))
    assert (config.trial, config.seed, config.root) == ("1", 1, "./runs")
    assert config.actor.optimizer.betas == (0.9, 0.95)
    assert config.checkpoint.every_steps == 10
    assert config.critic is None


def test_integers_are_accepted_as_strings(tmp_path: Path) -> None:
    config = parse(load(write(tmp_path), ["trial=3", "cluster.slurm.time=30"]))
    assert (config.trial, config.cluster.slurm.time) == ("3", "30")


@pytest.mark.parametrize(
    "written", ["00123", "0o17", "1e3", "on", "no", "2026-11-28", "1_000", "0x1f", "1.50", "12e03"]
)
def test_string_setting_keeps_its_spelling_in_a_file(tmp_path: Path, written: str) -> None:
    text = f"{TEXT}rollout: {{stop_strings: [{written}]}}\ncluster:\n  env: {{A: {written}}}\n"
    text += f"  slurm: {{account: {written}, extra_lines: [{written}]}}\ntrial: &t {written}\n"
    config = parse(load(write(tmp_path, text)))
    slurm = config.cluster.slurm
    assert {config.trial, slurm.account, *slurm.extra_lines, *config.rollout.stop_strings} == {
        written
    }
    assert config.cluster.env == {"A": written}
    assert parse(load(write(tmp_path, dump(config)))) == config


def test_number_setting_is_read_as_number_in_any_spelling(tmp_path: Path) -> None:
    config = parse(load(write(tmp_path, f"{TEXT}seed: 0o17\nstep_timeout_s: 1e3\n")))
    assert (config.seed, config.step_timeout_s) == (15, 1000.0)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("$SCRATCH/data", "/scratch/me/data"),
        ("${SCRATCH}/data", "/scratch/me/data"),
        ("/lustre/$WHO/data", "/lustre/me/data"),
        ("~/data", "/home/me/data"),
        ("/cost$/data", "/cost$/data"),
    ],
)
def test_variables_in_a_path_setting_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, meant: str
) -> None:
    for name, value in {"SCRATCH": "/scratch/me", "WHO": "me", "HOME": "/home/me"}.items():
        monkeypatch.setenv(name, value)
    text = TEXT.replace("data/train.jsonl", f'"{written}"')
    text += f'root: "{written}"\ncode: ["{written}"]\ncluster: {{variables_file: "{written}"}}\n'
    config = parse(load(write(tmp_path, text), [f"actor.tokenizer={written}"]))
    paths = {config.root, *config.code, config.cluster.variables_file, config.actor.tokenizer}
    assert {config.dataset.path, *paths} == {meant}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("$SCRATCH/runs", "the environment variable SCRATCH is not set or is empty"),
        ("/a/${EMPTY}", "the environment variable EMPTY is not set or is empty"),
        ("${SCRATCH:-/tmp}/runs", "a path may contain $NAME and ${NAME}"),
        ("/home/$(whoami)/runs", "a path may contain $NAME and ${NAME}"),
        ("~nobody-here/runs", "there is no user 'nobody-here'"),
    ],
)
@pytest.mark.parametrize("key", ["root", "actor.tokenizer", "dataset.path"])
def test_path_setting_with_an_unset_variable_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, written: str, message: str
) -> None:
    monkeypatch.delenv("SCRATCH", raising=False)
    monkeypatch.setenv("EMPTY", "")
    [problem] = problems(tmp_path, f"{key}={written}")
    assert problem.key == key
    assert message in problem.message


def test_recorded_path_keeps_its_dollar_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse(load(write(tmp_path), ["trial=007"]))
    config = config.model_copy(update={"root": "/home/me/$SCRATCH/runs"})
    monkeypatch.setenv("SCRATCH", "/scratch")
    path = write(tmp_path, dump(config))
    assert parse(load(path)) == config
    assert parse(load(path, ["root=$SCRATCH/runs"])).root == "/scratch/runs"


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("seed=no", "'no' is not allowed: must be an integer"),
        ("seed=1.5", "1.5 is not allowed: must be an integer"),
        ("seed=-1", "-1 is not allowed: must be at least 0"),
        (f"seed={2**32}", "must be at most 4294967295"),
        ("step_timeout_s=-3", "-3 is not allowed: must be greater than 0"),
        ("step_timeout_s=.inf", "must be a finite number"),
        ("actor.optimizer.betas=[0.9, 1]", "1 is not allowed: must be less than 1"),
        ("actor.optimizer.betas=[0.9]", "is required. The list is too short."),
        ("actor.optimizer.betas=[0.9, 0.9, 0.9]", "has 3 items; at most 2 are allowed"),
        ("actor.optimizer.betas=0.9", "must be a list"),
        ("actor.optimizer=3", "must be a section"),
        ("rollout.top_p=1.5", "1.5 is not allowed: must be at most 1"),
        ("rollout.greedy=no", "'no' is not allowed: must be a boolean: true or false"),
        ("rollout.min_new_tokens=300", "min_new_tokens 300 exceeds max_new_tokens 256"),
        (
            "rollout.tasks={stale_cache: true, interruptible: false}",
            "stale_cache is not allowed with interruptible: false",
        ),
        (
            "rollout.tasks={stale_cache: true, max_staleness: 0}",
            "stale_cache is not allowed with max_staleness 0",
        ),
        ("actor.dtype=float23", "did you mean 'float32'? allowed: float32, bfloat16"),
        ("cluster.gpus_per_worker=2", "2 is not allowed: must be at most 1"),
        (
            "cluster.env={'NCCL-DEBUG': INFO}",
            "'NCCL-DEBUG' is not a valid name of an environment variable",
        ),
        (
            "cluster.env={SLURM_CONF: x}",
            "SLURM_CONF is not allowed, because Slurm or",
        ),
        ("cluster.env={NCCL_DEBUG: true}", "must be a string"),
        ("cluster.slurm.time=1 hour", "MINUTES"),
        ("cluster.mem_per_worker=16 GB", "16G"),
        ('cluster.slurm.account="a\\nb"', "one line"),
        ('cluster.slurm.extra_lines=["--x", "a\\nrm"]', "one line"),
        ('cluster.slurm.setup="module load x"', "must be a list"),
        ("cluster.interface=' '", "must not be empty"),
        ("experiment=a/b", "starts with a letter or a digit"),
        ("experiment=a..b", "has no '..'"),
        (f"trial={'a' * 65}", "1 to 64"),
        ("stop_when=eval/reward > 0.4", "METRIC >= NUMBER"),
        ("notify.webhook=https://hooks.org/x", "must be the name of an environment variable"),
        ("cluster.num_nodes=2", "unknown key; write hosts"),
        ("cluster.scheduler=SLURM", "'SLURM' is not allowed; did you mean 'slurm'?"),
        ("total_step=3", "unknown key; did you mean 'total_steps'?"),
        ("actor.optimzer.lr=3", "unknown key; did you mean 'optimizer'?"),
        ("rollout.optimizer.lr=3", "unknown key; did you mean actor.optimizer or"),
        ("lr=3", "unknown key; did you mean actor.optimizer.lr or"),
        ("evaluation.samples=3", "needs a dataset, or suites"),
    ],
)
def test_one_wrong_value_gives_one_message_with_value_rule_and_choices(
    tmp_path: Path, override: str, rule: str
) -> None:
    [problem] = problems(tmp_path, override)
    assert problem.where == "command line"
    assert rule in problem.message


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("rollout.stop", "rollout.stop_strings"),
        ("actor.lr", "actor.optimizer.lr"),
        ("batch_size", "algorithm.batch_size"),
        ("num_generations", "rollout.n"),
        ("temperature", "rollout.temperature"),
        ("model", "actor.path"),
        ("num_train_epochs", "total_steps"),
        ("rollout.temp", "rollout.temperature"),
        ("rollout.do_sample", "rollout.greedy"),
        ("actor.micro_batch_size", "actor.max_tokens_per_microbatch"),
        ("reward.path", "reward.name"),
        ("evaluation.dataset.file", "evaluation.dataset.path"),
        ("reward.parts.a.path", "reward.parts.a.name"),
        ("BATCH_SIZE", "algorithm.batch_size"),
    ],
)
def test_message_about_an_unknown_key_names_its_place(tmp_path: Path, key: str, place: str) -> None:
    found = [one for one in problems(tmp_path, f"{key}=3") if one.key == key]
    assert len(found) == 1
    assert found[0].message.startswith("unknown key; did you mean ")
    assert place in re.split(r"[ ?]", found[0].message)[5]


@pytest.mark.parametrize(
    ("key", "meaning"),
    [
        ("rollout.do_sample", "greedy? It is the opposite: `do_sample: true` is `greedy: false`"),
        ("evaluation.do_sample", "evaluation.greedy? It is the opposite"),
        ("epochs", "total_steps? It counts steps: an epoch has rows / algorithm.batch_size"),
        ("actor.optimizer.warmup_ratio", "warmup_steps? It is a number of steps, not a share"),
        ("max_prompt_length", "max_prompt_tokens? Rows with a longer prompt are left out, not cut"),
        ("actor.optimizer.epsilon", "write eps"),
        ("logging_steps", "did you mean logging.every_steps?"),
        ("lr_warmup", "unknown key; allowed: actor, "),
        ("evaluation.batch_size", "unknown key; allowed: at_end, at_start, "),
    ],
)
def test_suggestion_explains_how_the_meaning_differs(
    tmp_path: Path, key: str, meaning: str
) -> None:
    (found,) = [one for one in problems(tmp_path, f"{key}=3") if one.key == key]
    assert meaning in found.message


def test_keys_that_mean_something_else_elsewhere_are_located() -> None:
    assert config_problems.DIFFERENT.keys() <= config_problems.PLACES.keys()


def test_message_about_an_unknown_key_omits_settings_of_other_algorithms() -> None:
    assert (
        config_problems.unknown_key(SFT, ("gamma",), ("algorithm",))
        == "unknown key; allowed: batch_size, name"
    )


def test_suggested_places_are_existing_settings() -> None:
    known = {".".join(map(str, path)) for path in config_problems.paths(Config)}
    for place in config_problems.PLACES.values():
        section, _, name = place.partition(".")
        assert place in known or (section == "algorithm" and name in {"kl.coef", *ALGORITHM_KEYS})


def test_invalid_template_is_reported_with_its_place(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, "dataset.prompt_template='{prompt'")
    assert (found.where, found.key) == ("command line", "dataset.prompt_template")
    assert "the brace at character 1 ('{prompt') is not closed; write {{" in found.message


def test_lone_surrogate_is_rejected(tmp_path: Path) -> None:
    found = problems(tmp_path, 'dataset.prompt_template="{prompt}\\ud800"')[0]
    assert found.key == "dataset.prompt_template"
    assert "lone surrogate" in found.message


def test_violated_section_rule_is_reported_at_the_section(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, "actor.path=here")
    assert (problem.where, problem.key) == (f"{tmp_path / 'a.yaml'}:4", "actor")
    assert problem.message == "path and architecture exclude each other: set only one of them"


def test_all_problems_are_reported_at_once_each_with_its_place(tmp_path: Path) -> None:
    text = TEXT.replace("total_steps: 3", "total_steps: -3\nsed: 1\nseed: 1\nseed: 2")
    text += "  shufle: true\n"
    found = problems(tmp_path, "cluster.scheduler=slrum", "x", text=text)
    file = tmp_path / "a.yaml"
    assert sorted((problem.where, problem.key) for problem in found) == sorted(
        [
            (f"{file}:2", "total_steps"),
            (f"{file}:3", "sed"),
            (f"{file}:5", "seed"),
            (f"{file}:12", "dataset.shufle"),
            ("command line", "cluster.scheduler"),
            ("command line", ""),
        ]
    )


def test_message_about_a_required_key_explains_the_key(tmp_path: Path) -> None:
    found = problems(tmp_path, text="experiment: a\n")
    assert [problem.key for problem in found] == ["algorithm", "actor", "dataset"]
    assert "The algorithm: its `name`" in found[0].message


def test_message_has_file_line_key_value_and_rule(tmp_path: Path) -> None:
    text = TEXT.replace("total_steps: 3", "total_steps: -1")
    [problem] = problems(tmp_path, text=text)
    file = tmp_path / "a.yaml"
    assert str(problem) == f"{file}:2: total_steps: -1 is not allowed: must be at least 0"


def test_paths_are_relative_to_the_file_or_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    there = tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    write(there)
    relative = Path(os.path.relpath(there / "a.yaml"))
    overrides = ["actor.tokenizer=../tokenizer", "ref.path=trial:sft/1", "critic.path=/model"]
    config = parse(load(relative, overrides))
    assert config.dataset.path == str(there / "data/train.jsonl")
    assert config.actor.tokenizer == str(tmp_path / "tokenizer")
    assert config.ref is not None
    assert config.ref.path == "trial:sft/1"
    assert config.critic is not None
    assert config.critic.path == "/model"


def test_a_dumped_configuration_reads_back_equal(tmp_path: Path) -> None:
    overrides = [
        "trial=7",
        "actor.optimizer.lr=3e-4",
        "cluster.slurm.time=1:00:00",
        "evaluation.dataset={type: prompt, path: /x.jsonl}",
        "reward={name: math, options: {a: [1, 'no', null]}}",
    ]
    config = parse(load(write(tmp_path), overrides))
    path = tmp_path / "resolved.yaml"
    path.write_text(dump(config))
    assert load_resolved(path) == config


@settings(deadline=None, max_examples=25)
@given(
    template=st.text(st.characters(codec="utf-8", exclude_categories=["Cs"])),
    architecture=st.dictionaries(
        st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1),
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("no:1e-~"),
    ),
    rate=st.floats(min_value=0, max_value=1e30),
)
def test_any_string_and_number_survive_the_dump(
    tmp_path_factory: pytest.TempPathFactory,
    template: str,
    architecture: dict[str, Any],
    rate: float,
) -> None:
    doubled = template.replace("{", "{{").replace("}", "}}")
    config = Config.model_validate(
        {
            **VALUES,
            "actor": {"architecture": architecture, "optimizer": {"lr": rate}},
            "dataset": {
                "type": "prompt",
                "path": "/x",
                "prompt_template": f"{doubled}{{prompt}}",
            },
        }
    )
    path = tmp_path_factory.mktemp("dump") / "resolved.yaml"
    path.write_text(dump(config), encoding="utf-8", newline="")
    assert load_resolved(path) == config


def test_loading_a_configuration_imports_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from slurmrl.config.load import load, parse\n"
        f"parse(load(Path({str(write(tmp_path))!r})))\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("null", ["null", ""])
def test_null_clears_a_setting(tmp_path: Path, null: str) -> None:
    """Also covers settings that accept no null, in the file or on the command line."""
    text = TEXT.replace("  architecture", "  backend: fsdp:d4\n  architecture")
    path = write(tmp_path, f"{text}seed: {null}\ncluster: {null}\n")
    config = parse(load(path, [f"actor.backend={null}", f"logging.tensorboard={null}"]))
    assert (config.actor.backend, config.seed, config.logging.tensorboard) == ("", 1, False)
    with pytest.raises(ConfigError, match="experiment: null is not allowed"):
        parse(load(path, [f"experiment={null}"]))


def test_removed_setting_is_accepted_only_with_its_default(tmp_path: Path) -> None:
    """Configurations of trials of an earlier release contain every setting."""
    path = tmp_path / "config.yaml"
    path.write_text("rollout:\n  server_updates: files\n")
    assert load(path).values["rollout"] == {}
    path.write_text("rollout:\n  server_updates: broadcast\n")
    with pytest.raises(ConfigError) as caught:
        parse(load(path))
    (told,) = [each for each in caught.value.problems if each.key == "rollout.server_updates"]
    assert told.where == f"{path}:2"
    assert told.message.startswith("is no longer a setting: servers read new weights from files")
    path.write_text("logging:\n  csv: true\n")
    with pytest.raises(ConfigError, match=r"no longer a setting: .*metrics\.jsonl has every step"):
        parse(load(path))
    path.write_text(f"{RESOLVED}\nlogging:\n  csv: true\n")
    assert load(path).values["logging"] == {}


def test_removed_setting_is_found_at_any_depth(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "actor: {optimizer: {alpha: 0.99, rho: 0.8}}\n"
        "models: {judge: {optimizer: {alpha: 0.9, rho: 0.9}}}\n"
        "reward: {options: {optimizer: {alpha: 0.99}}}\n"
    )
    values = load(path).values
    assert values["reward"]["options"] == {"optimizer": {"alpha": 0.99}}
    assert values["actor"]["optimizer"] == {"rho": 0.8}
    assert values["models"]["judge"]["optimizer"] == {"alpha": 0.9}
    with pytest.raises(ConfigError) as caught:
        parse(load(path))
    told = {each.key: each.message for each in caught.value.problems}
    assert "only adadelta used it" in told["actor.optimizer.rho"]
    assert "only rmsprop used it" in told["models.judge.optimizer.alpha"]

"""Custom algorithms: names, loading and checks."""

from __future__ import annotations

import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest

from slurmrl.config.changes import differences
from slurmrl.config.load import dump
from slurmrl.desk import trial_code
from slurmrl.errors import ConfigError, Problem
from slurmrl.plan.build import make_plan
from slurmrl.plan.metric_names import known_metrics
from slurmrl.plan.settings import Settings, load_settings
from tests.unit.plan.conftest import Load, write_model

CODE = """
from typing import ClassVar

from slurmrl.algorithms.base import Interface
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.algorithms.schema import AlgorithmSchema
from slurmrl.config.schema import PositiveFloat
from slurmrl.plan.dataflow import Call, Method, RoleUse


class Mine(AlgorithmSchema):
    strength: PositiveFloat = 1.0
    dataset_types: ClassVar = ("prompt",)

    def roles(self):
        return (RoleUse("actor", trained=True), RoleUse("judge", trained=False))

    def calls(self, config):
        own = f"{__name__}:Own"
        return (
            Call("judge_inf", "judge", Method.INFERENCE, own, ("prompt_ids",), ("opinions",)),
            Call("train", "actor", Method.TRAIN_STEP, own, ("prompt_ids", "opinions")),
        )


class Own(Interface):
    def inference(self, engine, sample, context): ...
    def train_step(self, engine, sample, context): ...


class Grouped(PolicyGradient):
    based_on: ClassVar = "grpo"
    name: str
    bonus: float = 0.0


class Replaying(Grouped):
    replays: ClassVar = True
"""
REFERENCE = "algorithm.name=my_algorithm.py:Mine"


@pytest.fixture
def code(folder: Path) -> Path:
    """Write a file with algorithms next to the configuration."""
    path = folder / "my_algorithm.py"
    path.write_text(CODE)
    return path


@pytest.fixture
def load_own(folder: Path, code: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a configuration of one of these algorithms."""
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "my_algorithm", raising=False)

    def load(*overrides: str) -> Settings:
        path = folder / "ppo.yaml"
        return load_settings(path, [REFERENCE, *overrides], root=folder / "runs")

    return load


def problems(load_own: Load, *overrides: str) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load_own(*overrides)
    return caught.value.problems


def broken(load_own: Load, code: Path, *changes: tuple[str, str]) -> str:
    """Return the problems of a changed file."""
    text = CODE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    code.write_text(text)
    found = problems(load_own)
    assert all(problem.key.startswith("algorithm") for problem in found)
    return "; ".join(problem.message for problem in found)


def test_custom_file_defines_an_algorithm(load_own: Load, folder: Path) -> None:
    """slurmrl validates its settings, adds a section for its role, and copies the code into the
    trial.
    """
    settings = load_own("algorithm.strength=2.5", "models.judge.backend=fsdp:d1")
    assert settings.algorithm.name == "my_algorithm:Mine"
    assert settings.config.algorithm["strength"] == 2.5
    plan = make_plan(settings, scheduler="local")
    assert (plan.calls[0].name, plan.calls[0].role) == ("judge_inf", "judge")
    assert len(plan.models["judge"].ranks) == 1
    assert settings.config.model("judge").path == settings.config.actor.path
    found = trial_code.find_own_code(settings)
    assert found.paths == (folder / "my_algorithm.py",)


def test_run_loads_the_trials_copy_of_a_custom_algorithm(load_own: Load, tmp_path: Path) -> None:
    """The resolved configuration names the module, not a file that may change."""
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "my_algorithm.py").write_text(CODE.replace("strength", "power"))
    settings = load_own()
    text = dump(settings.config).replace("strength", "power")
    (copy / "config.yaml").write_text(text)
    program = (
        "import sys; from pathlib import Path\n"
        "from slurmrl.plan.settings import load_resolved_settings\n"
        "settings = load_resolved_settings(Path(sys.argv[1]))\n"
        "print(settings.algorithm.power, sys.modules['my_algorithm'].__file__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(copy / "config.yaml")],
        env={"PYTHONPATH": f"{copy}:{Path(__file__).parents[3]}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1.0", str(copy / "my_algorithm.py")]


def test_custom_policy_gradient_has_the_defaults_of_its_preset(load_own: Load) -> None:
    settings = load_own("algorithm.name=my_algorithm.py:Grouped", "algorithm.bonus=0.5")
    assert settings.config.rollout.n == 8
    assert settings.config.algorithm["advantage"] == "group"
    assert settings.config.algorithm["bonus"] == 0.5


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("from typing", "import torch\nfrom typing", "when it is loaded (my_algorithm.py, line 2)"),
        ("own = f", "import torch; own = f", "on the login node (my_algorithm.py, line 19)"),
    ],
)
def test_custom_schema_that_imports_torch_is_rejected_with_its_line(
    folder: Path, code: Path, old: str, new: str, message: str
) -> None:
    """The check runs in a separate process, so that commands stay fast and need no torch."""
    code.write_text(CODE.replace(old, new, 1))
    program = (
        "from pathlib import Path\n"
        "from slurmrl.plan.settings import load_settings\n"
        "from slurmrl.errors import ConfigError\n"
        f"try: load_settings(Path({str(folder / 'ppo.yaml')!r}), [{REFERENCE!r}])\n"
        "except ConfigError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert message in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("setting", "message", "key"),
    [
        ("algorithm.name=nowhere.py:Mine", "there is no file", None),
        ("algorithm.name=my_algorithm:Nothing", "my_algorithm has no 'Nothing'; ", None),
        ("algorithm.name=no_such_module:Mine", "there is no module 'no_such_module'", None),
        ("algorithm.name=my_algorithm.py:Own", "Own is not a subclass of slurmrl.alg", None),
        ("algorithm.name=json:loads", "a function is not a subclass", None),
        ("algorithm.name=gprpo", "did you mean 'grpo'?", None),
        ("algorithm.strength=-1", "-1 is not allowed: must be greater than 0", None),
        ("algorithm.strenght=1", "did you mean 'strength'?", None),
        ("models.jugde.backend=fsdp:d1", "did you mean 'judge'? allowed: judge", "models.jugde"),
        (
            "models.reward.backend=fsdp:d1",
            "'reward' is already a section of the configuration",
            "models.reward.[key]",
        ),
        ("models.judge.path=nowhere", "there is no such folder", None),
        ("models.judge.backend=fsdp:d1p2", "fsdp has no dimension 'p'", None),
    ],
)
def test_wrong_setting_is_one_problem_at_its_key(
    load_own: Load, setting: str, message: str, key: str | None
) -> None:
    (problem,) = problems(load_own, setting)
    assert problem.key == (key or setting.partition("=")[0])
    assert message in problem.message


def test_additional_roles_need_a_custom_algorithm(load_ppo: Load) -> None:
    with pytest.raises(ConfigError, match="only a custom algorithm has additional roles"):
        load_ppo("models.judge.backend=fsdp:d1")


def test_custom_file_must_not_shadow_a_module(load_own: Load, folder: Path) -> None:
    for name in ("queue", "click"):
        (folder / f"{name}.py").write_text(CODE)
        (problem,) = problems(load_own, f"algorithm.name={name}.py:Mine")
        assert f"this file would hide the existing module {name}" in problem.message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def roles", "def rules", "Mine does not define roles()"),
        ("dataset_types: ClassVar = (", "sets: ClassVar = (", "Mine.dataset_types is None"),
        ('ClassVar = ("prompt",)', 'ClassVar = ("promt",)', "allowed: kto, messages"),
        ('RoleUse("judge"', 'RoleUse("jugde"', "uses the role 'judge', which roles() lacks"),
        ('RoleUse("judge"', 'RoleUse("dataset"', "the role 'dataset' is not allowed"),
        ('RoleUse("actor", trained=True)', 'RoleUse("ref", trained=False)', "lacks the actor"),
        ('"actor", trained=True', '"actor", trained=False', "does not declare it as trained"),
        ('"judge", trained=False', '"judge", trained=True', "but no call trains it"),
        ('("opinions",)', '("opinion",)', "reads key 'opinions', which nothing produces"),
        ('("opinions",)', '("prompt_ids",)', "key 'prompt_ids' has 2 producers"),
        ('Call("train"', 'Call("judge_inf"', "two calls are named 'judge_inf'"),
        ('("prompt_ids",), (', '["prompt_ids"], (', "the inputs ['prompt_ids'], must be a tuple"),
        ("Method.INFERENCE", '"inference"', "has the method 'inference'; allowed: Method.GENERATE"),
        ('f"{__name__}:Own"', '"Own"', "has the interface 'Own', must be 'module:Class'"),
        ('own = f"{__name__}:Own"', "own = config.nothing", "has no attribute 'nothing'"),
        ("class Own(", "class Own(Nothing, ", "name 'Nothing' is not defined (my_algorithm.py"),
        (
            "def calls",
            'def evaluation_measures(self, config): return {"beauty": "mean"}\n    def calls',
            "must be the name of a metric with one of Measure.MEAN",
        ),
        ("strength: PositiveFloat", "epochs: float", "has the name of AlgorithmSchema.epochs"),
        ("PositiveFloat = 1.0", 'PositiveFloat = "x"', "Mine.strength is wrong: 'x' is not"),
        ("PositiveFloat = 1.0", "PositiveFloat = 0.0", "must be greater than 0"),
        ('ClassVar = "grpo"', 'ClassVar = "grop"', "is 'grop', not a preset; did you mean 'grpo'?"),
    ],
)
def test_contract_violation_is_one_problem_at_submission(
    load_own: Load, code: Path, old: str, new: str, message: str
) -> None:
    assert message in broken(load_own, code, (old, new))


def test_replaying_algorithm_must_read_recorded_keys(load_own: Load, code: Path) -> None:
    """Otherwise its losses would silently use the whole vocabulary."""
    declared = "strength: PositiveFloat = 1.0\n    replays: ClassVar = True"
    code.write_text(CODE.replace("strength: PositiveFloat = 1.0", declared))
    load_own()
    (problem,) = problems(load_own, "rollout.top_k=20")
    assert problem.key == "algorithm"
    assert "with rollout.top_k call 'train' does not read support_sizes and" in problem.message
    load_own("rollout.top_k=20", "algorithm.name=my_algorithm.py:Replaying")


def test_only_one_call_of_an_algorithm_may_record_results(load_own: Load, code: Path) -> None:
    """Only one call of a step records results. A pass over the dataset has no further items to
    replace filtered ones.
    """
    both = (("Method.INFERENCE", "Method.RECORD"), ("Method.TRAIN_STEP", "Method.RECORD"))
    assert "only one call of a step may record results, not judge_inf" in broken(
        load_own, code, *both
    )
    passing = ("strength:", "one_pass: ClassVar = True\n    strength:")
    filtering = ("Method.INFERENCE", "Method.FILTER")
    assert "with one_pass no step can replace" in broken(load_own, code, passing, filtering)
    early = (("Method.INFERENCE", "Method.RECORD"), ("Method.TRAIN_STEP", "Method.FILTER"))
    assert "'judge_inf' records results before 'train'" in broken(load_own, code, *early)


def test_stop_condition_may_name_custom_evaluation_measures(load_own: Load, code: Path) -> None:
    """A stop condition may name them; without evaluations the algorithm is not asked for them."""
    measures = 'return {f"beauty of {config.evaluation.n}": Measure.MEAN}'
    text = CODE.replace("import Call,", "import Call, Measure,").replace(
        "    def calls",
        f"    def evaluation_measures(self, config):\n        {measures}\n\n    def calls",
    )
    code.write_text(text)
    known = known_metrics(*attrgetter("config", "algorithm")(load_own("evaluation.n=4")))
    assert {"eval/beauty of 4", "eval/beauty of 4/low", "eval/beauty of 4/high"} <= set(known)
    assert load_own("evaluation=null").config.evaluation is None


def test_single_pass_training_needs_total_steps(load_own: Load, code: Path) -> None:
    """Learning rates depend on the total number of steps."""
    code.write_text(CODE.replace("strength:", "one_pass: ClassVar = True\n    strength:"))
    found = problems(load_own, "total_steps=null", "evaluation=null")
    assert [problem.key for problem in found] == ["total_steps"]


def test_custom_validator_is_not_run_without_values(load_own: Load, code: Path) -> None:
    """The check of defaults passes no values."""
    validator = """
    @model_validator(mode="before")
    @classmethod
    def _doubled(cls, values):
        return {**values, "strength": 2 * values["strength"]}

    def roles"""
    text = CODE.replace("\n    def roles", validator, 1)
    code.write_text(
        text.replace("import ClassVar", "import ClassVar\nfrom pydantic import model_validator")
    )
    assert attrgetter("algorithm.strength")(load_own("algorithm.strength=0.5")) == 1.0


def test_failing_validator_does_not_hide_a_wrong_default(load_own: Load, code: Path) -> None:
    validator = """
    @field_validator("strength", mode="before")
    @classmethod
    def _checked(cls, value):
        return value["missing"]

    def roles"""
    text = CODE.replace("\n    def roles", validator, 1)
    text = text.replace("import ClassVar", "import ClassVar\nfrom pydantic import field_validator")
    code.write_text(text.replace("PositiveFloat = 1.0", "PositiveFloat = 0.0"))
    [problem] = problems(load_own)
    assert "the default of Mine.strength is wrong: 0.0 is not allowed: must be greater than 0" in (
        problem.message
    )
    assert (
        "; and a validator raises TypeError on defaults: 'float' object is not" in problem.message
    )


def test_message_about_an_inherited_name_list_explains_the_remedy(
    load_own: Load, code: Path
) -> None:
    code.write_text(CODE.replace("    name: str\n", ""))
    (problem,) = problems(load_own, "algorithm.name=my_algorithm.py:Grouped")
    assert "add a field to it: name: str" in problem.message


def test_role_layout_may_change_but_role_weights_may_not(load_own: Load, folder: Path) -> None:
    write_model(folder / "other")
    before = load_own().config
    assert differences(before, load_own("models.judge.backend=fsdp:d1").config) == []
    (line,) = differences(before, load_own(f"models.judge.path={folder / 'other'}").config)
    assert line.startswith("models.judge.path: ")


def test_interface_module_is_copied_into_the_trial(
    load_own: Load, code: Path, folder: Path
) -> None:
    (folder / "losses.py").write_text("import torch\n")
    code.write_text(CODE.replace('f"{__name__}:Own"', '"losses:Own"'))
    settings = load_own()
    found = trial_code.find_own_code(settings)
    assert set(found.paths) == {code, folder / "losses.py"}

"""The search: its order, its answers and its command."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from slurmrl.cli.main import main
from slurmrl.cli.searching import _sizes
from slurmrl.config.allocation import parse
from slurmrl.config.schema import Model
from slurmrl.errors import ConfigError, UsageError
from slurmrl.plan.estimates.call_costs import MeanTokens
from slurmrl.plan.estimates.hardware import shipped
from slurmrl.plan.estimates.memory import Memory
from slurmrl.plan.estimates.step_seconds import predict_step
from slurmrl.plan.estimates.worker_memory import fullest_gpu
from slurmrl.plan.placement import ROLLOUTS
from slurmrl.plan.settings import Settings, load_settings
from slurmrl.search import answers as answers_module
from slurmrl.search import best_layouts, candidates
from slurmrl.search.best_layouts import Answer, SearchRequest, search
from slurmrl.search.candidates import Candidate, allocations, unbeaten

TEXT = """\
# first line
experiment: big
total_steps: 100
algorithm:
  name: ppo  # the algorithm
  batch_size: 64
  n_minibatches: 2
actor:
  backend: fsdp:d4
  dtype: bfloat16
  architecture: {model_type: llama, vocab_size: 128256, hidden_size: 4096, intermediate_size: 14336,
    num_hidden_layers: 32, num_attention_heads: 32, num_key_value_heads: 8,
    max_position_embeddings: 8192}
rollout: {max_new_tokens: 1024}
reward: {name: exact_match}
dataset: {type: prompt, path: train.jsonl, max_prompt_tokens: 512}
cluster: {slurm: {gpu_type: h100}}
"""
MEAN = MeanTokens(256, 512)
GRPO = ("algorithm.name=grpo", "algorithm.kl.coef=0")
"""Overrides that leave one model, so a search is short."""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "ppo.yaml"
    path.write_text(TEXT)
    return path


def load(path: Path, *overrides: str) -> Settings:
    return load_settings(path, overrides, scheduler="slurm", planning=True)


def written(changes: Mapping[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in changes.items()]


def answers(path: Path, *overrides: str, **settings: Any) -> list[Answer]:
    given = load(path, *overrides)
    known = {str(problem) for problem in given.missing}

    def loaded(changes: Mapping[str, Any]) -> Settings | None:
        try:
            found = load(path, *overrides, *written(changes))
        except ConfigError:
            return None
        return None if {str(problem) for problem in found.missing} - known else found

    usual: dict[str, Any] = {"gpus": (8,), "mean": MEAN, "engines": frozenset({"fsdp", "native"})}
    return search(given, SearchRequest(**{**usual, **settings}), loaded)


def test_best_answer_is_the_best_of_all_combinations(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test predicts all combinations of few candidates and compares them with the memory."""
    monkeypatch.setattr(candidates, "MICROBATCHES", (4096, 16384))
    given = load(config, *GRPO)
    found = answers(config, *GRPO)
    best = math.inf
    for engine, tokens, mode, own in product(
        allocations("fsdp", 8, largest_tp=8),
        (4096, 16384),
        ("off", "selective", "full"),
        (None, *allocations("native", 8, largest_tp=8)),
    ):
        changes: dict[str, Any] = {
            "actor.backend": str(engine),
            "actor.max_tokens_per_microbatch": tokens,
            "actor.gradient_checkpointing": mode,
        }
        if own is not None:
            changes |= {"rollout.backend": str(own), "rollout.gpus": "0-7"}
        try:
            one = load(config, *GRPO, *written(changes))
        except ConfigError:
            continue
        if {str(each) for each in one.missing} - {str(each) for each in given.missing}:
            continue
        step = predict_step(one, MEAN)
        assert step is not None
        best = min(best, step.total)
    assert found[0].step.total == pytest.approx(best)


def test_answers_fit_into_memory_and_are_valid_settings(config: Path) -> None:
    found = answers(config)
    given = load(config)
    first = predict_step(given, MEAN)
    assert first is not None
    assert [one.step.total for one in found] == sorted(one.step.total for one in found)
    assert found[0].step.total < first.total
    assert len({(one.backends["actor"], one.backends.get("rollout")) for one in found}) > 1
    for one in found:
        loaded = load(config, *written(one.overrides))
        fullest = fullest_gpu(loaded)
        assert fullest.size + fullest.margin <= 80 * 2**30
        step = predict_step(loaded, MEAN)
        assert step is not None
        assert step.total == pytest.approx(one.step.total)


def test_search_keeps_settings_that_affect_learning(config: Path) -> None:
    kept = ("dtype", "lora", "optimizer", "architecture")
    before = load(config).config
    for one in answers(config, gpus=(8, 16)):
        after = load(config, *written(one.overrides)).config
        assert after.algorithm == before.algorithm
        assert after.rollout.tasks == before.rollout.tasks
        assert all(getattr(after.actor, name) == getattr(before.actor, name) for name in kept)


@pytest.mark.parametrize(("heads", "tensor_ranks"), [(8, {1, 2, 4}), (2, {1, 2})])
def test_transformers_models_get_feasible_tensor_ranks(
    config: Path, heads: int, tensor_ranks: set[int]
) -> None:
    """Each key-value head is on only one rank."""
    overrides = (
        "algorithm.name=grpo",
        "actor.implementation=hf",
        f"actor.architecture.num_key_value_heads={heads}",
        "actor.architecture.num_hidden_layers=4",
        "actor.architecture.vocab_size=32000",
    )
    found = answers(config, *overrides, engines=frozenset({"fsdp"}), results=50, gpus=(4,))
    assert {parse(one.backends["actor"]).sizes["tp"] for one in found} == tensor_ranks


@pytest.mark.parametrize("layout", ["fsdp:d4", "archon:d4", " archon[actor]:d4"])
def test_given_engine_is_searched_under_each_of_its_names(config: Path, layout: str) -> None:
    """Only the given engine is allowed, and ``archon`` is another name for it."""
    found = answers(config, f"actor.backend='{layout}'", engines=frozenset(), results=1)
    assert parse(found[0].backends["actor"]).backend == "fsdp"


def test_rollout_tasks_and_trainers_share_the_gpus(config: Path) -> None:
    overrides = ("algorithm.name=grpo", "rollout.tasks={}", "rollout.backend=vllm:d4")
    for one in answers(config, *overrides, gpus=(16,)):
        sizes = [parse(one.backends[name]).world_size for name in ("actor", "rollout")]
        assert sum(sizes) == 16
        assert one.step.asynchronous == {"actor_gen"}


def test_tasks_may_take_a_third_of_the_gpus(config: Path) -> None:
    """No number of eighths of 24 GPUs above 3 is a power of two."""
    tasks = ("algorithm.name=grpo", "rollout.tasks={}", "rollout.backend=vllm:d4")
    sizes = {parse(one.backends["actor"]).world_size for one in answers(config, *tasks, gpus=(24,))}
    assert sizes <= {8, 16}
    assert sizes


def test_reasons_of_rejected_combinations_are_shown(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "rollout.python: is required; set the Python of an environment in which vllm is"
    given = ("--gpus", "8", *GRPO)
    _, out, _ = run(capsys, config, *given)
    assert "a submission would reject" not in out
    _, out, _ = run(capsys, config, *given, "--engines", "fsdp,vllm")
    assert "a submission would reject other combinations" in out
    assert reason in out
    _, printed, _ = run(capsys, config, *given, "--engines", "fsdp,vllm", "--json")
    assert any(reason in one for one in json.loads(printed)["rejected"])


def test_reasons_are_shown_if_all_combinations_are_rejected(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = answers_module.Searched((), rejected=("rollout.python: is required",))
    monkeypatch.setattr(answers_module, "search", lambda *_: searched)
    code, _, error = run(capsys, config, "--gpus", "8")
    assert code == 2
    assert "would reject each combination that was found:" in error
    assert "rollout.python: is required" in error
    assert "use more GPUs" not in error


def test_adapters_and_their_shared_reference_change_layout_together(config: Path) -> None:
    lines = TEXT.splitlines()
    first = next(n for n, line in enumerate(lines) if "architecture: {" in line)
    folder = config.with_name("model")
    folder.mkdir()
    values = YAML(typ="safe").load("\n".join(lines[first : first + 3]))
    (folder / "config.json").write_text(json.dumps(values["architecture"]))
    lines[first : first + 3] = ["  path: model", "  lora: {rank: 8}"]
    config.write_text("\n".join(lines))
    found = answers(config, "algorithm.name=grpo", "algorithm.kl.coef=0.1")
    assert len({one.backends["actor"] for one in found}) > 1
    assert any(one.backends.get("rollout", "").startswith("native") for one in found)
    assert all("ref" not in one.backends for one in found)


def test_evaluation_engine_is_kept_if_training_does_not_generate() -> None:
    example = Path(__file__).parents[3] / "examples/megatron_moe.yaml"
    found = answers(example, "cluster.slurm.gpu_type=h100", gpus=(4,), mean=MeanTokens(32, 0))
    assert found[0].backends["actor"].startswith("megatron")
    assert all("rollout.backend" not in one.overrides for one in found)
    assert all(one.step.moves == 0 for one in found), "evaluations do not count"


def test_smaller_memory_needs_more_recomputation_or_gives_no_answer(config: Path) -> None:
    wide = answers(config)[0].step.total
    narrow = answers(config, "cluster.gpu_memory=45G")
    assert narrow
    assert narrow[0].step.total > wide
    assert answers(config, "cluster.gpu_memory=8G") == []


def test_cost_objective_finds_fewer_gpus_than_time_objective(config: Path) -> None:
    fast = answers(config, *GRPO, gpus=(8, 32))[0]
    cheap = answers(config, *GRPO, gpus=(8, 32), objective="cost")[0]
    assert cheap.gpus < fast.gpus
    assert cheap.gpu_seconds < fast.gpu_seconds
    assert fast.step.total < cheap.step.total


def test_unknown_gpu_is_rejected(config: Path) -> None:
    with pytest.raises(UsageError, match="gpu_type"):
        answers(config, "cluster.slurm.gpu_type=unheard")
    with pytest.raises(UsageError, match="profile-cluster"):
        answers(config, "cluster.gpus_per_worker=0")
    with pytest.raises(UsageError, match="gpu_memory"):
        answers(config, "cluster.slurm.gpu_type=a100")


def candidate(seconds: float, weights: int = 0) -> Candidate:
    memory = Memory(weights, 0, 0, 0, 0)
    return Candidate("actor", Model(), parse("fsdp:d1"), seconds, memory)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=4))
def test_combinations_are_sorted_by_total_seconds(lists: list[list[int]]) -> None:
    rows = [[candidate(seconds) for seconds in sorted(each)] for each in lists]
    found = [sum(one.seconds for one in each) for each in best_layouts._in_order(rows)]
    assert found == sorted(sum(each) for each in product(*lists))


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=2, max_size=3))
def test_combinations_are_sorted_by_the_slower_of_tasks_and_trainers(
    lists: list[list[int]],
) -> None:
    rows = [[candidate(seconds) for seconds in sorted(each)] for each in lists]
    rows[0] = [replace(one, name=ROLLOUTS) for one in rows[0]]
    found = [
        max(tasks.seconds, sum(one.seconds for one in others))
        for tasks, *others in best_layouts._in_order(rows, apart=True)
    ]
    assert found == sorted(max(tasks, sum(others)) for tasks, *others in product(*lists))


def test_gpu_hour_limit_applies_to_all_answers(config: Path) -> None:
    cheap = answers(config, *GRPO, gpus=(8,), objective="cost")[0].gpu_seconds
    found = answers(config, *GRPO, gpus=(8, 32), gpu_seconds=1.2 * cheap)
    assert found
    assert all(one.gpu_seconds <= 1.2 * cheap for one in found)
    assert [one.step.total for one in found] == sorted(one.step.total for one in found)


def test_seconds_of_candidates_add_up_to_the_seconds_of_a_step(config: Path) -> None:
    """Otherwise, the order of the sums would differ from the order of the answers."""
    layouts = {"actor": "fsdp:d8", ROLLOUTS: "native:d8"}
    backends = [f"{name}.backend={backend}" for name, backend in layouts.items()]
    own: tuple[str, ...] = (*GRPO, "rollout.gpus=0-7")
    given = load(config, *own, *backends)
    total = 0.0
    for name, backend in layouts.items():
        found = candidates.of_model(given, name, 8, [backend.partition(":")[0]], MEAN)
        best = next(one for one in found if str(one.allocation) == backend)
        total += best.seconds
        if name == "actor":
            own = (
                *own,
                f"actor.max_tokens_per_microbatch={best.model.max_tokens_per_microbatch}",
                f"actor.gradient_checkpointing={best.model.recompute}",
            )
    step = predict_step(load(config, *own, *backends), MEAN)
    assert step is not None
    assert step.moves > 0
    assert step.total == pytest.approx(total * (1 + shipped("h100").efficiency.rest))


def test_slower_and_larger_candidate_is_left_out() -> None:
    kept = unbeaten([candidate(3, 1), candidate(1, 2), candidate(2, 2), candidate(4, 1)])
    assert [(one.seconds, one.memory.weights) for one in kept] == [(1, 2), (3, 1)]


def test_layouts_use_every_gpu_once() -> None:
    found = list(allocations("megatron", 16, largest_tp=8))
    assert all(one.world_size == 16 for one in found)
    assert len({str(one) for one in found}) == len(found)
    assert max(one.sizes["tp"] for one in found) == 8


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["search", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_search_writes_the_best_answer_next_to_the_file(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = config.with_name("best.yaml")
    code, out, _ = run(capsys, config, "--gpus", 8, "--write", best, "--response-tokens", 512)
    assert code == 0
    assert [f"{number}: decoding" in out for number in range(1, 6)] == [True] * 5
    assert "1  8" in out
    text = best.read_text()
    assert "# the algorithm" in text
    assert "# set by slurmrl search" in text
    _, printed, _ = run(capsys, config, "--gpus", 8, "--json", "--prompt-tokens", 256)
    found = json.loads(printed)
    assert found["mean_response_tokens"] == 512, "half of the limit"
    assert load(best).config.actor.backend == found["answers"][0]["backends"]["actor"]
    step = predict_step(load(best), MEAN)
    assert step is not None
    assert step.total == pytest.approx(found["answers"][0]["seconds"])


def test_given_configuration_that_does_not_fit_is_reported(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = (*GRPO, "actor.gradient_checkpointing=full")
    _, out, _ = run(capsys, config, "--gpus", 8, "actor.backend=fsdp:d8", *small)
    assert "the given configuration: " in out
    assert "but it does not fit into GPU memory" not in out
    _, out, _ = run(capsys, config, "--gpus", 8)
    assert "s, but it does not fit into GPU memory" in out


def test_written_file_keeps_overrides_and_comments(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = TEXT.replace("fsdp:d4\n", "fsdp:d4  # two nodes\n  # about the weights\n")
    config.write_text(text)
    best, given = config.with_name("best.yaml"), GRPO
    code, _, _ = run(capsys, config, *given, "--gpus", 8, "--write", best)
    assert code == 0
    lines = [" ".join(line.split()) for line in best.read_text().splitlines()]
    assert "backend: fsdp:d8 # two nodes; set by slurmrl search" in lines
    assert "# about the weights" in lines
    assert "name: grpo # the algorithm; set on the command line" in lines
    assert load(best).config.algorithm == load(config, *given).config.algorithm


def test_file_that_would_load_differently_is_not_written(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path of the command line is relative to the current folder."""
    best = config.with_name("best.yaml")
    code, _, error = run(capsys, config, "dataset.path=here.jsonl", "--gpus", 8, "--write", best)
    assert code == 2
    assert "write the overrides into CONFIG first" in error
    assert list(config.parent.glob("*best*")) == []
    assert list(config.parent.glob(".ppo*")) == []


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [
        ((8, 32, 8), (8, 16, 24, 32)),
        ((5, 16, 8), (5, 6, 7, 8, 16)),
        ((10, 200, 8), (16, 32, 64, 128, 200)),
        ((1, 128, 6), (1, 2, 4, 6, 12, 24, 48, 96, 126)),
        ((3, 40, 1), (3, 6, 12, 24, 40)),
    ],
)
def test_gpu_counts_of_a_range_fill_whole_hosts(
    limits: tuple[int, int, int], sizes: tuple[int, ...]
) -> None:
    assert _sizes(*limits) == sizes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", "8..4"), "'8..4' is not allowed: write a number or a range"),
        (("--gpus", "8", "--nodes", "1"), "exclude each other"),
        (("--engines", "vlm"), "no engine 'vlm'; did you mean 'vllm'"),
        (("--write", "/elsewhere.yaml"), "must be in the folder of"),
        (("--gpus", "8", "cluster.gpu_memory=8G"), "fits: use more GPUs or a range of them"),
        (("--gpus", "1", "cluster.gpu_memory=8G"), "actor on 1 GPU needs at least"),
        (("--gpus", "8", "cluster.gpu_memory=26G"), "the models together need more memory"),
        (("--gpus", "7", "actor.implementation=hf"), "with 7 GPUs: no layout of actor on 7 GPUs"),
        (("--engines", ","), "--engines names no engine; allowed: fsdp"),
        (("--gpu-hours", "0.001"), "or a larger --gpu-hours"),
        (("--gpu-hours", "0.001"), "a step needs more GPU hours than allowed, or all models more"),
        (("--gpu-hours", "nan"), "nan is not allowed; expected a finite number"),
        (("--prompt-tokens", "nan"), "nan is not allowed; expected a finite number"),
        (("--response-tokens", "inf"), "inf is not allowed; expected a finite number"),
    ],
)
def test_invalid_search_arguments_are_explained(
    config: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, out, error = run(capsys, config, *arguments)
    assert (code, out) == (2, "")
    assert message in error


def test_given_configuration_is_not_overwritten(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = config.read_text()
    code, _, error = run(capsys, config, "--write", str(config))
    assert (code, config.read_text()) == (2, before)
    assert "is CONFIG itself" in error
    code, _, error = run(capsys, config.with_name("missing.yaml"), "--write", str(config))
    assert (code, config.read_text()) == (2, before)
    assert "missing.yaml" in error


def test_model_without_config_json_is_named(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    before, _, rest = TEXT.partition("  architecture:")
    rest = rest.partition("rollout:")[2]
    config.write_text(f"{before}  path: {tmp_path}/empty\nrollout:{rest}")
    code, _, error = run(capsys, config)
    assert code == 2
    assert "seconds of a step cannot be predicted" in error
    assert "actor.path" in error
    assert "config.json cannot be used" in error


def test_allocation_string_for_all_roles_is_rejected(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(TEXT.replace("  backend: fsdp:d4\n", "") + "allocation_mode: fsdp:d4\n")
    code, _, error = run(capsys, config)
    assert code == 2
    assert "replace allocation_mode by <role>.backend" in error


def test_missing_gpu_type_is_assumed(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(TEXT.replace("cluster: {slurm: {gpu_type: h100}}", ""))
    best = config.with_name("best.yaml")
    code, _, error = run(capsys, config, "--gpus", 8, "--write", best)
    assert code == 0
    assert "assumed: cluster.slurm.gpu_type=h100" in error
    assert "gpu_type" not in best.read_text()


WITHOUT_LIMIT = TEXT.replace(", max_prompt_tokens: 512", "")


def test_longest_row_limits_prompts_if_the_configuration_does_not(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer has the limit as a setting, because it fits into memory only with it."""
    config.write_text(WITHOUT_LIMIT)
    row = json.dumps({"prompt": "7 + 5 =", "answer": "12"})
    config.with_name("train.jsonl").write_text(f"{row}\n")
    best = config.with_name("best.yaml")
    code, out, error = run(capsys, config, "--gpus", 8, "--write", best)
    assert code == 0
    found = load(best).config.dataset.max_prompt_tokens
    assert found is not None
    assert len(row) <= found < 100
    assert f"  dataset.max_prompt_tokens={found}\n" in out
    assert f"mean lengths: prompts {found / 2:g} tokens" in out
    assert f"assumed: dataset.max_prompt_tokens={found} (no row of the data is longer)" in error
    assert run(capsys, config, "dataset.chat_template=true", "--gpus", 8, "--write", best)[0] == 0
    with_template = load(best).config.dataset.max_prompt_tokens
    assert with_template is not None
    assert with_template > found + 1000, "a template may have a long system prompt"


def test_lengths_of_the_model_are_assumed_only_with_a_note(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(WITHOUT_LIMIT)
    code, out, error = run(capsys, config, "--gpus", 8)
    assert code == 0
    assert "dataset.max_prompt_tokens" not in out
    assumed = f"{8192 - 1024} (the maximum for this model)"
    assert f"assumed: dataset.max_prompt_tokens={assumed}" in error
    code, _, error = run(capsys, config, "--gpus", 8, "cluster.gpu_memory=24G")
    assert code == 2
    assert "set dataset.max_prompt_tokens (without it, 8192 tokens are assumed)" in error


def test_unknown_model_is_named_if_no_setting_limits_the_lengths(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, _, rest = WITHOUT_LIMIT.partition("  architecture:")
    config.write_text(f"{before}  path: trial:earlier/1\nrollout:{rest.partition('rollout:')[2]}")
    code, _, error = run(capsys, config)
    assert code == 2
    assert "neither dataset.max_prompt_tokens nor the model limits the lengths" in error
    assert "actor.path: 'trial:earlier/1' has no export yet" in error

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from slurmrl.desk import trial_checks as checks
from slurmrl.plan import build
from slurmrl.scheduler.parse import HostRow
from tests.fake_runs import write_config
from tests.unit.cli.conftest import Command, Output

SVG = "{http://www.w3.org/2000/svg}"


def test_plan_explains_one_allocation_string_as_json(command: Command) -> None:
    found = command.json("plan", "megatron:d2p2t4e4")
    expected = {"backend": "megatron", "world_size": 16, "dp": 2, "tp": 4, "pp": 2, "cp": 1}
    expected |= {"ep": 4, "etp": 1, "edp": 2}
    assert {name: found[name] for name in expected} == expected


def test_plan_shows_attention_and_ffn_sizes_of_a_hybrid(command: Command) -> None:
    found = command.json("plan", "megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)")
    assert found["attn"] == {"dp": 4, "pp": 2, "tp": 2, "cp": 2, "world_size": 32}
    assert found["ffn"] == {"dp": 2, "pp": 2, "tp": 4, "ep": 2, "world_size": 32}
    assert (found["etp"], found["edp"]) == (4, 2)
    out = command("plan", "megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)").out
    assert "ffn   2   2   4   -   2   32" in out


def test_plan_explains_all_components(command: Command) -> None:
    found = command.json("plan", "sglang:d4t2+fsdp:d4")
    assert found["world_size"] == 12
    assert [(one["backend"], one["first_rank"]) for one in found["components"]] == [
        ("sglang", 0),
        ("fsdp", 8),
    ]


@pytest.mark.parametrize("text", ["vllm:d2p2", "vllm:d2t1p2+fsdp:d4"])
def test_plan_says_that_no_engine_runs_a_layout(command: Command, text: str) -> None:
    out = command("plan", text, code=2).out
    assert "the vllm engine of this version does not split 'p'; allowed: d, t" in out
    assert len(command.json("plan", text, code=2)["missing"]) == 1


def test_plan_explains_a_legacy_allocation_string(command: Command) -> None:
    """The command prints the current settings. Roles may share GPUs, so it prints no sum."""
    found = command.json("plan", "sglang.d2t2p1+d1t4p1")
    assert [(one["name"], one["backend"], one["dp"], one["tp"]) for one in found["components"]] == [
        ("rollout", "sglang", 2, 2),
        ("actor", "fsdp", 1, 4),
    ]
    out = command("plan", "actor_gen:d4m2p1,*:d2m2p2").out
    assert out.endswith(
        "write instead:\n  actor.backend: megatron:d2t2p2\n  rollout.backend: native:d4t2\n"
    )


def test_plan_prints_and_draws_ranks_of_an_allocation_string(
    tmp_path: Path, command: Command
) -> None:
    path = tmp_path / "a.svg"
    string = "megatron[actor]:p2t2|fsdp[ref]:d4+sglang[rollout]:d2t4"
    assert "is a directory" in command("plan", string, "--svg", str(tmp_path), code=2).err
    out = command("plan", string, "--svg", str(path), "--table").out
    shown = [" ".join(line.split()) for line in out.splitlines()]
    assert "0 actor p0 t0 p0 t1 p1 t0 p1 t1 - - - -" in shown
    assert "ref d0 d1 d2 d3 - - - -" in shown
    assert "rollout - - - - d0 t0 d0 t1 d0 t2 d0 t3" in shown
    assert "1 rollout d1 t0 d1 t1 d1 t2 d1 t3" in [line[:33] for line in shown]
    drawn = [one.text for one in ElementTree.fromstring(path.read_text()).iter(f"{SVG}text")]
    assert {"p1 t1", "d1 t3", "host 1", "sglang[rollout]:d2t4: 8 ranks"} <= set(drawn)


@pytest.mark.parametrize("text", ["megatron:d2e4", "fsdp:d2p2", "sglang.d2+dx", "fsdp:d0"])
def test_plan_of_an_invalid_string_exits_with_2(text: str, command: Command) -> None:
    code, out, err = command("plan", text, "--json", code=None)
    assert code == json.loads(out)["exit_code"] == 2
    assert "at character" in err
    assert "^" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fsdp:d2", "--moves"), "are not allowed with an allocation"),
        (("fsdp:d2", "trial=2"), "are not allowed with an allocation"),
        (("fsdp:d2", "--json", "--table"), "exclude each other"),
        (("none.yaml",), "cannot be read"),
    ],
)
def test_wrong_plan_usage_exits_with_2(
    arguments: tuple[str, ...], message: str, command: Command
) -> None:
    assert message in command("plan", *arguments, code=2).err


ARCHITECTURE = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


def moved(command: Command, folder: Path, *arguments: str, **architecture: object) -> Output:
    """Plan PPO of an architecture with moves, which lacks a tokenizer."""
    folder.joinpath("ppo.yaml").write_text(
        "experiment: add\ntotal_steps: 1\nalgorithm: {name: ppo, batch_size: 8}\n"
        "dataset: {type: prompt, path: data.jsonl, max_prompt_tokens: 8}\n"
        "rollout: {max_new_tokens: 8}\nreward: {name: exact_match}\n"
        f"actor: {{architecture: {json.dumps({**ARCHITECTURE, **architecture})}}}\n"
    )
    padding = "actor.model.make_vocab_size_divisible_by=1"
    more = (padding, "--moves", "--scheduler", "slurm")
    return command("plan", str(folder / "ppo.yaml"), *arguments, *more, code=2)


def test_planned_moves_count_each_missing_byte_once(tmp_path: Path, command: Command) -> None:
    """Every rank receives exactly the elements that it lacks. Links and ranks count the
    same bytes.
    """
    layouts = ("actor.backend=megatron:t2p2", "rollout.backend=native:d4", "rollout.gpus=0-3")
    hosts = ("cluster.workers_per_host=2", "transfer.staging_mib=1")
    [move] = json.loads(moved(command, tmp_path, *layouts, *hosts, "--json").out)["moves"]
    assert (move["source"], move["target"]) == ("actor", "rollout")
    assert move["calls"] == ["actor_gen"]
    weights = 2 * (2 * 128 * 64 + 4 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64)  # bfloat16
    assert move["bytes"]["same_rank"] + move["received_bytes"] == 4 * weights
    assert [r["received_bytes"] for r in move["ranks"]] == [
        r["lacking_bytes"] for r in move["ranks"]
    ]
    assert sum(r["sent_bytes"] for r in move["ranks"]) == move["received_bytes"]
    assert sum(link["bytes"] for link in move["links"]) == move["received_bytes"]
    across = [n["bytes"] for n in move["links"] if (n["sender"] < 2) != (n["receiver"] < 2)]
    assert sum(across) == move["bytes"]["across_hosts"] > 0
    assert 0 < move["peak_extra_bytes"] <= 1 << 20 == move["staging_limit_bytes"]
    assert move["messages"] >= len(move["links"])
    out = moved(command, tmp_path, *layouts, *hosts, "--svg", str(tmp_path / "plan.svg")).out
    assert "move actor -> rollout, before actor_gen:" in out
    assert "received, 1.0000 times the lower bound of" in out


def test_plan_shows_only_the_busiest_of_many_ranks(tmp_path: Path, command: Command) -> None:
    layouts = ("actor.backend=fsdp:d32", "rollout.backend=native:d32", "rollout.gpus=0-31")
    out = moved(command, tmp_path, *layouts, "algorithm.batch_size=128").out
    assert "16 less busy ranks are left out; --json lists them" in out


def test_plan_reports_that_there_are_no_moves(tmp_path: Path, command: Command) -> None:
    shown = moved(command, tmp_path).out
    assert "moves: none, because every call uses the layout of its model" in shown


def test_plan_rejects_moves_of_a_transformers_model(tmp_path: Path, command: Command) -> None:
    overrides = ("rollout.backend=native:d1", "rollout.gpus=0", "actor.implementation=hf")
    said = moved(command, tmp_path, *overrides)
    assert said.out == ""
    assert "it is a model of transformers" in said.err


def test_plan_pictures_are_svg(tmp_path: Path, command: Command) -> None:
    config, path = str(write_config(tmp_path)), tmp_path / "p.svg"
    big = "actor.backend=fsdp:d8"
    assert command("plan", config, big, "--svg", str(path), "--scheduler", "slurm").out == ""
    texts = [one.text for one in ElementTree.fromstring(path.read_text()).iter(f"{SVG}text")]
    assert {f"d{rank}" for rank in range(8)} <= set(texts)
    assert any(str(line).startswith("fullest ") for line in texts), "the memory"
    assert "prefers-color-scheme: dark" in path.read_text()


def test_large_picture_leaves_out_hosts(tmp_path: Path, command: Command) -> None:
    config, path = str(write_config(tmp_path)), tmp_path / "p.svg"
    command("plan", config, "actor.backend=fsdp:d512", "algorithm.batch_size=512",
        "--scheduler", "slurm", "--svg", str(path), code=None)  # fmt: skip
    texts = [one.text for one in ElementTree.fromstring(path.read_text()).iter(f"{SVG}text")]
    assert "… 32 more hosts" in texts
    assert {"host 30", "host 63"} <= set(texts)
    assert "host 31" not in texts


def test_graph_is_shown_as_text_json_and_svg(tmp_path: Path, command: Command) -> None:
    config, path = str(write_config(tmp_path)), tmp_path / "g.svg"
    said = command("plan", config, "--graph")
    assert said.err == ""
    assert "actor_train: train_step of actor\n  <- input_ids (dataset)" in said.out
    found = command.json("plan", config, "--graph", "--svg", str(path))
    assert found["edges"] == [
        {"from": "dataset", "to": "actor_train", "keys": ["input_ids", "prompt_mask"]}
    ]
    texts = [one.text for one in ElementTree.fromstring(path.read_text()).iter(f"{SVG}text")]
    assert {"dataset", "actor_train", "train_step of actor"} <= set(texts)


def test_evaluation_graph_needs_an_evaluation(tmp_path: Path, command: Command) -> None:
    config = str(write_config(tmp_path))
    assert "has no evaluation section" in command("plan", config, "--evaluation", code=2).err
    data = f"evaluation.dataset={{type: prompt, path: {tmp_path / 'data.jsonl'}}}"
    said = command("plan", config, "--evaluation", data, "reward.name=exact_match")
    assert "reward_inf" in said.out
    assert "never read" not in said.err, "no cause for a warning"


def test_request_beyond_the_cluster_is_rejected_before_submission(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "ask_hosts", lambda config: {"trainer": [HostRow("n1", "idle", 1)]})
    monkeypatch.setattr(checks, "torch_build", lambda: None)  # else one for CPUs is refused
    config = str(write_config(tmp_path))
    arguments = ("submit", config, "--dry-run", "--scheduler", "slurm")
    command(*arguments, "--no-check")
    assert (
        "the trainer group needs 1 host with 2 GPUs, but the cluster has 0"
        in command(*arguments, "--no-check", "actor.backend=fsdp:d2", code=2).err
    )
    out = command("plan", *arguments[1:2], "actor.backend=fsdp:d2", *arguments[3:], code=2).out
    assert "needs 1 host with 2 GPUs" in out


def test_plan_exits_with_2_on_problems(tmp_path: Path, command: Command) -> None:
    config = str(write_config(tmp_path))
    words = ("plan", config, "--scheduler", "local")
    assert "to fix before submission" not in command(*words).out
    assert "to fix before submission" in command(*words, "actor.tokenizer=none", code=2).out


@pytest.mark.parametrize(("gpus", "column"), [(0, "WORKER 0"), (1, "GPU 0")])
def test_plan_shows_gpu_places_only_for_workers_with_gpus(
    tmp_path: Path, command: Command, gpus: int, column: str
) -> None:
    more = (f"cluster.gpus_per_worker={gpus}", "--scheduler", "slurm")
    lines = command("plan", str(write_config(tmp_path)), *more, code=None).lines
    assert [line.split("  ")[-1] for line in lines if "HOST  MODEL" in line] == [column]


def test_plan_reports_a_missing_module(tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "proj"
    folder.mkdir()
    evaluation = "{dataset: {type: prompt, path: data.jsonl}}"
    more = (f"evaluation={evaluation}", "reward.name=no_such_judge:score", "--scheduler", "local")
    missing = command.json("plan", str(write_config(folder)), *more, code=2)["missing"]
    assert any("module 'no_such_judge' was not found" in line for line in missing)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def other(): ...\n", "judges.py does not define 'score'"),
        ("def score(:\n", "judges.py is not valid Python: "),
        ("if True:\n    from os.path import join as score\n", ""),
        ("def __getattr__(name): ...\n", ""),
        ("from os.path import *\n", ""),
        ("score: object\nscore = r'\\d'; '\\d'\n", ""),
    ],
)
def test_plan_reports_a_function_that_its_file_lacks(
    tmp_path: Path, command: Command, text: str, problem: str
) -> None:
    config = write_config(tmp_path)
    (tmp_path / "judges.py").write_text(text)
    evaluation = "{dataset: {type: prompt, path: data.jsonl}}"
    more = (
        f"evaluation={evaluation}",
        f"reward.name={tmp_path}/judges.py:score",
        "--scheduler",
        "local",
    )
    code, out, _ = command("plan", str(config), *more, "--json", code=None)
    missing = [line for line in json.loads(out)["missing"] if "judges" in line]
    assert len(missing) == bool(problem)
    assert all(code == 2 and problem in line for line in missing)


def test_plan_finds_function_in_module_with_the_name_of_its_package(
    tmp_path: Path, command: Command
) -> None:
    config = write_config(tmp_path)
    package = tmp_path / "judges"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "judges.py").write_text("def score(): ...\n")
    evaluation = "{dataset: {type: prompt, path: data.jsonl}}"
    more = (f"evaluation={evaluation}", "reward.name=judges.judges:score", "--scheduler", "local")
    missing = command.json("plan", str(config), *more, code=None)["missing"]
    assert [line for line in missing if "judges" in line] == []


@pytest.mark.parametrize("scheduler", ["slurm", "local"])
def test_plan_rejects_megatron_on_cpus(tmp_path: Path, command: Command, scheduler: str) -> None:
    config = str(write_config(tmp_path))
    on_cpus = ("actor.backend=megatron:d1", "cluster.gpus_per_worker=0")
    more = (*on_cpus, "--scheduler", scheduler)
    out = command("plan", config, *more, code=2).out
    assert "needs a GPU for each worker, and cluster.gpus_per_worker is 0" in out
    assert (
        "needs a GPU for each worker"
        in command("submit", config, *more, "--dry-run", "--no-check", code=2).err
    )


HEADS = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ({"head_dim": 16}, "needs attention heads of at least 32 dimensions, and the actor's have"),
        ({"head_dim": 32}, ""),
        ({"model_type": "gemma3_text", "hidden_size": 64, "num_attention_heads": 4}, "have 16 ("),
        (
            {"model_type": "qwen3_moe", "head_dim": 64, "num_experts": 4},
            "cannot load new weights of a model with experts from files",
        ),
    ],
)
def test_plan_rejects_models_that_vllm_cannot_serve_on_cpus(
    tmp_path: Path, command: Command, architecture: dict[str, Any], reason: str
) -> None:
    config = str(write_config(tmp_path))
    served = ("rollout.backend=vllm:d1", "rollout.gpus=0", "rollout.python=/bin/sh")
    full = {"model_type": "qwen3", "num_key_value_heads": 2, **architecture}
    model = ("actor.implementation=hf", f"actor.architecture={json.dumps(HEADS | full)}")
    on_cpus = (*served, *model, "cluster.gpus_per_worker=0", "--scheduler", "local")
    out = command("plan", config, *on_cpus, code=None).out
    assert ("'vllm:d1' is not allowed: vLLM on CPUs" in out) == bool(reason)
    assert reason in out
    gpus = (*served, *model, "cluster.gpus_per_worker=1", "--scheduler", "local")
    assert "vLLM on CPUs" not in command("plan", config, *gpus, code=None).out

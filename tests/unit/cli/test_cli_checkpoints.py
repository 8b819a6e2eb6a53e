"""``slurmrl checkpoints`` and ``slurmrl export`` on trials that run and that have ended."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slurmrl.algorithms.preference_schema import REWARD_MODEL_INTERFACE
from slurmrl.cli.saved_models import size
from slurmrl.config.load import dump, load_resolved
from slurmrl.errors import DamagedCheckpointError
from slurmrl.fsio.calls import SystemCalls
from slurmrl.plan.build import make_plan
from slurmrl.plan.estimates.shape import stop_tokens
from slurmrl.plan.settings import load_settings
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import Commit, begin, fold
from slurmrl.tensors.checkpoint import manifest as manifest_module
from slurmrl.tensors.checkpoint.manifest import write_manifest
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint, RoleSnapshot, ShardHeader
from slurmrl.tensors.checkpoint.tensors import TensorEntry
from slurmrl.tensors.layout import Box, Layout, Shard, TensorSpec
from slurmrl.workers.master.exporting import export_actor, pin_actor
from tests.fake_runs import FakeRun, write_config
from tests.unit.cli.conftest import Command, Output

SHAPES = {"model.norm.weight": (4,), "lm_head.weight": (3, 4)}


FILE = "actor.0.safetensors"
ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 64,
}


class Trial:
    def __init__(self, command: Command, folder: Path, *overrides: str) -> None:
        self.command = command
        folder.mkdir(exist_ok=True)
        self.root = folder / "runs"
        run = FakeRun(self.root)
        self.paths = run.paths
        overrides = ("checkpoint.keep_every_steps=4", *overrides)
        settings = load_settings(write_config(folder), overrides)
        (folder / "tokenizer.json").write_text("{}")
        self.paths.config.write_text(dump(settings.config))
        self.paths.plan.write_text(make_plan(settings, scheduler="local").to_json())
        self.writer = begin(History(self.paths.history), {})

    def commit(
        self, step: int, *, value: float | None = None, role: str = "actor", **state: Any
    ) -> None:
        """Commit weights of ``value`` (default: the step)."""
        filled = step if value is None else value
        directory = self.paths.checkpoint(step, 1)
        directory.mkdir()
        tensors = {name: TensorSpec(shape, "float32") for name, shape in SHAPES.items()}
        pieces = tuple(Shard.contiguous(n, Box.whole(t.shape)) for n, t in tensors.items())
        entries = tuple(
            TensorEntry(name, spec, lambda s=spec: np.full(s.shape, filled, dtype="<f4"))
            for name, spec in tensors.items()
        )
        layout = Layout.of(tensors, [pieces])
        saved = RoleSnapshot(ShardHeader(role, 0, 1, step), entries, layout).write(directory)
        write_manifest(directory, step=step, files=saved, state={"step": step, **state})
        self.writer.append(Kind.COMMIT, {"step": step, "directory": directory.name})

    def commits(self, *steps: int) -> None:
        for step in steps:
            self.commit(step)

    def delete(self, step: int, **more: Any) -> None:
        directory = self.paths.checkpoint(step, 1)
        self.writer.append(Kind.DELETE, {"step": step, "directory": directory.name, **more})
        shutil.rmtree(directory)

    def run(self, name: str, *words: str, code: int = 0) -> Output:
        return self.command(name, "add/1", *words, "--root", str(self.root), code=code)

    def rows(self, *words: str) -> list[dict[str, Any]]:
        """Return the rows of the table of checkpoints."""
        rows: list[dict[str, Any]] = json.loads(self.run("checkpoints", "--json", *words).out)
        return rows

    def export(self, *words: str) -> Path:
        return Path(self.run("export", *words).out.strip())

    def rejects_export(self, *words: str, code: int = 2) -> str:
        """Return the message."""
        return self.run("export", *words, code=code).err

    @property
    def newest(self) -> Commit:
        return fold(History(self.paths.history).read()).commits[-1]

    def export_at_end(self) -> Path:
        """Export like the end of a run."""
        return export_actor(self.paths, load_resolved(self.paths.config), self.newest).folder


@pytest.fixture
def trial(command: Command, tmp_path: Path) -> Trial:
    return Trial(command, tmp_path)


def test_checkpoints_and_export_report_that_no_checkpoint_exists(trial: Trial) -> None:
    assert trial.run("checkpoints").out == "no checkpoints yet\n"
    assert "add/1 has no checkpoint yet" in trial.rejects_export()


def test_table_gives_the_reason_for_keeping_each_checkpoint(trial: Trial) -> None:
    trial.commits(4, 6, 8)
    trial.writer.append(Kind.EXPORT, {"step": 8, "directory": "step-00000008"})
    head, *lines = trial.run("checkpoints").lines
    assert head.split("  ")[0] == "STEP"
    assert [line.split()[0] for line in lines] == ["4", "6", "8"]
    assert [line.split("  ")[-1].strip() for line in lines] == [
        *["verified"] * 2,
        "verified, exported",
    ]
    assert " last, every " in lines[2]
    rows = trial.rows("--no-verify")
    assert [row["kept_by"] for row in rows] == [["every"], ["last"], ["last", "every"]]
    assert [row["exported"] for row in rows] == [False, False, True]
    assert [row["problem"] for row in rows] == [None] * 3
    files = trial.paths.checkpoint(8, 1)
    names = ("actor.0.safetensors", "actor.layout.json", "state.json")
    total = sum((files / name).stat().st_size for name in names)
    assert (rows[2]["files"], rows[2]["bytes"]) == (3, total)


def test_damage_is_reported_and_exits_with_1(trial: Trial) -> None:
    trial.commits(2, 4)
    path = trial.paths.checkpoint(4, 1) / "actor.0.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert "sizes match" in trial.run("checkpoints", "--no-verify").out
    out = trial.run("checkpoints", code=1).out
    assert "actor.0.safetensors has another checksum" in out
    path.unlink()
    assert "actor.0.safetensors is missing" in trial.run("checkpoints", "--no-verify", code=1).out


def test_unreadable_checkpoint_is_not_called_damaged(trial: Trial) -> None:
    trial.commits(2, 4)
    directory = trial.paths.checkpoint(4, 1)
    directory.rename(trial.paths.run / "away")
    directory.mkdir()
    lines = trial.run("checkpoints", code=1).lines[1:]
    assert [line.split()[-1] for line in lines[:2]] == ["verified", "unreadable"]
    assert "cannot read" in lines[2]
    assert "cannot read" in trial.rejects_export(code=3)
    trial.delete(4)
    trial.export()


def test_quarantined_checkpoint_is_shown_but_not_counted(trial: Trial) -> None:
    trial.commits(2, 4)
    trial.delete(4, reason="actor.0.safetensors is missing")
    trial.paths.damaged_checkpoint("step-00000004.1").mkdir()
    out = trial.run("checkpoints").out
    assert "damaged, set aside" in out
    assert "step 4: actor.0.safetensors is missing" in out


def test_commit_deleted_during_the_listing_is_left_out(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slurmrl.watch import checkpoints as module

    trial.commits(2, 4)
    real = module.read_manifest

    def slow(directory: Path) -> Any:
        if directory.name == "step-00000002.1":
            trial.delete(2)
        return real(directory)

    monkeypatch.setattr(module, "read_manifest", slow)
    assert [row["step"] for row in trial.rows()] == [4]


def test_export_takes_newest_or_given_step_and_an_output_directory(
    trial: Trial, tmp_path: Path
) -> None:
    trial.commits(2, 4)
    folder = trial.export()
    assert folder == trial.paths.export(4)
    trial.writer.append(Kind.FINISHED, {"step": 4, "reason": "total_steps"})
    out = tmp_path / "some" / "where"
    trial.export("--step", "2", "--out", str(out))
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    first, last = ((path / "model.safetensors").read_bytes() for path in (out, folder))
    assert len(first) == len(last)
    assert first != last


def test_leftovers_of_a_killed_export_are_removed_a_day_later(trial: Trial) -> None:
    trial.commit(2)
    old, new = (trial.paths.exports / f".tmp.{name}" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"x")
    os.utime(old, times=(0, 0))
    trial.export()
    assert sorted(trial.paths.exports.iterdir()) == [new, trial.paths.export(2)]


def test_export_is_rejected_for_a_trial_without_training(command: Command, tmp_path: Path) -> None:
    evaluate = ("algorithm={name: evaluate, measure: likelihood, batch_size: 4}",)
    trial = Trial(command, tmp_path / "evaluate", *evaluate, "total_steps=null")
    assert "trains no model: there is nothing to export" in trial.rejects_export()


def test_reference_that_averages_the_actor_is_exported(command: Command, tmp_path: Path) -> None:
    """Checkpoints contain the reference like a trained role, and the message names it."""
    averaged = ("algorithm={name: grpo, batch_size: 4}", "dataset.type=prompt", "ref.ema=0.1")
    trial = Trial(command, tmp_path, *averaged, "reward.name=exact_match")
    trial.commit(2, role="ref")
    folder = trial.export("--role", "ref")
    assert folder == trial.paths.export(2, "ref")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "available: actor, ref" in trial.rejects_export("--role", "critic")


def test_export_rejects_unknown_step_role_and_foreign_directory(
    trial: Trial, tmp_path: Path
) -> None:
    trial.commits(2, 4)
    assert "no checkpoint of step 3; available: 2, 4" in trial.rejects_export("--step", "3")
    assert "'critic' is not in the checkpoints; available: actor" in trial.rejects_export(
        "--role", "critic"
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    assert "exists already" in trial.rejects_export("--out", str(tmp_path / "mine"))
    assert (tmp_path / "mine" / "thesis.txt").exists()
    assert not list(trial.paths.exports.iterdir())


class Deleting(RoleCheckpoint):
    """A run that deletes the commit after the export has chosen it and before it reads it."""

    trial: Trial

    def __init__(self, directory: Path, role: str) -> None:
        if directory.name == "step-00000004.1" and directory.exists():
            self.trial.commit(6)
            self.trial.delete(4)
        super().__init__(directory, role)


def test_export_continues_or_fails_if_its_commit_is_deleted(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a requested step, the export takes another commit. A requested step no
    longer exists.
    """
    monkeypatch.setattr(manifest_module, "RoleCheckpoint", Deleting)
    Deleting.trial = trial = Trial(command, tmp_path / "newest")
    trial.commit(4)
    assert trial.export() == trial.paths.export(6)
    Deleting.trial = trial = Trial(command, tmp_path / "step 4")
    trial.commit(4)
    assert "no checkpoint of step 4; available: 6" in trial.rejects_export("--step", "4")


def change(path: Path, *, at: int, length: int = 4) -> None:
    """Change bytes of a file without changing its size."""
    data = bytearray(path.read_bytes())
    at %= len(data)
    data[at : at + length] = bytes(value ^ 0xFF for value in data[at : at + length])
    path.write_bytes(data)


DAMAGES: list[tuple[str, Callable[[Path], Any]]] = [
    ("actor.0.safetensors has another checksum", lambda p: change(p / FILE, at=-4)),
    ("actor.0.safetensors has another checksum", lambda p: change(p / FILE, at=2)),
    ("actor.0.safetensors has 1 bytes", lambda p: (p / FILE).write_bytes(b"x")),
    ("actor.0.safetensors is missing", lambda p: (p / FILE).unlink()),
    ("state.json has another checksum", lambda p: change(p / "state.json", at=-4, length=1)),
    ("manifest.json", lambda p: (p / "manifest.json").unlink()),
]


@pytest.mark.parametrize(("message", "damage"), DAMAGES)
def test_damaged_checkpoint_is_not_exported(
    trial: Trial, tmp_path: Path, message: str, damage: Callable[[Path], Any]
) -> None:
    trial.commits(2, 4)
    damage(trial.paths.checkpoint(4, 1))
    for arguments in ((), ("--step", "4", "--out", str(tmp_path / "new" / "folder"))):
        said = trial.run("export", *arguments, code=1)
        assert said.out == ""
        assert said.err.count("Error: ") == said.err.count("\n") == 1
        assert message in said.err
        assert "choose another checkpoint with --step (available: 2)" in said.err
    assert not (tmp_path / "new").exists()
    assert not list(trial.paths.exports.iterdir())
    with pytest.raises(DamagedCheckpointError):
        trial.export_at_end()
    assert not list(trial.paths.exports.iterdir())
    trial.export("--step", "2")
    trial.delete(2)
    assert "there is no other checkpoint" in trial.rejects_export(code=1)


def test_run_exports_after_io_errors_end(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that the export reports as damaged is permanently set aside, so the damage must
    be certain.
    """
    trial.commit(4)
    real, failures = SystemCalls.open, iter(range(2))

    def failing(self: SystemCalls, path: Path, flags: int, mode: int = 0o600) -> int:
        if path.name == FILE and next(failures, None) is not None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self, path, flags, mode)

    monkeypatch.setattr(SystemCalls, "open", failing)
    assert trial.export_at_end().is_dir()


@pytest.mark.parametrize(
    "interface",
    [REWARD_MODEL_INTERFACE, "slurmrl.algorithms.reward_model.interface:RewardModelInterface"],
)
@pytest.mark.parametrize(
    ("inputs", "rule"),
    [(("input_ids", "prompt_mask"), "turn_end"), (("input_ids",), None)],
)
def test_reward_model_export_states_where_scores_are_read(
    trial: Trial, inputs: tuple[str, ...], rule: str | None, interface: str
) -> None:
    """Trials that slurmrl 1 has planned train at the end of the conversation."""
    trial.commit(4)
    as_reward_model(trial, *inputs, interface=interface)
    for folder in (trial.export_at_end(), pin_actor(trial.paths, 4)):
        assert json.loads((folder / "config.json").read_text()).get("slurmrl_score_at") == rule


@pytest.mark.parametrize("text", [None, "{", '{"models": 1}'])
def test_export_does_not_need_the_plan_file(trial: Trial, tmp_path: Path, text: str | None) -> None:
    trial.commit(4)
    trial.export("--out", str(tmp_path / "with"))
    trial.paths.plan.unlink()
    if text is not None:
        trial.paths.plan.write_text(text)
    trial.export("--out", str(tmp_path / "without"))
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("with", "without")
    ]
    assert files[0] == files[1]


def test_reward_model_export_needs_the_plan_file(trial: Trial) -> None:
    """Only the plan shows at which token an older slurmrl trained its scores."""
    trial.commit(4)
    config = trial.paths.config.read_text()
    config = config.replace("name: sft", "name: reward_model")
    trial.paths.config.write_text(config.replace("type: prompt_answer", "type: preference"))
    trial.paths.plan.unlink()
    assert f"{trial.paths.plan} is missing" in trial.rejects_export(code=3)


def as_reward_model(trial: Trial, *inputs: str, interface: str = REWARD_MODEL_INTERFACE) -> None:
    """Make the plan that of a reward model whose training gets ``inputs``."""
    plan = json.loads(trial.paths.plan.read_text())
    plan["models"]["actor"]["head"] = "value"
    plan["calls"][0] |= {"interface": interface, "inputs": inputs}
    trial.paths.plan.write_text(json.dumps(plan))


def test_export_ignores_damaged_files_of_other_roles(trial: Trial) -> None:
    trial.commit(4)
    directory = trial.paths.checkpoint(4, 1)
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"].append({"name": "critic.0.safetensors", "size": 3, "checksum": "sha256:0"})
    (directory / "manifest.json").write_text(json.dumps(manifest))
    trial.export()


def test_export_keeps_tensor_types_of_the_initial_model(command: Command, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_file(
        {
            "model.norm.weight": torch.ones(4),
            "lm_head.weight": torch.ones(3, 4).bfloat16(),
        },
        source / "model.safetensors",
        {"format": "pt"},
    )
    (source / "config.json").write_text(json.dumps({**ARCHITECTURE, "torch_dtype": "bfloat16"}))
    trial = Trial(command, tmp_path, "actor.architecture=", f"actor.path={source}")
    trial.commit(4)
    sizes = {}
    for dtype in ("", "source", "bfloat16", "float32"):
        out = tmp_path / f"as {dtype}"
        trial.export("--out", str(out), *(["--dtype", dtype] if dtype else []))
        found = load_file(out / "model.safetensors")
        types = {str(value.dtype).removeprefix("torch.") for value in found.values()}
        assert types == ({"float32", "bfloat16"} if dtype in ("", "source") else {dtype})
        assert all((value == 4).all() for value in found.values())
        main = json.loads((out / "config.json").read_text())["dtype"]
        assert main == ("float32" if dtype == "float32" else "bfloat16")
        sizes[dtype] = (out / "model.safetensors").stat().st_size
    assert sizes["bfloat16"] < sizes["source"] == (source / "model.safetensors").stat().st_size
    settings = Trial(command, tmp_path / "other", "checkpoint.export_dtype=bfloat16")
    settings.commit(2)
    settings.export()
    out = settings.paths.export(2)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("trained", "dtype", "exported", "message"),
    [
        (4.0, "", "bfloat16", ""),
        (5.0, "", "bfloat16", "100.0% of the update survives rounding to bfloat16"),
        (4.003, "", "float32", "exported in float32: only 0.0% of the training's update would"),
        (4.003, "source", "bfloat16", "only 0.0% of the training's update survives rounding to"),
        (4.003, "float16", "float16", "100.0% of the update survives rounding to float16"),
    ],
)
def test_export_dtype_preserves_the_update_unless_another_is_given(
    command: Command, tmp_path: Path, trained: float, dtype: str, exported: str, message: str
) -> None:
    """After 4.0, the next value is 4.03125 in bfloat16 and 4.00390625 in float16."""
    source = tmp_path / "source"
    source.mkdir()
    config = {**ARCHITECTURE, "torch_dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(config))
    tensors = {n: torch.full(shape, 4.0, dtype=torch.bfloat16) for n, shape in SHAPES.items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    trial = Trial(command, tmp_path, "actor.architecture=", f"actor.path={source}")
    trial.commit(4, value=trained)
    said = trial.run("export", *(["--dtype", dtype] if dtype else []))
    found = load_file(Path(said.out.strip()) / "model.safetensors")
    assert {str(value.dtype) for value in found.values()} == {f"torch.{exported}"}
    assert message in said.err


@pytest.mark.parametrize(
    ("stops", "stated", "expected"),
    [
        ([2, 7], {"eos_token_id": [2, 7], "top_p": 0.9}, {"eos_token_id": [2, 7], "top_p": 0.9}),
        ([2, 7], {"eos_token_id": 2, "top_p": 0.9}, {"eos_token_id": [2, 7], "top_p": 0.9}),
        ([7], None, {"bos_token_id": 1, "eos_token_id": 7}),
        ([2], None, {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2}),
    ],
)
def test_export_states_the_stop_tokens_of_the_run(
    command: Command, tmp_path: Path, stops: list[int], stated: Any, expected: Any
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({**ARCHITECTURE, "eos_token_id": 2}))
    if stated is not None:
        (source / "generation_config.json").write_text(json.dumps(stated))
    trial = Trial(command, tmp_path, "actor.architecture=", f"actor.path={source}")
    trial.commit(4, stop_token_ids=stops)
    trial.export()
    folder = trial.paths.export(4)
    assert json.loads((folder / "generation_config.json").read_text()) == expected
    # a trial that resumes from it ends completions with the same tokens
    config = load_resolved(trial.paths.config)
    actor = config.actor.model_copy(update={"path": str(folder)})
    follower = config.model_copy(update={"actor": actor})
    assert set(stop_tokens(follower)) == {*stops, 2}


@pytest.mark.parametrize("committed", ["new", "older version", "no template"])
def test_export_has_the_chat_template_that_the_commit_was_trained_with(
    command: Command, tmp_path: Path, committed: str
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("now")
    trial = Trial(command, tmp_path, f"dataset.chat_template={template}")
    states = {"new": {"chat_template": "then"}, "no template": {"chat_template": None}}
    trial.commit(4, **states.get(committed, {}))
    expected = {"new": "then", "older version": "now"}.get(committed)
    if committed != "older version":
        template.unlink()
    trial.export()
    for folder in (trial.paths.export(4), pin_actor(trial.paths, 4)):
        file = folder / "chat_template.jinja"
        assert (file.read_text() if file.exists() else None) == expected


def test_new_model_exports_only_the_stop_token_of_its_tokenizer(trial: Trial) -> None:
    """transformers' default for the family is no token of this tokenizer."""
    trial.commit(4, stop_token_ids=[5])
    trial.export()
    values = json.loads((trial.paths.export(4) / "config.json").read_text())
    assert values["eos_token_id"] == 5


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (320_000, "320 kB"), (84 * 10**12, "84 TB")]
)
def test_sizes_are_printed_in_readable_units(count: int, text: str) -> None:
    assert size(count) == text

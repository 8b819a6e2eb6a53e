"""The plan warns of bfloat16 on processors without bfloat16 instructions."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from slurmrl.cli.main import main
from slurmrl.desk.doctor import State, machine
from slurmrl.plan import precision
from slurmrl.plan.build import make_plan
from slurmrl.plan.settings import load_settings
from tests.fake_runs import write_config

X86 = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu sse avx2 avx512f{}\n\n" * 2
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd sve{}\nCPU part\t: 0xd40\n" * 2
POWER = "processor\t: 0\ncpu\t\t: POWER10, altivec supported\n"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (X86.format("", ""), False),
        (X86.format("", " avx512_bf16"), True),
        (X86.format(" amx_tile amx_bf16", ""), True),
        (X86.format(" bf16x", " avx512_bf16_other"), False),
        (ARM.format("", ""), False),
        (ARM.format(" i8mm bf16", ""), True),
        (POWER, None),
        ("", None),
    ],
)
def test_bfloat16_support_is_read_from_cpuinfo(
    tmp_path: Path, text: str, answer: bool | None
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert precision.computes_bfloat16(tmp_path / "cpuinfo") is answer
    assert precision.computes_bfloat16(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("overrides", "models"),
    [
        (["actor.dtype=bfloat16", "cluster.gpus_per_worker=0"], ["actor"]),
        (["actor.dtype=bfloat16", "cluster.gpus_per_worker=1"], []),
        (["cluster.gpus_per_worker=0"], []),
    ],
)
def test_bfloat16_models_on_cpus_are_listed(
    tmp_path: Path, overrides: list[str], models: list[str]
) -> None:
    settings = load_settings(write_config(tmp_path), overrides, root=tmp_path / "runs")
    plan = make_plan(settings, scheduler="slurm")
    assert precision.bfloat16_models(settings.config, plan, plan.groups) == models


def test_host_without_cpu_information_is_not_called_slow(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    for text in (POWER, X86.format("", " avx512_bf16")):
        file.write_text(text)
        assert precision.slow_bfloat16(["actor"], file) is None
    file.write_text(X86.format("", ""))
    assert precision.slow_bfloat16([], file) is None
    said = precision.slow_bfloat16(["actor", "ref"], file)
    assert said is not None
    assert said.startswith("actor, ref in bfloat16: the processor of ")


def test_plan_doctor_and_worker_name_slow_models(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(precision, "computes_bfloat16", lambda cpuinfo: False)
    config = str(write_config(tmp_path))
    for dtype, count in (("bfloat16", 1), ("float32", 0)):
        main(["plan", config, f"actor.dtype={dtype}", "--scheduler", "local", "--json"])
        warnings = json.loads(capsys.readouterr().out)["warnings"]
        assert sum("actor in bfloat16: the processor of" in one for one in warnings) == count
    (found,) = machine.processor(["actor"])
    assert found.state is State.WARNING
    assert machine.processor([]) == []
    settings = load_settings(Path(config), ["actor.dtype=bfloat16"], root=tmp_path / "runs")
    plan = make_plan(settings, scheduler="local")
    with caplog.at_level(logging.WARNING):
        precision.log_slow_bfloat16(settings.config, plan, plan.trainers)
    assert "up to fifteen times as fast in float32" in caplog.text

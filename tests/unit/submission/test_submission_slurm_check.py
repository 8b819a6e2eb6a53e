"""Slurm's answers before the submission of a trial, by setting."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from slurmrl.desk import slurm_check, trial_checks
from slurmrl.desk.proposal import Proposal, run_paths
from slurmrl.desk.provenance import ProvenanceWriter
from slurmrl.desk.trial_checks import Finding, Weight
from slurmrl.desk.trial_code import OwnCode
from slurmrl.errors import SchedulerError
from slurmrl.plan.build import make_plan
from slurmrl.plan.settings import load_settings
from tests.fake_runs import write_config
from tests.support.scripted_slurm import PickySlurm


def proposed(folder: Path, *overrides: str) -> Proposal:
    path = write_config(folder)
    settings = load_settings(path, overrides, root=folder / "runs", planning=True)
    plan = make_plan(settings, scheduler="slurm")
    recorder = ProvenanceWriter(settings.config, path, OwnCode(), "slurm")
    return Proposal(settings, plan, run_paths(settings), "slurm", recorder)


def asked(folder: Path, client: PickySlurm, *overrides: str) -> list[Finding]:
    proposal = proposed(folder, *overrides)
    return slurm_check.ask_slurm(
        proposal.settings, proposal.request(1, uuid.uuid4().hex, 1), client
    )


@pytest.mark.parametrize(
    ("override", "part", "key", "allowed"),
    [
        ("cluster.slurm.account=labb", "--account=labb", "", "did you mean 'lab'? allowed: lab, p"),
        ("cluster.slurm.qos=none", "--qos", "", "; allowed: normal, quick"),
        ("cluster.slurm.partition=shrt", "--partition", "", "mean 'short'? allowed: main, short"),
        ("cluster.slurm.nodelist=n9", "--nodelist", "", "; allowed: n0, n1"),
        ("cluster.slurm.reservation=x", "--reservation", "", "; this cluster has no reservation"),
        ("cluster.slurm.constraint=fast_nvm", "--constraint", "", "did you mean 'fast_nvme'?"),
        ("cluster.slurm.account=poor", "--account=poor", "", ": Invalid"),
        ("cluster.slurm.constraint=[ib*2|gpu]", "--constraint", "", "; allowed: fast_nvme, ib"),
        ("cluster.slurm.constraint=ib&fast_nvme", "--constraint", "", ": Invalid"),
        ("cluster.slurm.licenses=matlab:9", "--licenses", "", ": Invalid"),
        ("cluster.slurm.nodelist=n1", "--nodelist", "", ": Invalid"),
        ("cluster.slurm.extra_lines=[--frob]", "--frob", "cluster.slurm.extra_lines", ": Invalid"),
        ("cluster.mem_per_worker=9T", "--mem", "cluster.mem_per_worker", ": Invalid"),
        ("cluster.slurm.gpu_type=a100", "--gres", "cluster.slurm.gpu_type", ": Invalid"),
    ],
)
def test_rejected_job_names_setting_value_and_known_names(
    tmp_path: Path, override: str, part: str, key: str, allowed: str
) -> None:
    [found] = asked(tmp_path, PickySlurm({part: "allocation failure: Invalid"}), override)
    setting, _, value = override.partition("=")
    assert (found.weight, found.key) == (Weight.FAILED, key or setting)
    assert "allocation failure: Invalid" in found.message
    assert found.message.startswith("Slurm would reject" if key else f"'{value}': Slurm would")
    assert allowed in found.message
    assert found.message.endswith(": Invalid") or allowed != ": Invalid"


@pytest.mark.parametrize(
    ("overrides", "key", "weight", "message"),
    [
        (
            ("cluster.slurm.partition=short", "cluster.slurm.time=2:00:00"),
            "cluster.slurm.time",
            Weight.FAILED,
            "above the limit of partition short, 1:00:00",
        ),
        (
            ("cluster.slurm.partition=short", "cluster.slurm.time=1-0", "cluster.slurm.qos=normal"),
            "cluster.slurm.time",
            Weight.WARNING,
            "unless QOS normal overrides the limit",
        ),
        (("cluster.slurm.gpu_type=h100",), "cluster.slurm.gpu_type", Weight.FAILED, "a100, 1g.5gb"),
        (("cluster.slurm.qos=nothing",), "cluster.slurm.qos", Weight.WARNING, "normal, quick"),
        (("cluster.slurm.account=labb",), "cluster.slurm.account", Weight.WARNING, "mean 'lab'"),
        (
            ("cluster.slurm.time=60", "cluster.slurm.qos=quick"),
            "cluster.slurm.time",
            Weight.WARNING,
            "above the limit of QOS quick, 00:30:00",
        ),
    ],
)
def test_job_that_sbatch_accepts_is_reported_if_it_would_never_start(
    tmp_path: Path, overrides: tuple[str, ...], key: str, weight: Weight, message: str
) -> None:
    [found] = asked(tmp_path, PickySlurm({}), *overrides)
    assert (found.key, found.weight) == (key, weight)
    assert message in found.message


@pytest.mark.parametrize(
    "override",
    [
        "cluster.slurm.time=UNLIMITED",
        "cluster.slurm.partition=main,short",
        "cluster.slurm.gpu_type=1g.5gb",
        "cluster.slurm.partition=hidden",
        "cluster.slurm.account=poor",
    ],
)
def test_job_that_can_start_has_no_findings(tmp_path: Path, override: str) -> None:
    assert asked(tmp_path, PickySlurm({}), "cluster.slurm.time=90", override) == []


def test_job_is_not_rejected_while_hosts_are_out_of_service(tmp_path: Path) -> None:
    client = PickySlurm({"--gres": "Requested node configuration is not available"})
    client.states = ["idle", "drained"]
    [found] = asked(tmp_path, client)
    assert found.weight is Weight.WARNING
    assert "not start it now" in found.message


def test_controller_without_an_answer_is_a_warning(tmp_path: Path) -> None:
    class Silent(PickySlurm):
        def rejection(self, script: Path) -> str | None:
            raise SchedulerError("sbatch did not answer within 20 s")

    [found] = asked(tmp_path, Silent({}))
    assert found.weight is Weight.WARNING
    assert "did not answer" in found.message


def missing(proposal: Proposal, monkeypatch: pytest.MonkeyPatch, *absent: str) -> list[Finding]:
    monkeypatch.setattr(trial_checks, "_is_here", lambda module: module not in absent)
    return trial_checks.missing_packages(proposal.settings, proposal.plan)


def test_engine_without_its_package_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = "actor.backend=megatron:d1"
    [found] = missing(proposed(tmp_path, backend), monkeypatch, "megatron.core")
    assert (found.weight, found.key) == (Weight.FAILED, "actor.backend")
    assert "pip install megatron-core" in found.message
    setup = proposed(tmp_path, backend, "cluster.slurm.setup=[module load megatron]")
    assert [one.weight for one in missing(setup, monkeypatch, "megatron.core")] == [Weight.WARNING]
    inside = proposed(tmp_path, backend, "cluster.slurm.container=apptainer exec image.sif")
    assert missing(inside, monkeypatch, "megatron.core") == []
    assert missing(proposed(tmp_path, backend), monkeypatch) == []


def test_fp8_without_transformer_engine_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("actor.backend=megatron:d1", "actor.fp8=hybrid", "actor.dtype=bfloat16")
    found = missing(proposed(tmp_path, *settings), monkeypatch, "transformer_engine")
    assert "actor.fp8" in {one.key for one in found}
    assert all("lacks TransformerEngine" in one.message for one in found)

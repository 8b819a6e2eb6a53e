"""The profile of a site: values that `slurmrl init` proposes, and the written file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.load import validate
from slurmrl.config.schema import Profile
from slurmrl.config.source import KeyPath, read
from slurmrl.desk import initial_files
from slurmrl.desk.initial_files import (
    NetworkInterface,
    Question,
    Survey,
    interfaces,
    is_infiniband,
    value_of,
)
from slurmrl.scheduler.parse import Accounts, partitions

SINFO = """\
cpu*|up|2-00:00:00|40|128|257000|(null)
gpu|up|4:00:00|4|64|515000|gpu:a100:8(S:0-1)
mixed|up|infinite|4|64|515000|gpu:a100:8
mixed|up|infinite|4|64|515000|gpu:h100:8
down|down|infinite|4|64|515000|gpu:b200:8
"""


def found(**more: Any) -> Survey:
    values = {
        "cluster": "big (Slurm 24.11)",
        "partitions": partitions(SINFO),
        "accounts": Accounts(("lab", "poor"), "lab"),
        "interfaces": [NetworkInterface("eth0", False, True), NetworkInterface("ib0", True, False)],
    }
    return Survey(**{**values, **more})


def ask(survey: Survey, partition: str | None = None, modules: str = "") -> list[Question]:
    first = list(initial_files.first_questions(survey, "/shared/runs"))
    chosen = first[1].proposal if partition is None else partition
    return [*first, *initial_files.further_questions(survey, chosen, modules)]


def proposals(asked: list[Question]) -> dict[str, str]:
    return {str(one.key[-1]): one.proposal for one in asked}


def answered(asked: list[Question]) -> dict[KeyPath, Any]:
    return {one.key: value_of(one, one.proposal) for one in asked if one.proposal}


def test_site_proposals_follow_cluster_information() -> None:
    assert proposals(ask(found(), modules="cuda/12.4:gcc/13")) == {
        "root": "/shared/runs",
        "partition": "gpu",  # the default one has no GPUs
        "account": "lab",
        "time": "4:00:00",
        "gpu_type": "a100",
        "interface": "ib0",
        "setup": "module load cuda/12.4; module load gcc/13",
    }
    mixed = proposals(ask(found(), "mixed"))
    assert (mixed["gpu_type"], mixed["time"]) == ("", "24:00:00")  # a choice that we cannot make
    assert proposals(ask(found(), "gpu,mixed"))["time"] == "4:00:00"
    cpu = proposals(ask(found(), "cpu"))
    assert (cpu["gpus_per_worker"], cpu["time"]) == ("0", "24:00:00")
    assert "gpu_type" not in cpu
    assert proposals(ask(found(), ""))["gpus_per_worker"] == "0"  # the cluster's default partition


def test_only_the_root_is_proposed_without_slurm() -> None:
    asked = ask(Survey())
    assert {name: one for name, one in proposals(asked).items() if one} == {"root": "/shared/runs"}
    assert "None was found" in asked[1].about


@pytest.mark.parametrize("partition", ["cpu", "gpu", "mixed", "nowhere"])
def test_written_profile_contains_the_answers(partition: str, tmp_path: Path) -> None:
    asked = ask(found(), partition, "cuda/12.4")
    values = answered(asked)
    values[initial_files.PARTITION] = partition
    path = tmp_path / "default.yaml"
    path.write_text(initial_files.render_profile(asked, values, cluster="big"))
    source = read(path)
    made, problems = validate(Profile, source)
    assert problems == []
    assert source.values == initial_files.nested(values)
    assert made is not None
    assert made.cluster.slurm.setup == ("module load cuda/12.4",)
    assert max(map(len, path.read_text().splitlines())) <= 100


def test_profile_may_contain_only_the_root(tmp_path: Path) -> None:
    asked = ask(Survey())
    path = tmp_path / "default.yaml"
    path.write_text(initial_files.render_profile(asked, answered(asked)))
    assert read(path).values == {"root": "/shared/runs"}
    assert "# cluster:\n" in path.read_text()


@pytest.mark.parametrize("text", ["no", "1:30", "007", "a: b", 'say "hi" # x', "[x]", "~", "é"])
def test_every_answer_reads_back_equal(text: str, tmp_path: Path) -> None:
    path, value = tmp_path / "default.yaml", [text, "a, b"]
    asked = [Question(initial_files.SETUP, "Lines.")]
    path.write_text(initial_files.render_profile(asked, {initial_files.SETUP: value}))
    assert read(path).values == initial_files.nested({initial_files.SETUP: value})


@pytest.mark.parametrize(
    ("key", "answer", "message"),
    [
        (("root",), "runs", "must be an absolute path"),
        (("cluster", "slurm", "time"), "4 hours", "must be MINUTES"),
        (("cluster", "gpus_per_worker"), "8", "must be at most 1"),
        (("cluster", "gpus_per_worker"), "x", "must be an integer"),
        (("cluster", "slurm", "time"), "1", "signal_lead_s"),
    ],
)
def test_invalid_answers_are_rejected(key: KeyPath, answer: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        value_of(Question(key, ""), answer)


def test_unknown_partition_gives_a_warning() -> None:
    asked = ask(found())
    assert initial_files.doubt(asked[1], "gpu,mixed", found()) == ""
    assert "no partition 'gpuu'; did you mean 'gpu'" in initial_files.doubt(
        asked[1], "gpuu", found()
    )
    assert initial_files.doubt(asked[1], "gpuu", Survey()) == ""
    assert initial_files.doubt(asked[0], "/nowhere", found()) == ""


def test_network_interfaces_of_this_host_are_listed(tmp_path: Path) -> None:
    assert "lo" not in [one.name for one in interfaces()]
    for name, kind in (("ib0", "32"), ("eth0", "1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "type").write_text(f"{kind}\n")
    names = [name for name in ("ib0", "eth0", "gone") if is_infiniband(tmp_path / name)]
    assert names == ["ib0"]

"""Hardware profiles: the shipped ones, the user's own, and wrong files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmrl.cli.main import main
from slurmrl.config.schema import Cluster, Slurm
from slurmrl.errors import ConfigError, UnreadableInputError, UsageError
from slurmrl.plan.estimates import hardware
from slurmrl.plan.estimates.hardware import (
    FITTED_ERROR,
    UNKNOWN_ERROR,
    Hardware,
    hardware_of,
    shipped,
)

EXAMPLES = Path(__file__).parents[3] / "examples"
OWN = "hardware: h100\nmade: measured by hand\nmeasured: {products: 0.5, bytes_per_s: 2e12}\n"


def cluster(gpu_type: str = "h100", **settings: object) -> Cluster:
    return Cluster(slurm=Slurm(gpu_type=gpu_type)).model_copy(update=settings)


def known(found: Hardware | None) -> Hardware:
    assert found is not None
    return found


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("SLURMRL_PROFILE", raising=False)
    folder = hardware.own_folder()
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("name", hardware.shipped_names())
def test_shipped_profile_gives_each_number_with_its_source(name: str, own_folder: Path) -> None:
    """Only the H100's efficiencies are fitted to measurements. Those of other GPUs are guesses."""
    found = known(hardware_of(cluster(name)))
    assert found == shipped(name)
    assert found.numbers["flops_per_s"][1] == "vendor"
    assert found.numbers["products"][1] == ("fitted" if name == "h100" else "guessed")
    assert found.error == (FITTED_ERROR if name == "h100" else UNKNOWN_ERROR)
    assert found.gpu.float32_flops_per_s < found.gpu.flops_per_s
    assert found.fused.attention > found.efficiency.attention


def test_gpu_is_recognized_from_slurm_gpu_types(own_folder: Path) -> None:
    assert known(hardware_of(cluster("nvidia_h200_141gb_hbm3e"))).name == "h200"
    assert hardware_of(cluster("mi300")) is None
    assert hardware_of(cluster("h100", gpus_per_worker=0)) is None, "ranks without GPUs"


def test_own_profile_replaces_the_shipped_profile(own_folder: Path) -> None:
    (own_folder / "h100.yaml").write_text(OWN)
    found = known(hardware_of(cluster()))
    assert found.efficiency.products == 0.5
    assert found.efficiency.traffic == shipped("h100").efficiency.traffic
    assert "measured by hand" in found.source
    assert "2 numbers measured" in found.source
    assert found.error == UNKNOWN_ERROR
    (own_folder / "h100.yaml").write_text(OWN.replace("0.5", "0.625"))
    assert known(hardware_of(cluster())).efficiency.products == 0.625, "the file was changed"


def test_own_profile_is_ignored_with_profile_none(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_folder / "h100.yaml").write_text(OWN)
    monkeypatch.setenv("SLURMRL_PROFILE", "none")
    assert hardware_of(cluster()) == shipped("h100")


def test_own_profile_under_another_name_is_rejected(own_folder: Path) -> None:
    (own_folder / "a100.yaml").write_text(OWN)
    with pytest.raises(UsageError, match="is a profile of h100: rename the file"):
        hardware_of(cluster("a100"))


def test_own_profile_adds_new_hardware(own_folder: Path) -> None:
    (own_folder / "cpu.yaml").write_text("hardware: cpu\nmeasured: {flops_per_s: 4e10}\n")
    (own_folder / "mi300.yaml").write_text("hardware: mi300\nvendor: {flops_per_s: 1.3e15}\n")
    found = known(hardware_of(Cluster(gpus_per_worker=0)))
    assert found.numbers["flops_per_s"] == (4e10, "measured")
    assert found.numbers["products"][1] == found.numbers["link"][1] == "guessed"
    assert found.gpu.memory_bytes is None, "memory of other hardware is unknown"
    assert known(hardware_of(cluster("mi300"))).gpu.flops_per_s == 1.3e15


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "vendor: {flop_per_s: 1e12}",
            "vendor.flop_per_s: unknown key; did you mean 'flops_per_s'",
        ),
        (
            "measured: {link: -1e9}",
            "measured.link: -1000000000.0 is not allowed: must be greater than 0",
        ),
        ("measured: {link: fast}", "measured.link: 'fast' is not allowed: must be a number"),
        ("measured: {overlap: 1.5}", "measured.overlap: 1.5 is not allowed"),
        ("measured: {flops_per_s: .inf}", "measured.flops_per_s"),
        ("vendor: {link: 1}\nmeasured: {link: 1}", "is also in section vendor"),
        ("like: h101", "'h101' is not one of a10, a100"),
        ("measured: {", "not valid YAML"),
    ],
)
def test_invalid_profile_is_rejected_with_line_and_key(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(f"hardware: h100\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        hardware_of(cluster(hardware=str(path)))
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}:")


def test_missing_or_mismatched_profile_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    with pytest.raises(UnreadableInputError, match="No such file"):
        hardware_of(cluster(hardware=str(path)))
    with pytest.raises(ConfigError, match="is a directory"):
        hardware_of(cluster(hardware=str(tmp_path)))
    path.write_text("")
    with pytest.raises(ConfigError, match="empty"):
        hardware_of(cluster(hardware=str(path)))
    path.write_text("measured: {link: 1e9}\n")
    with pytest.raises(ConfigError, match="hardware: is required"):
        hardware_of(cluster(hardware=str(path)))
    path.write_text("hardware: cpu\n")
    with pytest.raises(UsageError, match=r"is a profile of cpu, but the ranks have GPUs \(h100\)"):
        hardware_of(cluster(hardware=str(path)))


def test_profile_of_another_known_gpu_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("hardware: a100\n")
    with pytest.raises(UsageError, match=r"profile of a100, but cluster\.slurm\.gpu_type is h100"):
        hardware_of(cluster("nvidia_h100_80gb", hardware=str(path)))
    for gpu_type in ("a100_3g.20gb", "ampere"):  # a part of it, and a name that tells nothing
        assert known(hardware_of(cluster(gpu_type, hardware=str(path)))).name == "a100"
    path.write_text("hardware: cluster-1\nlike: a100\n")
    assert known(hardware_of(cluster("h100", hardware=str(path)))).name == "cluster-1"


@pytest.mark.parametrize("name", hardware.shipped_names())
def test_copy_of_any_shipped_profile_is_a_valid_own_profile(tmp_path: Path, name: str) -> None:
    path = tmp_path / "own.yaml"
    for own in (name, "cluster-1"):
        path.write_text(f"hardware: {own}\nlike: {name}\nmeasured: {{links: 0.5}}\n")
        found = known(hardware_of(cluster(name, hardware=str(path))))
        assert found.efficiency.links == 0.5
        assert found.efficiency.products == known(shipped(name)).efficiency.products


def test_plan_predicts_seconds_with_the_profile_and_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cpu.yaml"
    path.write_text("hardware: cpu\nmeasured: {flops_per_s: 4e10, float32_flops_per_s: 5e10}\n")
    call = ["plan", str(EXAMPLES / "sft.yaml"), "--scheduler", "local", "cluster.gpus_per_worker=0"]
    call += ["--root", str(tmp_path)]
    assert main([*call, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert "hardware" not in plain
    assert all(one["seconds"] is None for one in plain["calls"])
    given = f"cluster.hardware={path}"
    assert main([*call, given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "2 numbers measured" in found["hardware"]["source"]
    assert all(one["seconds"] > 0 for one in found["calls"] if one["model"])
    assert main([*call, given]) == 0
    shown = capsys.readouterr().out
    assert f"seconds: formulas and hardware profile cpu ({path})" in shown
    assert "error of the seconds: " in shown
    assert main([*call, f"cluster.hardware={tmp_path / 'no.yaml'}"]) == 2
    assert "cluster.hardware" in capsys.readouterr().err

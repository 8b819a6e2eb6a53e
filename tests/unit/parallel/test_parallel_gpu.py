from __future__ import annotations

import pytest

from slurmrl.errors import EnvironmentFailure
from slurmrl.tensors.parallel.gpu import Device, DeviceKind, assign, parse_visible

UUID = "GPU-5a1b2c3d-0000-1111-2222-333344445555"
OTHER = "GPU-5a1b2c3d-0000-1111-2222-333344446666"
MIG = "MIG-a1b2c3d4-0000-1111-2222-333344445555"
OLD_MIG = "MIG-GPU-a1b2c3d4-0000-1111-2222-333344445555/3/0"


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        ("", []),
        ("NoDevFiles", []),
        ("-1", []),
        ("0", [("0", DeviceKind.INDEX)]),
        ("3, 1", [("3", DeviceKind.INDEX), ("1", DeviceKind.INDEX)]),
        ("0,-1,2", [("0", DeviceKind.INDEX)]),
        (f"{UUID},{OTHER}", [(UUID, DeviceKind.UUID), (OTHER, DeviceKind.UUID)]),
        (MIG, [(MIG, DeviceKind.MIG)]),
        (OLD_MIG, [(OLD_MIG, DeviceKind.MIG)]),
    ],
)
def test_all_forms_of_the_gpu_variable_are_read(
    visible: str, devices: list[tuple[str, DeviceKind]]
) -> None:
    assert parse_visible(visible) == [Device(text, kind) for text, kind in devices]


@pytest.mark.parametrize("visible", ["gpu0", "0,a", "all", "GPU-xyz", "0;1", "MIG-"])
def test_invalid_gpu_variable_is_rejected_with_its_value(visible: str) -> None:
    with pytest.raises(EnvironmentFailure) as caught:
        parse_visible(visible)
    assert repr(visible) in str(caught.value)


def test_duplicate_gpu_is_rejected() -> None:
    with pytest.raises(EnvironmentFailure, match="1 is listed more than once"):
        parse_visible("1,0,1")


@pytest.mark.parametrize(
    ("visible", "workers", "per_worker", "values"),
    [
        ("", 3, 0, ["", "", ""]),
        ("0,1,2,3", 2, 0, ["", ""]),
        ("2,5", 2, 1, ["2", "5"]),
        ("0,1,2,3", 2, 1, ["0", "1"]),
        ("0,1,2,3", 2, 2, ["0,1", "2,3"]),
        (f"{UUID},{OTHER}", 2, 1, [UUID, OTHER]),
        (MIG, 1, 1, [MIG]),
    ],
)
def test_each_worker_gets_its_own_gpus_in_order(
    visible: str, workers: int, per_worker: int, values: list[str]
) -> None:
    assert assign(visible, workers, per_worker) == values


@pytest.mark.parametrize("visible", ["", "0", "NoDevFiles", UUID])
def test_too_few_gpus_are_rejected_with_the_given_value(visible: str) -> None:
    with pytest.raises(EnvironmentFailure, match="need 2 GPUs on this host") as caught:
        assign(visible, 2, 1)
    assert f"CUDA_VISIBLE_DEVICES={visible!r}" in str(caught.value)


def test_mig_slice_serves_only_one_worker() -> None:
    two = f"{MIG},MIG-bbbbbbbb-0000-1111-2222-333344445555"
    assert assign(two, 1, 1) == [MIG]
    with pytest.raises(EnvironmentFailure, match="one worker"):
        assign(two, 2, 1)

from __future__ import annotations

from pathlib import Path

import pytest

from slurmrl.errors import SchedulerError
from slurmrl.scheduler.parse import Accounts, HostKind, Partition, accounts, partitions

RECORDED = Path(__file__).parent / "recorded"

MIXED = """\
cpu|up|2-00:00:00|40|128|257000|(null)
gpu*|up|1-00:00:00|4|64|515000+|gpu:a100:8(S:0-1)
gpu*|up|1-00:00:00|2|64|1031000|gpu:h100:4(S:0),gpu:h100_mig:2(S:1)
old|inact|infinite|0|0|0|(null)
"""


def test_partitions_are_parsed_from_sinfo_output() -> None:
    found = partitions((RECORDED / "sinfo-partitions-22.05.txt").read_text())
    kinds = (HostKind(2, 8, 16000, 2),)
    assert found == [
        Partition("main", True, True, "infinite", kinds),
        Partition("low", False, True, "infinite", kinds),
        Partition("high", False, True, "infinite", kinds),
    ]


def test_partition_with_several_node_kinds_is_parsed() -> None:
    gpu, cpu, old = partitions(MIXED)
    assert (gpu.name, gpu.is_default, gpu.hosts, gpu.most_gpus) == ("gpu", True, 6, 8)
    assert gpu.gpu_types == ("a100", "h100", "h100_mig")
    assert gpu.kinds[0] == HostKind(4, 64, 515000, 8, ("a100",))
    assert (cpu.most_gpus, cpu.gpu_types, cpu.time_limit) == (0, (), "2-00:00:00")
    assert (old.is_up, old.hosts) == (False, 0)
    with pytest.raises(SchedulerError, match="unexpected line"):
        partitions("gpu up")


def test_accounts_are_parsed_from_sacctmgr_output() -> None:
    text = (RECORDED / "sacctmgr-22.05.txt").read_text()
    assert accounts(text) == Accounts(("lab", "poor", "root"), "lab")
    assert accounts("") == Accounts((), "")
    assert accounts("me||a\nme||b\nme||a\n") == Accounts(("a", "b"), "")
    with pytest.raises(SchedulerError, match="unexpected line"):
        accounts("sacctmgr: hello")

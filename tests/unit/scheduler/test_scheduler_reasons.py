"""Explanations of all reasons of pending jobs in Slurm 22.05 to 26.05."""

from __future__ import annotations

import pytest

from slurmrl.scheduler.reasons import REASONS, explain

PLAIN = frozenset(
    """
AccountNotAllowed AccountingPolicy BadConstraints BeginTime BurstBufferOperation
BurstBufferResources BurstBufferStageIn Cleaning Constraints DeadLine Dependency
DependencyNeverSatisfied FedJobLock FrontEndDown InactiveLimit InvalidAccount InvalidQOS
JobArrayTaskLimit JobHeldAdmin JobHeldUser JobHoldMaxRequeue JobLaunchFailure Licenses
MaxMemPerLimit MaxPoweredUpNodes MpiPortsBusy NodeDown NonZeroExitCode NvidiaImexChannels
OutOfMemory PartitionConfig PartitionDown PartitionInactive PartitionNodeLimit PartitionTimeLimit
PowerNotAvail PowerReserved Priority Prolog QOSNotAllowed QOSUsageThreshold RaisedSignal
ReqNodeNotAvail Reservation ReservationDeleted ReservationInvalid Resources SchedDefer SystemFailure
TimeLimit
""".split()  # noqa: SIM905
)
LIMITS = [
    *("AssociationJobLimit", "AssociationResourceLimit", "AssociationTimeLimit"),
    *("QOSJobLimit", "QOSResourceLimit", "QOSTimeLimit", "QOSMaxSubmitJobPerUserLimit"),
    *(f"QOSMin{what}" for what in ("Memory", "Node", "GRES", "License", "BB", "Energy")),
    *("QOSMinCpuNotSatisfied", "QOSMaxWallDurationPerJobLimit", "QOSMaxMemoryPerUser"),
    *(f"{who}Grp{what}" for who in ("Assoc", "QOS") for what in ("GRES", "CpuLimit", "WallLimit")),
    *(f"{who}GrpGRES{m}" for who in ("Assoc", "QOS") for m in ("Minutes", "RunMinutes")),
    *(f"Max{what}PerAccount" for what in ("BB", "Cpu", "GRES", "Node", "Jobs", "SubmitJobs")),
    *("AssocGrpCPURunMinutesLimit", "AssocMaxCpuMinutesPerJobLimit", "AssocMaxGRESPerNode"),
    *(f"Max{what}RunMinsPer{whom}" for what in ("Cpu", "GRES") for whom in ("Account", "User")),
]


@pytest.mark.parametrize("name", [*sorted(PLAIN), *LIMITS])
def test_every_slurm_reason_has_text_and_advice(name: str) -> None:
    words, semicolon, advice = explain(name).partition("; ")
    assert all((words, semicolon, advice))
    assert "Slurm's reason is" not in words


def test_reason_table_has_only_names_known_to_slurm() -> None:
    assert set(REASONS) == PLAIN


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("QOSMaxJobsPerUserLimit", "your limit on jobs that may run at once is reached"),
        ("AssocGrpGRES", "the account's limit on GPUs or other devices is reached"),
        ("QOSGrpNodeLimit", "the QOS's limit on hosts is reached"),
        ("MaxCpuPerAccount", "your account's limit on CPU cores is reached"),
        ("QOSMaxWallDurationPerJobLimit", "it requests more time than the QOS allows one job"),
        ("AssocMaxGRESPerNode", "more GPUs or other devices than the account allows one host"),
        ("AssocGrpCPUMinutesLimit", "budget of CPU cores x minutes over time is used up"),
        ("QOSGrpGRESRunMinutes", "budget of GPUs or other devices x minutes of running jobs"),
        ("MaxCpuRunMinsPerUser", "the QOS's budget of CPU cores x minutes of running jobs"),
        ("QOSMinGRES", "it requests less GPUs or other devices than the QOS requires"),
        ("AssocMaxSubmitJobLimit", "limit on jobs that may wait at once"),
        ("PartitionTimeLimit", "lower cluster.slurm.time"),
    ],
)
def test_limit_reasons_name_owner_and_resource(name: str, expected: str) -> None:
    assert expected in explain(name)


def test_reason_details_and_free_texts_are_parsed() -> None:
    shown = explain("ReqNodeNotAvail, UnavailableNodes:n[1-3]")
    assert "(UnavailableNodes:n[1-3]); see sinfo -R" in shown
    assert explain("RaisedSignal:9(Killed)") == "a signal ended it (9(Killed)); see slurmrl logs"
    for text in (
        "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority",
        "(Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved)",
    ):
        assert "down, drained or reserved" in explain(text)
    assert explain("launch failed requeued held") == explain("JobLaunchFailure")


@pytest.mark.parametrize("text", ["", "None", "N/A", "(null)", "(None)"])
def test_missing_reason_gives_empty_text(text: str) -> None:
    assert explain(text) == ""


def test_unknown_reason_is_quoted() -> None:
    assert explain("SomethingNew") == "Slurm's reason is 'SomethingNew'"

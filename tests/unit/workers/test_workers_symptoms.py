"""Tests of the choice of the event on a host that is reported as the failure."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from slurmrl.errors import ReportedError
from slurmrl.run.reports import Failure, failure_words
from slurmrl.workers.agent.children import Ended, News
from slurmrl.workers.agent.loss_detection import ECHO_GRACE_S, Symptoms

KILLED = -int(signal.SIGKILL)


class FakeChildren:
    world = "trainer"

    def __init__(self) -> None:
        self.quiet: list[int | None] = []

    def silent(self) -> list[int | None]:
        return self.quiet

    def name(self, rank: int | None) -> str:
        return "the master" if rank is None else f"rank {rank} on n1"


class FakeKernel:
    oom = False

    def happened(self) -> bool:
        return self.oom


class Bed:
    def __init__(self) -> None:
        self.now = 100.0
        self.output = ""
        self.children, self.kernel = FakeChildren(), FakeKernel()
        self.symptoms = Symptoms(
            "n1",
            self.children,  # type: ignore[arg-type]
            self.kernel,  # type: ignore[arg-type]
            60.0,
            lambda: self.now,
            output=lambda: self.output,
        )

    def see(self, *failures: Failure, ended: tuple[Ended, ...] = ()) -> None:
        self.symptoms.evaluate(News(failures=list(failures), ended=list(ended)))

    def failure(self, *failures: Failure, ended: tuple[Ended, ...] = ()) -> Failure:
        with pytest.raises(ReportedError) as caught:
            self.see(*failures, ended=ended)
        assert str(caught.value) == caught.value.failure.reason
        return caught.value.failure


@pytest.fixture
def bed() -> Bed:
    return Bed()


def error(rank: int, exception: str, **more: Any) -> Failure:
    """Return the report of a rank."""
    known = {"cause": "exception", "step": 4, "call": "gen", "traceback": "at x", **more}
    return Failure(rank=rank, exception=exception, reason=f"rank {rank}: {exception}", **known)


def died(rank: int | None, code: int = KILLED) -> Ended:
    return Ended(FakeChildren().name(rank), code, rank)


def test_exception_of_a_rank_is_reported_with_its_host(bed: Bed) -> None:
    known = error(3, "ValueError: bad", damaged="step-4.1")
    assert bed.failure(known) == replace(known, host="n1")


END = "was ended by SIGKILL"
OOM = f"{END} (the kernel's OOM killer)"


@pytest.mark.parametrize(
    ("rank", "code", "oom", "cause", "reason"),
    [
        (3, KILLED, False, "died", END),
        (None, KILLED, False, "master", END),
        (3, KILLED, True, "oom", OOM),
        (None, KILLED, True, "oom", OOM),
        pytest.param(3, -signal.SIGSEGV, True, "died", "SIGSEGV", id="no end by the kernel"),
        (3, -(signal.SIGRTMIN + 3), False, "died", f"signal {signal.SIGRTMIN + 3}"),
        pytest.param(3, 0, False, "died", "exited unexpectedly", id="os._exit(0) of user code"),
    ],
)
def test_failure_names_process_and_reason_of_ended_worker(
    bed: Bed, rank: int | None, code: int, oom: bool, cause: str, reason: str
) -> None:
    bed.kernel.oom = oom
    failure = bed.failure(ended=(died(rank, code),))
    assert failure.reason.startswith(FakeChildren().name(rank))
    assert failure.reason.endswith(reason)
    facts = failure.cause, failure.host, failure.rank, failure.exit_code
    assert facts == (cause, "n1", rank, code)


@pytest.mark.parametrize(
    ("code", "why", "reason"),
    [
        (1, "ModuleNotFoundError: x", "exited with code 1: ModuleNotFoundError: x"),
        (255, "", "exited with code 255: the log ends with: FATAL: no image"),
        (KILLED, "", "was ended by SIGKILL"),
        (0, "", "exited unexpectedly"),
    ],
)
def test_end_of_fork_server_blames_no_rank(bed: Bed, code: int, why: str, reason: str) -> None:
    bed.output = "loading\nFATAL: no image\n\n"
    name = "the fork server of host n1"
    failure = bed.failure(ended=(Ended(name, code, None, why),))
    assert (failure.cause, failure.rank, failure.host) == ("died", None, "n1")
    assert failure.reason == f"{name} {reason}"
    assert failure_words(failure) == failure.reason


def test_expected_ends_of_processes_are_no_failure(bed: Bed) -> None:
    bed.see(ended=(died(None, 0),))  # the master; the history says why
    bed.symptoms.told_to_exit = True
    bed.see(ended=(died(3, 0), died(None, 0)))
    assert bed.failure(ended=(died(3, 5),)).reason == "rank 3 on n1 exited with code 5"


@pytest.mark.parametrize("rank", [2, None])
def test_heartbeat_timeout_is_reported_as_hang(bed: Bed, rank: int | None) -> None:
    bed.children.quiet = [rank]
    failure = bed.failure()
    assert failure.cause == "hung"
    assert failure.reason.endswith("sent no heartbeat for 60 s and was killed")
    assert (failure.rank, failure.silent_s) == (rank, 60.0)


def test_exiting_processes_need_no_heartbeat(bed: Bed) -> None:
    bed.symptoms.told_to_exit = True
    bed.children.quiet = [3, None]
    bed.see()


def test_connection_error_waits_for_its_cause(bed: Bed) -> None:
    bed.see(error(2, "RuntimeError: Connection closed by peer", echo=True))
    bed.now += ECHO_GRACE_S / 2
    bed.see()
    assert bed.failure(ended=(died(3),)).reason == "rank 3 on n1 was ended by SIGKILL"


def test_exception_takes_precedence_over_a_connection_error(bed: Bed) -> None:
    echo = error(2, "RuntimeError: Connection reset by peer", echo=True)
    assert bed.failure(echo, error(3, "KeyError: 1")).rank == 3


def test_connection_error_without_a_cause_is_reported(bed: Bed) -> None:
    bed.see(error(2, "RuntimeError: Connection closed by peer", echo=True))
    assert bed.symptoms.longest_turn_s < ECHO_GRACE_S
    bed.see(error(3, "RuntimeError: Connection closed by peer", echo=True))
    bed.now += ECHO_GRACE_S
    failure = bed.failure()
    assert (failure.rank, failure.cause) == (2, "exception")
    assert failure.echo, "a host may turn out to be lost"


def test_no_failure_is_reported_without_symptoms(bed: Bed) -> None:
    bed.see()
    assert bed.symptoms.longest_turn_s == float("inf")


def test_failed_gpu_is_named_with_its_host(bed: Bed) -> None:
    """The GPU failure takes precedence over broken connections, whichever comes first."""
    broken = error(0, "RuntimeError: connection closed", echo=True)
    fault = error(
        1,
        "AcceleratorError: ECC",
        cause="gpu_fault",
        gpu="GPU 3 (NVIDIA H100, GPU-1)",
        certain=True,
    )
    failure = bed.failure(broken, fault)
    assert (failure.cause, failure.host, failure.rank) == ("gpu_fault", "n1", 1)
    assert failure.certain


WATCHDOG = (
    "[rank2]:[E1122 09:15:04 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0 Rank 2] Process group "
    "watchdog thread terminated with exception: CUDA error: {}\nSearch for `cudaError…' in …\n"
)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("uncorrectable ECC error encountered", "gpu_fault"),
        ("unspecified launch failure", "gpu_fault"),
        ("an illegal memory access was encountered", "died"),
        ("device-side assert triggered", "died"),
    ],
)
def test_watchdog_abort_because_of_a_gpu_is_a_gpu_failure(bed: Bed, words: str, cause: str) -> None:
    """The watchdog thread may see the fault before the rank's own thread can report it."""
    bed.output = WATCHDOG.format(words)
    failure = bed.failure(ended=(Ended("rank 2 on n1", -int(signal.SIGABRT), 2),))
    assert (failure.cause, failure.host, failure.rank) == (cause, "n1", 2)


def test_other_aborts_are_no_gpu_failure(bed: Bed) -> None:
    bed.output = "a sample about an uncorrectable ECC error\n"
    failure = bed.failure(ended=(Ended("rank 2 on n1", -int(signal.SIGABRT), 2),))
    assert failure.cause == "died"


def test_rank_of_another_world_is_named_with_its_world(bed: Bed) -> None:
    """The number without the world would name a trainer."""
    bed.children.world = "rollout/3"
    assert bed.failure(ended=(died(1),)).world == "rollout/3"
    bed = Bed()
    bed.children.world = "rollout/3"
    bed.children.quiet = [1]
    assert bed.failure().world == "rollout/3"

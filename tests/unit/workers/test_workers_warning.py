"""The meaning of a signal: its sender and the time left."""

from __future__ import annotations

import signal
import threading

import pytest

from slurmrl import env
from slurmrl.run.reports import Warned
from slurmrl.workers.agent.agent_host import SIGNALS, Warnings

pytestmark = pytest.mark.usefixtures("signal_handlers")
NOW = 1_000_000.0


def send(number: int) -> None:
    """Send the signal to this thread, because pytest may have other threads that do not block
    it.
    """
    signal.pthread_kill(threading.get_ident(), number)


def warned(
    monkeypatch: pytest.MonkeyPatch,
    end: str,
    *,
    local: bool = False,
    lead_s: float = 120.0,
    number: int = signal.SIGUSR2,
    stopped: bool = False,
) -> Warned | None:
    monkeypatch.setenv(env.JOB_END.name, end)
    warnings = Warnings(local=local, lead_s=lead_s, stopped=lambda: stopped, clock=lambda: NOW)
    warnings.listen()
    assert not warnings.received
    send(number)
    assert warnings.received
    return warnings.take()


@pytest.mark.parametrize(
    ("end", "cause", "left_s"),
    [
        (str(NOW + 100), "time_limit", 100.0),
        (str(NOW + 209.94), "time_limit", 209.9),
        (str(NOW + 211), "preemption", 211.0),
        (str(NOW - 5), "time_limit", -5.0),
        ("", "unknown", None),
    ],
)
def test_warning_cause_follows_from_the_remaining_time(
    monkeypatch: pytest.MonkeyPatch, end: str, cause: str, left_s: float | None
) -> None:
    assert warned(monkeypatch, end) == Warned(signal="SIGUSR2", cause=cause, time_left_s=left_s)


@pytest.mark.parametrize(("left_s", "cause"), [(85.0, "time_limit"), (100.0, "preemption")])
def test_sigterm_before_the_time_limit_is_a_preemption(
    monkeypatch: pytest.MonkeyPatch, left_s: float, cause: str
) -> None:
    """Slurm sends TERM at the time limit, at most ``LATE_S`` early. With more time left, TERM is a
    preemption.
    """
    found = warned(monkeypatch, str(NOW + left_s), number=signal.SIGTERM)
    assert found == Warned(signal="SIGTERM", cause=cause, time_left_s=left_s)


def test_signal_to_a_local_run_is_a_user_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    assert warned(monkeypatch, "", local=True) == Warned(signal="SIGUSR2", cause="interrupt")


def test_first_signal_is_reported_once() -> None:
    warnings = Warnings(local=True, lead_s=120.0, stopped=lambda: False)
    warnings.listen()
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        send(number)
    found = warnings.take()
    assert found is not None
    assert found.signal == "SIGTERM"
    assert warnings.take() is None
    assert warnings.received


def test_blocked_signals_are_received_later() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    send(signal.SIGTERM)
    warnings = Warnings(local=True, lead_s=120.0, stopped=lambda: False)
    assert not warnings.received
    warnings.listen()
    assert warnings.received


@pytest.mark.parametrize(("stopped", "cause"), [(True, "interrupt"), (False, "preemption")])
def test_stop_by_the_user_is_no_preemption(
    monkeypatch: pytest.MonkeyPatch, stopped: bool, cause: str
) -> None:
    found = warned(monkeypatch, str(NOW + 9999), stopped=stopped)
    assert found is not None
    assert found.cause == cause

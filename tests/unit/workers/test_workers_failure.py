"""Failures: their content. The first failure counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmrl import backoff
from slurmrl.errors import (
    DamagedCheckpointError,
    EnvironmentFailure,
    ReportedError,
    UsageError,
    WaitTimeoutError,
)
from slurmrl.name_resolve.store import NameStore
from slurmrl.run.reports import Failure
from slurmrl.watch.published import failure as read_failure
from slurmrl.workers import failure
from slurmrl.workers.failure import failure_of, publish

ONE = Failure(cause="died", reason="one", rank=0, exit_code=-9, host="")


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:  # noqa: BLE001 - it is ours
        return caught


def test_fields_of_an_error_are_reported() -> None:
    known = Failure(cause="hung", reason="rank 3 is silent", rank=3)
    assert failure_of(ReportedError(known), "master") == known


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (WaitTimeoutError("waited 5 s for rank 3"), "deadline"),
        (EnvironmentFailure("no address"), "environment"),
    ],
)
def test_error_type_determines_the_cause(error: Exception, cause: str) -> None:
    assert failure_of(raised(error), "master") == Failure(cause=cause, reason=f"master: {error}")


def test_other_exceptions_have_a_traceback() -> None:
    found = failure_of(raised(KeyError("x")), "master")
    assert (found.cause, found.reason) == ("exception", "master: KeyError: 'x'")
    assert "test_workers_failure.py" in found.traceback


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/run/code:/home/me/own")


OURS = str(Path(failure.__file__).with_name("serve.py"))


def called_by_slurmrl(
    code: str, file: str = "/home/me/own/rewards.py", ours: str = OURS
) -> BaseException:
    """Run a user's function below two frames of slurmrl and return what it raises."""
    known: dict[str, Any] = {}
    exec(compile(code, file, "exec"), known)
    source = "def outer(f): inner(f)\ndef inner(f): f()"
    exec(compile(source, ours, "exec"), known)
    try:
        known["outer"](known["score"])
    except Exception as caught:  # noqa: BLE001 - it is ours
        frames = caught.__traceback__
        assert frames is not None
        return caught.with_traceback(frames.tb_next)  # without the frame of this test
    raise AssertionError


def test_traceback_begins_with_first_frame_of_user() -> None:
    code = "import json\ndef score(): helper()\ndef helper(): json.loads('{')"
    lines = failure.traceback_of(called_by_slurmrl(code)).splitlines()
    assert lines[:4] == [
        "(2 frames of slurmrl omitted; the log has them)",
        "Traceback (most recent call last):",
        '  File "/home/me/own/rewards.py", line 2, in score',
        '  File "/home/me/own/rewards.py", line 3, in helper',
    ]
    assert "json/__init__.py" in lines[4]
    assert lines[-1].startswith("json.decoder.JSONDecodeError: Expecting property name")


def test_traceback_of_chained_exceptions_omits_slurmrl_in_each() -> None:
    code = (
        "def score():\n try: 1 / 0\n"
        " except ZeroDivisionError as error: raise ValueError('no') from error"
    )
    text = failure.traceback_of(called_by_slurmrl(code))
    assert text.count("rewards.py") == 2
    assert "serve.py" not in text
    assert "direct cause" in text


@pytest.mark.parametrize(
    "file",
    ["/home/me/slurmrl/slurmrl/x.py", "/home/me/other/x.py", "/home/me/own/site-packages/x.py"],
)
def test_editable_packages_are_not_user_code(file: str) -> None:
    """Only entries of PYTHONPATH are user code: the trial's copy and the user's additions."""
    of_package = failure.traceback_of(called_by_slurmrl("def score(): 1 / 0", file))
    assert "omitted" not in of_package
    assert file in of_package
    of_user = failure.traceback_of(called_by_slurmrl("def score(): 1 / 0", ours=file))
    assert of_user.startswith("(2 frames of slurmrl omitted")
    assert file not in of_user


def test_traceback_without_user_frames_is_complete() -> None:
    error = called_by_slurmrl("import json\nscore = json.loads")
    assert isinstance(error, TypeError)
    text = failure.traceback_of(error)
    assert "omitted" not in text
    assert text.count("serve.py") == 2


def test_user_error_is_final() -> None:
    found = failure_of(raised(UsageError("no such metric")), "master")
    assert found == Failure(cause="exception", reason="master: no such metric", final=True)


def test_damaged_checkpoint_is_named() -> None:
    found = failure_of(raised(DamagedCheckpointError("too short", "step-4.1")), "master")
    assert found.damaged == "step-4.1"
    assert found.reason == "master: too short"


def test_only_the_first_failure_is_published(tmp_path: Path) -> None:
    names = NameStore(tmp_path)
    assert read_failure(names, 3) is None
    assert publish(names, 3, ONE)
    assert not publish(names, 3, Failure(cause="died", reason="two"))
    assert read_failure(names, 3) == ONE
    assert read_failure(names, 4) is None


class Stalling(NameStore):
    left = 2

    def add(self, name: str, value: object, **more: Any) -> None:
        if self.left:
            self.left -= 1
            raise EnvironmentFailure("the server is away")
        super().add(name, value, **more)


def test_publishing_waits_a_limited_time_for_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff, "OUTAGE_S", (0.001, 0.002))
    names = Stalling(tmp_path)
    assert publish(names, 3, ONE)
    names.left = 10**9
    monkeypatch.setattr(failure, "PUBLISH_TIMEOUT_S", 0.0)
    assert not publish(names, 4, ONE)

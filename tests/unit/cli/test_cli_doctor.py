from __future__ import annotations

import pytest

from slurmrl.cli import site as module
from slurmrl.desk.doctor import Check, examine, failed, ok, warning
from tests.unit.cli.conftest import Command

CHECKS = [
    warning("open files", "limit 1024 (hard 4096), below 4096", "put 'ulimit -n 65536' in").at(
        "n1"
    ),
    failed("gpus", "4 requested, granted 0,1", "look at 'scontrol show node'").at("n0"),
    ok("open files", "limit 65536 (hard 65536)").at("login"),
    *(ok("directory", f"{host} ms", link_s=host / 1000.0).at(f"n{host}") for host in range(6)),
    ok("interface", "ib0 at 10.0.0.1").at("n0"),
    ok("interface", "ib0 at 10.0.0.2").at("n1"),
    ok("python", "3.11.7").at("login"),
    ok("python", "3.11.7").at("n0"),
]


@pytest.fixture(autouse=True)
def _checks(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(what: examine.Examination, say: object) -> list[Check]:
        return list(CHECKS)

    monkeypatch.setattr(examine, "examine", found)


def test_advice_comes_after_the_table_of_checks(command: Command) -> None:
    assert command("doctor", code=1).lines == [
        "         CHECK       WHERE     MEASURED",
        "ok       open files  login     limit 65536 (hard 65536)",
        "ok       directory   6 hosts   5 ms",
        "ok       interface   n0        ib0 at 10.0.0.1",
        "ok       interface   n1        ib0 at 10.0.0.2",
        "ok       python      login,n0  3.11.7",
        "WARNING  open files  n1        limit 1024 (hard 4096), below 4096",
        "         -> put 'ulimit -n 65536' in",
        "FAILED   gpus        n0        4 requested, granted 0,1",
        "         -> look at 'scontrol show node'",
        "11 ok, 1 warning, 1 failed; compute nodes were not checked: add --job",
    ]


def test_lines_fit_the_terminal(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "width", lambda: 60)
    lines = command("doctor", "--job", code=1).lines
    assert max(map(len, lines)) <= 60
    warned = next(number for number, line in enumerate(lines) if line.startswith("WARNING"))
    assert lines[warned : warned + 3] == [
        "WARNING  open files  n1        limit 1024 (hard 4096), below",
        "                               4096",
        "         -> put 'ulimit -n 65536' in",
    ]

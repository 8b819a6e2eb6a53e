"""The address of a host belongs to the configured interface. It is loopback only for a
single host.
"""

from __future__ import annotations

import pytest

from slurmrl.errors import EnvironmentFailure
from slurmrl.run.channel import wakeups

LOOPBACK_INTERFACE = "lo"


def test_address_belongs_to_the_chosen_interface() -> None:
    assert wakeups.interface_address(LOOPBACK_INTERFACE) == "127.0.0.1"
    assert wakeups.interface_of("127.0.0.1") == LOOPBACK_INTERFACE


def test_unknown_interface_and_address_are_rejected() -> None:
    assert wakeups.interface_address("nosuch0") is None
    assert wakeups.interface_address("a-name-that-no-interface-can-have") is None
    assert wakeups.interface_of("192.0.2.77") is None


def test_single_host_uses_loopback() -> None:
    assert wakeups.fabric_address(None, 1) == "127.0.0.1"


def test_configured_interface_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeups, "interface_address", {"ib0": "10.0.0.7"}.get)
    monkeypatch.setattr(wakeups, "default_address", lambda: "10.9.9.9")
    assert wakeups.fabric_address("ib0", 1) == "10.0.0.7"
    assert wakeups.fabric_address("ib0", 4) == "10.0.0.7"


def test_configured_loopback_is_accepted() -> None:
    assert wakeups.fabric_address(LOOPBACK_INTERFACE, 2) == "127.0.0.1"


def test_interface_without_an_address_is_named_with_alternatives() -> None:
    with pytest.raises(EnvironmentFailure, match=r"'nosuch0' has no IPv4 address.*lo"):
        wakeups.fabric_address("nosuch0", 1)


def test_several_hosts_use_the_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeups, "default_address", lambda: "10.9.9.9")
    assert wakeups.fabric_address(None, 2) == "10.9.9.9"


@pytest.mark.parametrize("found", [None, "127.0.0.1", "127.0.1.1"])
def test_several_hosts_never_get_loopback(
    monkeypatch: pytest.MonkeyPatch, found: str | None
) -> None:
    monkeypatch.setattr(wakeups, "default_address", lambda: found)
    with pytest.raises(EnvironmentFailure, match=r"3 hosts.*cluster\.interface"):
        wakeups.fabric_address(None, 3)

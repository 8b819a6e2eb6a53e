"""API keys of running servers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmrl.config.schema.rollout import ServerKeys, read_keys
from slurmrl.errors import UnreadableInputError, UsageError


def written(folder: Path, content: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(content)
    path.chmod(mode)
    return path


def test_keys_come_from_a_file_or_the_environment_and_are_never_shown(tmp_path: Path) -> None:
    """The first line is the API key, the second the administration key."""
    both = read_keys(written(tmp_path, "k1\n k2\n"), {})
    assert (both.api, both.admin) == ("k1", "k2")
    assert (read_keys(written(tmp_path, "k1"), {})) == ServerKeys(api="k1", admin="k1")
    environ = {"SLURMRL_SERVER_KEY": "e1", "SLURMRL_SERVER_ADMIN_KEY": "e2"}
    assert read_keys(None, environ) == ServerKeys(api="e1", admin="e2")
    assert read_keys(written(tmp_path, "k1"), environ).api == "k1"
    assert read_keys(None, {}) == ServerKeys()
    assert "k1" not in repr(both)
    assert "k2" not in repr(both)


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("key", 0o640, "other users may read the key in .* mode to 0600"),
        ("key", 0o604, "other users may read"),
        ("", 0o600, "has 0 lines"),
        ("a\nb\nc", 0o600, "has 3 lines; allowed: the API key, then optionally the admin key"),
        ("a b", 0o600, "has spaces or other characters"),
        ("k\N{LATIN SMALL LETTER E WITH ACUTE}y", 0o600, "has spaces or other characters"),
        ("k" * 5000, 0o600, "at most 4096 bytes"),
    ],
)
def test_key_file_that_is_invalid_or_readable_by_others_is_rejected(
    tmp_path: Path, content: str, mode: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        read_keys(written(tmp_path, content, mode), {})


def test_message_names_a_missing_key_file_or_a_directory(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInputError, match="none cannot be read"):
        read_keys(tmp_path / "none", {})
    with pytest.raises(UsageError, match="is not a file with a key"):
        read_keys(tmp_path, {})


def test_environment_key_must_be_a_valid_header_value() -> None:
    with pytest.raises(UsageError, match="the key in SLURMRL_SERVER_KEY has spaces"):
        read_keys(None, {"SLURMRL_SERVER_KEY": "a\r\nX-Other: b"})
    assert "SLURMRL_SERVER_KEY" not in os.environ

"""The public address of the project, which setup.cfg names once for the package and the site."""

from __future__ import annotations

from configparser import ConfigParser
from pathlib import Path
from urllib.parse import urlsplit

KEY = "Repository"
"""Name of the address in ``project_urls`` of setup.cfg."""


def repository(root: Path) -> str:
    """Return the https address of the repository; "" if setup.cfg has none.

    Raises ValueError if the address is not one.
    """
    setup = ConfigParser()
    setup.read(root / "setup.cfg", encoding="utf-8")
    lines = setup.get("metadata", "project_urls", fallback="").splitlines()
    named = {name.strip(): url.strip() for name, _, url in (line.partition("=") for line in lines)}
    address = named.get(KEY, "").rstrip("/")
    parts = urlsplit(address)
    if address and (parts.scheme != "https" or not parts.netloc or not parts.path.strip("/")):
        raise ValueError(
            f"setup.cfg: project_urls: {KEY} = {address} is not https://HOST/OWNER/NAME"
        )
    return address


def edit_address(repository: str, path: str) -> str:
    """Return the address at which a file of the main branch is edited."""
    gitlab = "gitlab" in urlsplit(repository).netloc
    return f"{repository}/{'-/' * gitlab}edit/main/{path}"

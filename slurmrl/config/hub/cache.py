"""Folders of repositories, from the cache or fetched from the hub by a child process."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import slurmrl
from slurmrl import log
from slurmrl.child import ChildRequest
from slurmrl.config.hub import contents
from slurmrl.config.hub.reference import CACHE, HubReference
from slurmrl.env import user_name
from slurmrl.errors import EnvironmentFailure, UnreachableHubError, UsageError
from slurmrl.fsio import atomic

logger = log.get(__name__)

CHILD: Final = "slurmrl.config.hub.child"


class HubCache:
    """The cache of one user under the root of the runs.

    Methods raise UsageError for a repository that cannot be fetched, EnvironmentFailure if the
    cache cannot be written.
    """

    def __init__(self, root: Path) -> None:
        self.folder = root / user_name() / CACHE

    def pinned(self, reference: HubReference, before: str | None) -> HubReference:
        """Return the commit whose folder a trial used ``before``.

        If the revision has never been that commit, return the reference as it is.
        """
        for commit in reference.commits(self.folder):
            if str(reference.folder(self.folder, commit)) == before:
                return replace(reference, revision=commit)
        return reference

    def newest(self, reference: HubReference) -> Path | None:
        """The newest whole folder of the revision, without asking the hub."""
        commits = reference.commits(self.folder)
        folders = (reference.folder(self.folder, commit) for commit in commits)
        return next((folder for folder in folders if not contents.damage(folder)), None)

    def fetch(self, reference: HubReference) -> Path:
        """The folder of the revision as it is on the hub now.

        A commit is fetched once, and again if its folder has lost files. Where the hub cannot be
        reached, that of the last time is used.
        """
        known = self.newest(reference)
        if known is not None and reference.is_commit:
            return known
        try:
            return self._ask(reference)
        except UnreachableHubError as error:
            if known is None:
                raise
            logger.warning("%s; %s is used as it was last time, %s", error, reference, known.name)
            return known

    def _ask(self, reference: HubReference) -> Path:
        atomic.make_private_directory(self.folder)
        home = reference.home(self.folder)
        request = ChildRequest(
            CHILD,
            {**asdict(reference), "home": str(home)},
            env=_environment(home),
            shown=True,
        )
        reply = request.last()
        if "unreachable" in reply:
            raise UnreachableHubError(reply["unreachable"])
        if "error" in reply:
            raise UsageError(reply["error"])
        if "commit" not in reply:
            message = f"fetching {reference} failed, see above (exit code {request.ended.code})"
            raise EnvironmentFailure(message)
        folder = reference.folder(self.folder, reply["commit"])
        if not reference.is_commit:
            mark = reference.mark(self.folder, reply["commit"])
            atomic.make_private_directory(mark.parent)
            atomic.replace(mark, b"")
        return folder


def _environment(home: Path) -> dict[str, str]:
    """The user's own environment, from which the hub's library takes the token.

    It writes only to the cache: a home directory may be small.
    """
    place = home / "fetching"
    return {
        **os.environ,
        "PYTHONPATH": str(Path(slurmrl.__file__).parents[1]),
        "HF_HUB_CACHE": str(place / "hub"),
        "HF_XET_CACHE": str(place / "xet"),
        "HF_ASSETS_CACHE": str(place / "assets"),
        "HF_DATASETS_CACHE": str(place / "datasets"),
        "HF_MODULES_CACHE": str(place / "modules"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    }

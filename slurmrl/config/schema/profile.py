"""What a site profile may set."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from slurmrl.config.profiles import ROOT_RULE, is_root
from slurmrl.config.schema.base import PlainPathText, Section
from slurmrl.config.schema.cluster import Cluster


def _check_root(text: str) -> str:
    if not is_root(text):
        raise ValueError(ROOT_RULE)
    return text


class Profile(Section):
    """Settings of a cluster that configurations need not repeat. They are merged under a
    configuration, key by key: what that sets itself, null included, takes precedence."""

    root: Annotated[PlainPathText, AfterValidator(_check_root)] | None = None
    """Folder of all runs: an absolute path, or one that begins with `~` or a variable
    (`$SCRATCH/runs`)."""
    cluster: Cluster = Cluster()
    """As in a configuration."""

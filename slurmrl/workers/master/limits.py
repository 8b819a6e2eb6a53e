"""What to say of a time limit that ends jobs before their first commit."""

from __future__ import annotations

from slurmrl.config.schema import Config
from slurmrl.monitor import events
from slurmrl.paths import RunPaths
from slurmrl.workers.master.judgement import Ending


def explain(paths: RunPaths, config: Config, ending: Ending) -> str:
    """How far the incarnation came, and what can be changed."""
    ready_s = next(
        (
            event["seconds"]
            for event in events.read_all(paths)
            if event["kind"] == "ready"
            and event["writer"] == f"master.{ending.incarnation}"
            and isinstance(event.get("seconds"), int | float)
        ),
        None,
    )
    slurm = config.cluster.slurm
    came = (
        f"starting and loading took {ready_s:.0f} s, and no step was finished in what was left"
        if ready_s is not None
        else "the models were not even loaded"
    )
    limit = f"cluster.slurm.time ({slurm.time})" if slurm.time else "cluster.slurm.time"
    return (
        f"{came}. One step must fit between loading and the warning, which comes "
        f"{slurm.signal_lead_s} s before the limit: raise {limit}, or make steps shorter"
    )

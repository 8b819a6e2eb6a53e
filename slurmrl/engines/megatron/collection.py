"""The process groups of a layout under megatron's names, without megatron's global state."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from slurmrl.tensors.parallel.groups import ParallelContext

EXPERTS = {
    "ep": "ep",
    "expt_tp": "etp",
    "expt_dp": "edp",
    "tp_ep": "etp+ep",
    "tp_ep_pp": "etp+ep+pp",
}
WITHOUT_GRID = {"ep": "alone", "expt_tp": "tp", "expt_dp": "shard", "tp_ep": "tp"}


def group_of(context: ParallelContext, name: str) -> dist.ProcessGroup:
    """This rank's group; of the rank alone if the layout does not split that way."""
    return context.groups.get(name, context.groups["alone"])


def collection(context: ParallelContext) -> ProcessGroupCollection:
    """Every group that megatron-core requires."""
    names = {
        "tp": "tp",
        "pp": "pp",
        "cp": "cp",
        "dp": "dp",
        "mp": "tp+pp",
        "tp_cp": "tp+cp",
        "tp_dp_cp": "tp+dp+cp",
        "dp_cp": "shard",
        "intra_dp_cp": "shard",
        "intra_dist_opt": "all",
        "pos_embd": "alone",
        **(EXPERTS if context.experts else {**WITHOUT_GRID, "tp_ep_pp": "tp+pp"}),
    }
    groups = {field: group_of(context, name) for field, name in names.items()}
    groups["intra_expt_dp"] = groups["expt_dp"]
    # Stages between the first and the last have no word embeddings to add up.
    inner = context.axis_size("pp") > 1 and "ends" not in context.groups
    return ProcessGroupCollection(**groups, embd=None if inner else group_of(context, "ends"))

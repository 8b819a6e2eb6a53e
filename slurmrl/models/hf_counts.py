"""Elements that a tensor rank holds of a model of transformers, counted from its parameters."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import lru_cache
from math import prod
from typing import Final, NamedTuple

from slurmrl.errors import UsageError
from slurmrl.models.architecture import Head
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_loading import sketch
from slurmrl.models.hf_tensor import cuts

LAYER: Final = re.compile(r"\.layers\.(\d+)\.")
OF_EXPERTS: Final = ".experts."


class RankElements(NamedTuple):
    """Elements on one tensor rank, before data-parallel ranks share them."""

    dense: int
    experts: int
    """Elements of the routed experts; those of shared experts are dense."""
    dense_layer: tuple[int, int]
    """Dense elements and elements of experts of the largest layer without experts."""
    expert_layer: tuple[int, int]
    """Dense elements and elements of experts of the largest layer with experts."""


@lru_cache(maxsize=16)
def rank_elements(values: str, head: Head, ranks: int) -> RankElements | None:
    """Count the elements of a ``config.json`` object (as JSON) on the first of ``ranks`` ranks.

    Return None if transformers cannot build the model, or if the ranks cannot share it.
    """
    try:
        _, split = cuts(sketch(HFConfig.from_hf(json.loads(values)), head), ranks)
    except UsageError:
        return None
    dense: Counter[str] = Counter()
    experts: Counter[str] = Counter()
    for name, shape in split.whole.items():
        layer = match[1] if (match := LAYER.search(name)) else ""
        found = experts if OF_EXPERTS in name else dense
        found[layer] += prod(split.box(name, shape, 0).size)
    layers = dense.keys() - {""}
    sparse = {layer for layer in layers if experts[layer]}
    plain, moe = (
        max(((dense[layer], experts[layer]) for layer in kind), key=sum, default=(0, 0))
        for kind in (layers - sparse, sparse)
    )
    return RankElements(dense.total(), experts.total(), plain, moe)

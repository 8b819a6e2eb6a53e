"""The checksums that vLLM computes of its weights (``/weight_checker``): SHA-256, in host memory,
which takes seconds for each 10 GB.

Kernels may keep matrices in an order of their own, as those of CPUs do, so only the embedding,
norms and biases are compared: a server that did not take an update has others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from slurmrl.engines.rollout.fitness import field_of
from slurmrl.engines.rollout.weight_checks import Digest, Held, TensorPart, sha256
from slurmrl.errors import RunFailedError

KEY = re.compile(r"(dp\d+:pp\d+:pcp\d+:tp(\d+)):(.+)")
"""The place of the process that holds a parameter, and the parameter's name."""
COMPARED = ("embed_tokens.weight", "wte.weight", "norm.weight", ".bias")


def digest_of(settings: object) -> Digest | str:
    """How a server with these settings (``/server_info``) computes checksums, or why that is not
    known."""
    if _model_config(settings).get("quantization"):
        return "it quantizes them"
    return _sha256


def dtype_of(settings: object) -> object:
    """The type in which a server with these settings computes."""
    return _model_config(settings).get("dtype")


def _model_config(settings: object) -> Mapping[str, object]:
    if not isinstance(settings, dict):
        return {}
    config: Mapping[str, object] = settings["vllm_config"]["model_config"]  # see `check_vllm`
    return config


def _sha256(tensor: Tensor, device: torch.device) -> str:
    return sha256(tensor)


def read_checksums(where: str, reply: object) -> list[Held]:
    """What the processes of a server report."""
    found = field_of(where, reply, "checksums")
    ranks: dict[str, int] = {}
    held: dict[str, dict[str, str]] = {}
    for key, checksum in (found if isinstance(found, dict) else {}).items():
        if (match := KEY.fullmatch(key)) is None:
            raise RunFailedError(f"{where}/weight_checker: {key} has not the form of vLLM's names")
        place, rank, name = match.groups()
        ranks[place] = int(rank)
        if name.endswith(COMPARED):
            held.setdefault(place, {})[name] = str(checksum)
    of = 1 + max(ranks.values(), default=0)
    return [Held(TensorPart(ranks[place], of), checksums) for place, checksums in held.items()]

"""Weights of a served decoder, read from a checkpoint in place."""

from __future__ import annotations

from pathlib import Path

import torch

from slurmrl.models.decoder import Decoder
from slurmrl.models.hf import TensorSource, Weights
from slurmrl.models.parallel.boxes import TensorSplit
from slurmrl.models.shapes import parameter_shapes


@torch.no_grad()
def read_weights(decoder: Decoder, folder: Path) -> None:
    """Fill a decoder, or a tensor rank's part of it, from a Hugging Face folder.

    Raises UsageError, and changes nothing, if the folder holds another architecture.
    """
    config, tensor = decoder.config, decoder.split.tensor
    split = TensorSplit(config, tensor.size)
    shapes = parameter_shapes(config, decoder.head)
    boxes = {name: split.box(name, shape, tensor.rank) for name, shape in shapes.items()}
    with TensorSource(folder) as files:
        weights = Weights(files, config, decoder.head)
        for name, parameter in decoder.named_parameters():
            if boxes[name].count:
                parameter.copy_(weights.read(name, boxes[name]))

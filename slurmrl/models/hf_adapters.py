"""Low-rank adapters of transformers' models.

Shapes: i inputs and o outputs of a layer.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from slurmrl.config.schema.roles import ALL_LINEAR, Lora
from slurmrl.errors import UsageError
from slurmrl.models.adapters import LORA_A, LORA_B, adapted_weight, matrix_name
from slurmrl.models.architecture import Head
from slurmrl.models.hf import as_tensor
from slurmrl.models.hf_config import MODULE, HFConfig
from slurmrl.models.hf_loading import sketch
from slurmrl.models.hf_model import HFModel
from slurmrl.models.hf_pictures import PictureReader
from slurmrl.models.hf_targets import TRANSPOSED, adapted_tensors, matches, targets_of
from slurmrl.models.hf_tensor import FIRST_INPUT
from slurmrl.models.lora import Adapters
from slurmrl.models.model_tensors import open_folder
from slurmrl.models.parallel.linear import Linear
from slurmrl.models.shapes import Shapes
from slurmrl.tensors.layout import Box
from slurmrl.tensors.ops.products import Dropout, low_rank_linear

STATE_SPACE = "A_log"
"""Name of a parameter that only state-space layers and linear attention have."""
BYPASSED = "is read by a kernel that does not call the layer, so an adapter would have no effect"
SHARED = "shares its weight with another layer, so its adapter cannot be merged"
NOT_LINEAR = "computes more than the product with its weight, so it cannot have an adapter"
USE_OF_WEIGHT = r"self\.{}\.weight\b(?!\.(?:dtype|device|shape))"


class LayerAdapters(Adapters):
    """Adapters that add to the outputs of a model's linear layers."""

    def product_of(self, name: str, layer: nn.Module, x: Tensor) -> Tensor | None:
        """Return the addition [..., o] to a layer's output for inputs x [..., i], in x's dtype.

        Return None while the adapters are switched off. Raises UsageError for dropout if the layer
        does not compute every token of the batch.
        """
        if not self._used:
            return None
        flat, dropout = x.reshape(-1, x.shape[-1]), None
        if self._keys is not None:
            assert self._own_keys is not None, "the model has arranged the tokens of this batch"
            if len(flat) != len(self._own_keys):
                raise UsageError(
                    f"lora.dropout is not possible with an adapter of {name}: this layer computes "
                    f"{len(flat)} of {len(self._own_keys)} tokens; set dropout to 0, or other "
                    "targets"
                )
            first: int = vars(layer).get(FIRST_INPUT, 0)
            dropout = Dropout(self._own_keys, self._salts[layer], self.dropout, first)
        a, b = (layer.get_parameter(matrix).to(x.dtype) for matrix in (LORA_A, LORA_B))
        if isinstance(layer, Conv1D):
            a, b = b.t(), a.t()
        product = low_rank_linear(flat, a, b, self.scale, dropout)
        return product.view(*x.shape[:-1], -1)

    def arrange_padded(self, places: Sequence[Tensor], shape: tuple[int, int]) -> None:
        """Prepare dropout for a padded batch of ``shape`` (rows, columns).

        Packed token t is in row ``places[0][t]`` and column ``places[1][t]``.
        """
        if self._keys is not None:
            keys = self._keys.new_zeros(shape).index_put(tuple(places), self._keys)
            self._own_keys = keys.flatten()

    def attach(self, layer: nn.Module, name: str) -> None:
        """Give a layer uninitialized matrices, and add their product to its output."""

        def added(module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> Any:
            more = self.product_of(name, module, inputs[0])
            return output if more is None else output + more

        self.add(layer, name)
        layer.register_forward_hook(added, prepend=True)


def attach_to(model: HFModel, lora: Lora) -> LayerAdapters:
    """Freeze a model's parameters, except for a value head, and add adapters to its targets.

    Trained parameters are in float32. Raises UsageError for a model that cannot have the adapters.
    """
    assert isinstance(model.config, HFConfig), "a model of transformers"
    chosen, reason = _chosen(model.inner, model.config, model.head, lora)
    if reason:
        raise UsageError(reason)
    model.requires_grad_(False)
    if model.head == "value":
        score: nn.Module = model.get_submodule(f"{MODULE}score")
        score.float().requires_grad_(True)
    adapters = LayerAdapters(lora)
    for name, layer in chosen.items():
        adapters.attach(layer, MODULE + name)
    model.adapters = adapters
    return adapters


def require_as_stored(model: HFModel, source: Path, first: int, ranks: int) -> None:
    """Raise UsageError if adapters merged with the files of ``source`` would change the model.

    The files must store the same values of adapted weights as the model. Compare every ``ranks``-th
    weight from number ``first`` on. If tensor ranks share a weight, compare this rank's part.
    """
    assert isinstance(model.config, HFConfig), "a model of transformers"
    files = open_folder(source)
    weights = {
        weight: model.get_parameter(weight)
        for name, _ in model.named_parameters()
        if name.endswith(LORA_A) and (weight := adapted_weight(name)) is not None
    }
    shapes: Shapes = {weight: tuple(values.shape) for weight, values in weights.items()}
    boxes = {weight: Box.whole(shape) for weight, shape in shapes.items()}
    if model.tensor is not None:
        shapes = {weight: model.tensor.whole[weight] for weight in weights}
        rank = model.tensor_rank
        boxes = {name: model.tensor.box(name, shape, rank) for name, shape in shapes.items()}
    specs = files.specs()
    names = adapted_tensors(shapes, specs, source, model.config, model.head)
    for weight in sorted(weights)[first::ranks]:
        name, values = names[weight], weights[weight].detach()
        stored = as_tensor(files.read(name, boxes[weight]), specs[name].dtype)
        if not torch.equal(stored.to(values.dtype), values):
            raise UsageError(
                f"transformers changes {name} of {source} when it loads the weight, so adapters "
                "of this weight cannot be merged; leave it out of lora.targets"
            )


def refusal(values: Mapping[str, Any], head: Head, lora: Lora) -> str | None:
    """Return why the model of a ``config.json`` object cannot have adapters; None if it can.

    Raises UsageError if transformers cannot build the model.
    """
    return _planned(json.dumps(values, sort_keys=True), head, lora.model_dump_json())[1]


def adapted_shapes(values: Mapping[str, Any], head: Head, lora: Lora) -> Shapes:
    """Return a mapping from each weight that has an adapter to its shape. Raises as `refusal`."""
    return dict(_planned(json.dumps(values, sort_keys=True), head, lora.model_dump_json())[0])


def adapter_shapes(values: Mapping[str, Any], head: Head, lora: Lora) -> Shapes:
    """Return a mapping from each matrix of the adapters to its shape. Raises as `refusal`."""
    shapes: Shapes = {}
    for name, (rows, columns) in adapted_shapes(values, head, lora).items():
        shapes[matrix_name(name, LORA_A)] = (lora.rank, columns)
        shapes[matrix_name(name, LORA_B)] = (rows, lora.rank)
    return shapes


@lru_cache(maxsize=16)
def _planned(values: str, head: Head, lora: str) -> tuple[Shapes, str | None]:
    config = HFConfig.from_hf(json.loads(values))
    model = sketch(config, head)
    chosen, reason = _chosen(model, config, head, Lora.model_validate_json(lora))
    shapes: Shapes = {
        f"{MODULE}{name}.weight": tuple(layer.get_parameter("weight").shape)
        for name, layer in chosen.items()
    }
    return shapes, reason


def _chosen(
    model: PreTrainedModel, config: HFConfig, head: Head, lora: Lora
) -> tuple[dict[str, nn.Module], str | None]:
    """Return a mapping from names to layers with adapters, or why the model cannot have them."""
    layers, unable = _layers(model, head)
    if any(isinstance(each, Conv1D) for each in layers.values()) != (
        config.model_type in TRANSPOSED
    ):
        return {}, f"layers of {config.model_type} store their weights in an unsupported layout"
    targets = targets_of(config.model_type, lora)
    if targets == ALL_LINEAR:
        return layers, None if layers else f"this {config.model_type} model has no linear layers"
    found = {target: [name for name in layers if matches(name, target)] for target in targets}
    missing = [target for target, names in found.items() if not names]
    if missing and (lora.targets is not None or len(missing) == len(found)):
        return {}, _missing(model, config, missing[0], layers, unable)
    names = {name for each in found.values() for name in each}
    return {name: layer for name, layer in layers.items() if name in names}, None


def _missing(
    model: PreTrainedModel,
    config: HFConfig,
    target: str,
    layers: Mapping[str, nn.Module],
    unable: Mapping[str, str],
) -> str:
    """Return why no layer has an adapter for a target."""
    able = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
    what = f"this {config.model_type} model"
    for name, reason in unable.items():
        if matches(name, target):
            return f"'{target}' of {what} {reason}; allowed: {able}"
    for name, parameter in model.named_parameters():
        if parameter.dim() == 3 and (matches(name, target) or f".{target}." in f".{name}"):
            return (
                f"{what} stores '{target}' of all experts as one tensor, which has no adapter; "
                f"allowed: {able}"
            )
    head = _head(model)
    if head is not None and any(
        module is head and matches(name, target) for name, module in model.named_modules()
    ):
        return f"'{target}' is the output layer, which has no adapter; allowed: {able}"
    return f"{what} has no linear layer '{target}'; it has {able}"


def _layers(model: PreTrainedModel, head: Head) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return usable linear layers, and for other linear layers why they cannot have adapters.

    Both results exclude the output layer, a value head and parts that read images or sounds.
    """
    ends = [_head(model), getattr(model, "score", None)]
    if (reader := PictureReader.of(model)) is not None:
        text = set(reader.text.modules())
        ends += [module for module in model.modules() if module not in text]
    owners = Counter(id(module._parameters.get("weight")) for module in model.modules())
    layers: dict[str, nn.Module] = {}
    unable = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear | Conv1D) or any(layer is end for end in ends):
            continue
        above, _, own = name.rpartition(".")
        parent = model.get_submodule(above)
        if hasattr(parent, STATE_SPACE) and re.search(
            USE_OF_WEIGHT.format(own), _source(type(parent).__module__, type(parent).__qualname__)
        ):
            unable[name] = BYPASSED
        elif owners[id(layer.weight)] > 1:
            unable[name] = SHARED
        elif not _maps_rows(layer):
            unable[name] = NOT_LINEAR
        else:
            layers[name] = layer
    return layers, unable


def _maps_rows(layer: nn.Linear | Conv1D) -> bool:
    """Return whether a layer maps a row to one row. Some routers and grouped layers do not."""
    if type(layer).forward in (nn.Linear.forward, Linear.forward, Conv1D.forward):
        return True
    state = {name: torch.empty_like(each, device="meta") for name, each in layer.named_parameters()}
    row = torch.empty(1, layer.weight.shape[-1], device="meta", dtype=layer.weight.dtype)
    try:
        return isinstance(torch.func.functional_call(layer, state, row), Tensor)
    except (RuntimeError, TypeError):  # The layer needs more inputs than a row.
        return False


def _head(model: PreTrainedModel) -> nn.Module | None:
    """Return the output layer; None if the model has none."""
    head: nn.Module | None = cast(Any, model).get_output_embeddings()
    return head


@cache
def _source(module: str, kind: str) -> str:
    """Return the source code of a class; "" if it is not available."""
    try:
        return inspect.getsource(attrgetter(kind)(sys.modules[module]))
    except (OSError, AttributeError):
        return ""

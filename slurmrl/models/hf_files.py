"""The files of a model of transformers: their tensors, and the place of each parameter in them.

Transformers holds some tensors in a different form than the family's files: it stacks experts,
concatenates matrices and renames modules. The method ``save_pretrained`` restores the form of the
files. `file_form` makes transformers convert tensors without elements and observes where their
views end up. Ranks can therefore write shards of tensors, without the whole model in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from slurmrl.config.schema.roles import VISION
from slurmrl.errors import UsageError
from slurmrl.models.architecture import Head
from slurmrl.models.hf_config import MODULE, FileForm, HFConfig
from slurmrl.models.hf_loading import sketch
from slurmrl.tensors.checkpoint.tensors import TensorSlice
from slurmrl.tensors.layout import Box, Index, row_major

NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version", "_token_id")
"""Ends of the names of fields that do not describe the model. Token ids belong to a tokenizer."""


def file_form(config: HFConfig, head: Head) -> FileForm:
    """Return the layout of the files of a config's model, without making its weights.

    Raises UsageError if transformers does not know the family, or computes tensors of its files.
    """
    return _file_form(json.dumps(dict(config.values), sort_keys=True), head)


def complete(config: HFConfig) -> HFConfig:
    """Return a config for servers, which need the class and the size of the vocabulary.

    If transformers runs only the language model of a family, return the config of the language
    model. Raises as `file_form`.
    """
    form = file_form(config, "lm")
    more: dict[str, Any] = {"vocab_size": form.vocab_size, "tie_word_embeddings": form.tied}
    if VISION in config.values:
        more[VISION] = True
    values = {**form.values, **more}
    model_type = str(values["model_type"])
    return replace(config, model_type=model_type, values=values, embedding=form.embedding)


@lru_cache(maxsize=8)
def _file_form(text: str, head: Head) -> FileForm:
    config = HFConfig.from_hf(json.loads(text))
    model = sketch(config, head)
    kind, made = type(model).__name__, model.config.to_dict()
    whole = made["model_type"] == config.model_type
    kept = {k: v for k, v in made.items() if not k.endswith(NOT_OF_THE_MODEL)}
    values = {**kept, **config.values} if whole else kept
    values.pop(VISION, None)
    inner: Any = model
    table, projection = inner.get_input_embeddings().weight, inner.get_output_embeddings()
    parameters = dict(model.named_parameters())
    stored = model.state_dict().keys()
    shapes = {name: tuple(each.shape) for name, each in parameters.items()}
    shapes |= {name: tuple(each.shape) for name, each in model.named_buffers() if name in stored}
    slices = file_slices(model, shapes)
    (embedding,) = (name for name, each in parameters.items() if each is table)
    return FileForm(
        values={**values, "architectures": [kind]},
        architecture=kind,
        slices={MODULE + name: each for name, each in slices.items()},
        vocab_size=table.shape[0],
        tied=projection is not None and projection.weight is table,
        embedding=slices[embedding][0].tensor,
    )


def file_slices(
    model: PreTrainedModel, shapes: Mapping[str, Index]
) -> dict[str, tuple[TensorSlice, ...]]:
    """Return the slices of the files' tensors that store each of a model's tensors of ``shapes``.

    Raises UsageError if the files have a tensor that is not composed of boxes of these tensors.
    """
    roots = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    try:
        with _Joins() as joins:
            given = {tied.get(name, name): root for name, root in roots.items()}
            files = revert_weight_conversion(model, given)
    except Exception as error:
        raise _computed(model, f"{type(error).__name__}: {error}") from error
    names = {_memory(root): name for name, root in roots.items()}
    found: dict[str, list[TensorSlice]] = {name: [] for name in roots}
    for tensor, values in files.items():
        for start, view in joins.views(values, (0,) * values.dim()):
            name = names.get(_memory(view))
            made = None if name is None else _slice(tensor, start, values, view, shapes[name])
            if name is None or made is None:
                raise _computed(model, f"it computes {tensor}")
            found[name].append(made)
    for name, parts in found.items():
        counts = (part.of(shapes[name]).count for part in parts)
        if sum(counts) != prod(shapes[name]):
            raise _computed(model, f"its files lack parts of {name}")
    return {name: tuple(parts) for name, parts in found.items()}


def _computed(model: PreTrainedModel, reason: str) -> UsageError:
    return UsageError(
        f"implementation hf cannot write the files of {model.config.model_type} models: "
        f"to save {type(model).__name__}, transformers does more than slice and join its tensors: "
        f"{reason}"
    )


class _Joins(TorchFunctionMode):
    """Observes which views each tensor consists of.

    A copy of a view is replaced by the view itself, so that its place in a tensor of the model
    remains known.
    """

    def __init__(self) -> None:
        super().__init__()
        self._joined: dict[int, tuple[Tensor, list[tuple[Index, Tensor]]]] = {}
        """Mapping from memory to a concatenation's result and the first index of every input."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.contiguous, Tensor.clone):
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func in (torch.cat, torch.stack):
            dim = _dim(args, kwargs or {}) % result.dim()
            parts = args[0] if func is torch.cat else [each.unsqueeze(dim) for each in args[0]]
            self._joined[_memory(result)] = (result, list(_placed(parts, dim)))
        return result

    def views(self, values: Tensor, start: Index) -> Iterator[tuple[Index, Tensor]]:
        """Yield the parts of a tensor, each with its first index in the tensor plus ``start``.

        If the tensor is a changed concatenation, its parts are unknown: yield the tensor itself.
        """
        whole, parts = self._joined.get(_memory(values), (None, []))
        if whole is None or whole.shape != values.shape or whole.stride() != values.stride():
            yield start, values
            return
        for begin, part in parts:
            yield from self.views(part, tuple(map(sum, zip(start, begin, strict=True))))


def _dim(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    dim: int = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return dim


def _placed(parts: Sequence[Tensor], dim: int) -> Iterator[tuple[Index, Tensor]]:
    begin = 0
    for part in parts:
        yield tuple(begin if each == dim else 0 for each in range(part.dim())), part
        begin += part.shape[dim]


def _memory(tensor: Tensor) -> int:
    """Return an id of the storage that views share. Ids are unique while any view exists."""
    address: int = tensor.untyped_storage()._cdata
    return address


def _slice(
    name: str, start: Index, whole: Tensor, view: Tensor, shape: Index
) -> TensorSlice | None:
    """Return the slice of the file's tensor ``name`` that a view of a parameter fills.

    ``whole`` is the file's tensor, and ``start`` the first index of the view in it. Return None if
    the view is not a box of the parameter.
    """
    steps, offset = row_major(shape), view.storage_offset()
    begin: list[int] = []
    for step in steps:
        begin.append(offset // step)
        offset %= step
    size, dims = [1] * len(shape), [-1] * view.dim()
    for place, (length, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if length > 1:
            same = [d for d, step in enumerate(steps) if step == stride and shape[d] > 1]
            if not same or begin[same[0]] + length > shape[same[0]]:
                return None
            dims[place], size[same[0]] = same[0], length
    free = [dim for dim in range(len(shape)) if dim not in dims]
    if dims.count(-1) > len(free):
        return None
    exact = len(free) == dims.count(-1)
    for place, dim in enumerate(dims):
        if dim < 0:  # A dim of length 1 takes a free dim.
            dims[place] = free.pop(0) if exact else free.pop(_unit(free, shape))
    box, order = Box(tuple(begin), tuple(size)), tuple(dims)
    return TensorSlice(
        name,
        part=None if box == Box.whole(shape) else box,
        dims=None if order == tuple(range(len(shape))) else order,
        start=None if whole.shape == view.shape else start,
    )


def _unit(free: Sequence[int], shape: Index) -> int:
    """Return the index in ``free`` of a dim with length 1 in the whole parameter; else 0."""
    return next((place for place, dim in enumerate(free) if shape[dim] == 1), 0)

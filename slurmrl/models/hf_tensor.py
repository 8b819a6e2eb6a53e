"""Tensor parallelism of transformers' models, according to their own plans.

Each tensor rank holds parts of the matrices that the family's ``tp_plan`` names, and its own heads,
inner units and experts. The ranks also share the rows of the embedding and of the output layer if
they can have equal parts. All other parameters, such as norms, are whole on each rank. FSDP2 then
shards a rank's parts like a whole model.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slurmrl.errors import UsageError
from slurmrl.models.adapters import LORA_B, adapted_weight
from slurmrl.models.architecture import Head
from slurmrl.models.hf_config import MODULE, HFConfig, tensor_refusal
from slurmrl.models.hf_loading import sketch
from slurmrl.models.hf_targets import EXPERT_FIELDS
from slurmrl.models.parallel.split import Axis
from slurmrl.tensors.layout import Box, Index
from slurmrl.tensors.ops.collectives import own_to_whole, partial_to_whole, whole_to_partial
from slurmrl.tensors.ops.products import linear

COLUMNS: Final = "colwise"
"""Transformers' style of a linear layer whose outputs are split over the ranks."""
ROWS: Final = "rowwise"
"""transformers' style of a linear layer whose inputs are split; the ranks' products are summed."""
OF_PARTS: Final = "replicated_with_grad_allreduce"
"""transformers' style of a norm of heads. Each rank computes a part of its gradient."""
LATENT: Final = "mla_kv_a_proj"
"""transformers' style of a whole layer that computes latent vectors and rotated keys of all
heads."""
EXPERTS: Final = ("moe_tp_experts", "ep_dispatch_experts")
"""transformers' styles of modules whose ranks share the experts along the first dim of
parameters."""
EXPERT_PARALLEL: Final = "_is_expert_parallel"
"""Attribute with which transformers' experts skip tokens whose expert index is ``num_experts``."""
KEPT_WHOLE: Final = (
    "colwise_gather_output",
    "embedding_rowwise",
    "local_params",
    "rowwise_split_input",
)
"""transformers' styles of modules that each rank has whole and calls without collectives. Most have
whole inputs and outputs, such as linear attention or norms over all heads."""
INNER: Final = "intermediate_size"
FIRST_INPUT: Final = "first"
"""Attribute of a linear layer with the index of its first input in the whole layer."""
OF_TOKENS: Final = ("lm_head", "embed_tokens")
"""Names of the output layer and the embedding. Ranks share both even if no plan names them."""


@dataclass(frozen=True)
class HFTensorSplit:
    """The division of a model's parameters among ``ranks`` tensor ranks (`SharedParameters`)."""

    ranks: int
    dims: Mapping[str, int]
    """Dim along which each split parameter is split; other parameters are whole on every rank."""
    partial: frozenset[str]
    """Parameters that are whole on every rank and have partial gradients."""
    whole: Mapping[str, Index]
    """Shape of each whole parameter."""
    head_copies: int = 1

    def box(self, name: str, shape: Index, rank: int) -> Box:
        """Return a rank's part of a parameter of ``shape``."""
        dim = self._dim(name)
        if dim is None:
            return Box.whole(shape)
        size = shape[dim] // self.ranks
        start = tuple(rank * size if each == dim else 0 for each in range(len(shape)))
        return Box(start, (*shape[:dim], size, *shape[dim + 1 :]))

    def copies(self, name: str) -> int:
        """Return the number of ranks that have each element."""
        return self.ranks if self._dim(name) is None else 1

    def sums(self, name: str) -> bool:
        """Return whether the copies' gradients must be summed. Other gradients are equal."""
        weight = adapted_weight(name)
        return name in self.partial or (weight in self.dims and self._dim(name) is None)

    def whole_shape(self, name: str, own: Index) -> Index:
        """Return the whole shape of a parameter or adapter; a rank's part has shape ``own``."""
        dim = self._dim(name)
        return own if dim is None else (*own[:dim], own[dim] * self.ranks, *own[dim + 1 :])

    def head_of(self, rank: int) -> int:
        """Return the key and value head of a rank if heads are replicated."""
        return rank

    def _dim(self, name: str) -> int | None:
        """Return the dim along which a parameter or adapter matrix is split; None if it is whole.

        ``lora_B`` is split with the rows of the weight, and ``lora_A`` with its columns.
        """
        weight = adapted_weight(name)
        if weight is None:
            return self.dims.get(name)
        dim = self.dims.get(weight)
        return dim if dim == (0 if name.endswith(LORA_B) else 1) else None


def rows_over(shapes: Mapping[str, Index], ranks: int) -> HFTensorSplit:
    """Share parameters by rows between ranks that only store them, for example for a server."""
    dims = {name: 0 for name, shape in shapes.items() if shape and shape[0] % ranks == 0}
    return HFTensorSplit(ranks, dims, frozenset(), shapes)


class _Cut(NamedTuple):
    """A module or parameter of which each rank keeps a part."""

    name: str
    module: nn.Module | nn.Parameter
    style: str


def refusal(values: Mapping[str, Any], head: Head, ranks: int) -> str:
    """Return why tensor ranks cannot share the model of a ``config.json`` object; "" if they can.

    Raises UsageError if the object is not the config of a model.
    """
    return _refusal(json.dumps(values, sort_keys=True), head, ranks)


@lru_cache(maxsize=16)
def _refusal(values: str, head: Head, ranks: int) -> str:
    config = HFConfig.from_hf(json.loads(values))
    try:
        model = sketch(config, head)
    except UsageError as error:
        return tensor_refusal(config.values) or str(error)
    try:
        cuts(model, ranks)
    except UsageError as error:
        return str(error)
    return ""


def split_over(inner: PreTrainedModel, tensor: Axis) -> HFTensorSplit:
    """Reduce a model on the CPU to this rank's part, and add the collectives between the ranks.

    Raises UsageError if the family has no plan, or a plan or sizes that are not supported.
    """
    found, split = cuts(inner, tensor.size)
    for name, module, style in found:
        if isinstance(module, nn.Parameter):
            above, _, own = name.rpartition(".")
            setattr(inner.get_submodule(above), own, _part(module, tensor))
            continue
        for own, values in list(module.named_parameters(recurse=False)):
            dim = split.dims.get(f"{MODULE}{name}.{own}")
            if dim is not None:
                setattr(module, own, _part(values, tensor, dim))
        if style == COLUMNS and isinstance(module, nn.Linear):
            module.out_features = module.weight.shape[0]
            module.register_forward_pre_hook(_entering(tensor))
        elif style == ROWS and isinstance(module, nn.Linear):
            module.in_features = module.weight.shape[1]
            vars(module)[FIRST_INPUT] = tensor.rank * module.in_features
            vars(module)["forward"] = partial(_product, module)
            module.register_forward_hook(_leaving(tensor))
        elif style == LATENT:
            parent = inner.get_submodule(name.rpartition(".")[0])
            module.register_forward_hook(_shared_keys(cast(int, parent.qk_rope_head_dim), tensor))
        elif style in EXPERTS:
            _share_experts(module, tensor)
    _share_vocabulary(_vocabulary(inner, tensor.size), tensor)
    return split


def _part(values: nn.Parameter, tensor: Axis, dim: int = 0) -> nn.Parameter:
    """Return this rank's part of a parameter along a dim."""
    part = values.detach().chunk(tensor.size, dim)[tensor.rank].clone()
    return nn.Parameter(part, requires_grad=values.requires_grad)


def cuts(inner: PreTrainedModel, ranks: int) -> tuple[list[_Cut], HFTensorSplit]:
    """Return the modules that the family's plan splits, and the division of the parameters.

    Raises UsageError if the family has no plan, or a plan or sizes that are not supported.
    """
    kind = inner.config.model_type
    if reason := tensor_refusal(inner.config.to_dict()):
        raise UsageError(reason)
    whole = {MODULE + name: tuple(each.shape) for name, each in inner.named_parameters()}
    found = [_Cut(*each) for each in _styled(inner) if each[2] not in KEPT_WHOLE]
    experts = tuple(f"{each.name}." for each in found if each.style in EXPERTS)
    found = [each for each in found if not each.name.startswith(experts)]
    dims: dict[str, int] = {}
    of_parts: set[str] = set()
    blocks: set[str] = set()
    for name, module, style in found:
        if isinstance(module, nn.Parameter):
            parameters, linear = [MODULE + name], style == COLUMNS  # attention sinks
        else:
            own = dict(module.named_parameters(recurse=False))
            parameters = [f"{MODULE}{name}.{each}" for each in own]
            linear = isinstance(module, nn.Linear)
        if style == OF_PARTS:
            of_parts.update(parameters)
        elif style == COLUMNS and linear:
            dims |= dict.fromkeys(parameters, 0)
        elif style == ROWS and linear:
            dims[f"{MODULE}{name}.weight"] = 1
        elif style in EXPERTS and hasattr(module, EXPERT_PARALLEL):
            dims |= dict.fromkeys(parameters, 0)
        elif style != LATENT:
            raise UsageError(
                f"{kind} models cannot be split over tensor ranks: transformers' tp_plan splits "
                f"{name} by '{style}', which is not supported"
            )
        if style in (COLUMNS, ROWS):
            blocks.add(f"{MODULE}{name.rpartition('.')[0]}.")
    # The norms of latent vectors come before the split layers, so they have whole gradients.
    blocks -= {f"{MODULE}{n.rpartition('.')[0]}." for n, _, style in found if style == LATENT}
    if not dims:
        raise UsageError(f"{kind} models have no tp_plan of transformers that splits a layer")
    # Norms of heads are between split layers. Versions of transformers without `OF_PARTS` leave
    # these norms out of their plans.
    linear_biases = {f"{MODULE}{each.name}.bias" for each in found if each.style == ROWS}
    between = {
        each
        for each in whole
        if each not in dims and each not in linear_biases and each.startswith(tuple(blocks))
    }
    heads = inner.config.get_text_config().to_dict().get("num_attention_heads")
    for each in sorted(between - of_parts):
        # A rank would apply such a module's values, which are for all heads, to only its own heads.
        if len(whole[each]) > 1 or whole[each][0] == heads:
            raise UsageError(
                f"{kind} models cannot be split over tensor ranks with "
                f"{each.removeprefix(MODULE)}, which has values for each head"
            )
    of_parts |= between
    _check_sizes(inner, ranks, {name: whole[name][dim] for name, dim in dims.items()})
    of_tokens = {id(p) for each in _vocabulary(inner, ranks) for p in each.parameters()}
    dims |= {MODULE + name: 0 for name, p in inner.named_parameters() if id(p) in of_tokens}
    return found, HFTensorSplit(ranks, dims, frozenset(of_parts), whole)


def _check_sizes(inner: PreTrainedModel, ranks: int, sizes: Mapping[str, int]) -> None:
    """Raise UsageError if ranks cannot have equal parts of split parameters, with whole heads.

    ``sizes`` maps parameters to the sizes of their split dims.
    """
    fields = inner.config.get_text_config().to_dict()
    wanted: dict[str, Any] = {}
    for name, size in sizes.items():
        above, _, own = name.removeprefix(MODULE).rpartition(".")[0].rpartition(".")
        if "attn" in above or "attention" in above:
            heads = fields.get("num_attention_heads")
            wanted["num_attention_heads"] = heads
            if own == "k_proj":
                wanted["num_key_value_heads"] = fields.get("num_key_value_heads") or heads
                width = getattr(inner.get_submodule(above), "head_dim", None)
                wanted[f"the heads of {above}.{own}:"] = size // width if width else None
        else:
            known = (
                n for n, v in fields.items() if v == size and (INNER in n or n in EXPERT_FIELDS)
            )
            wanted[next(known, name.removeprefix(MODULE))] = size
    for name, size in wanted.items():
        if isinstance(size, int) and size % ranks:
            raise UsageError(f"t{ranks} does not divide {name} {size}")


def _styled(inner: PreTrainedModel) -> Iterator[tuple[str, nn.Module | nn.Parameter, str]]:
    """Yield name, object and style of each module or parameter that a plan names.

    From the plan of expert parallelism, only experts are yielded.
    """
    plan: dict[str, str] = dict(getattr(inner, "tp_plan", None) or {})
    more: Mapping[str, str] = getattr(inner, "ep_plan", None) or {}
    plan |= {key: style for key, style in more.items() if style in EXPERTS}
    patterns = {re.escape(key).replace(r"\*", r"\d+"): key for key in plan}
    named: dict[str, Any] = {**dict(inner.named_parameters()), **dict(inner.named_modules())}
    for name, found in named.items():
        key = next((key for pattern, key in patterns.items() if re.fullmatch(pattern, name)), None)
        if key is not None and name.rpartition(".")[2] not in OF_TOKENS:
            yield name, found, plan[key]


def _vocabulary(inner: PreTrainedModel, ranks: int) -> list[nn.Embedding | nn.Linear]:
    """Return the embedding and the output layer, each only if ranks can have equal parts of it."""
    ends = (inner.get_input_embeddings(), cast(Any, inner).get_output_embeddings())
    return [
        each
        for each in ends
        if isinstance(each, nn.Embedding | nn.Linear) and each.weight.shape[0] % ranks == 0
    ]


def _share_vocabulary(modules: Iterable[nn.Embedding | nn.Linear], tensor: Axis) -> None:
    """Keep this rank's rows of the embedding and the output layer. Outputs remain whole."""
    parts: dict[int, nn.Parameter] = {}  # A tied weight must remain one parameter.
    for module in modules:
        for own, values in list(module.named_parameters(recurse=False)):
            if id(values) not in parts:
                parts[id(values)] = _part(values, tensor)
            setattr(module, own, parts[id(values)])
        rows = module.weight.shape[0]
        compute: Callable[[Tensor], Tensor] = module.forward
        if isinstance(module, nn.Linear):
            module.out_features = rows
            vars(module)["forward"] = partial(_whole_logits, compute, tensor)
            continue
        first = tensor.rank * rows
        module.num_embeddings = rows
        if module.padding_idx is not None:
            padding = module.padding_idx - first
            module.padding_idx = padding if 0 <= padding < rows else None
        vars(module)["forward"] = partial(_whole_embeddings, compute, tensor, first, rows)


def _whole_logits(compute: Callable[[Tensor], Tensor], tensor: Axis, x: Tensor) -> Tensor:
    """Return logits [..., V] for x [..., h]; ``compute`` returns this rank's part of the logits."""
    own = compute(whole_to_partial(x, tensor.group))
    return own_to_whole(own.movedim(-1, 0), tensor.group).movedim(0, -1).contiguous()


def _whole_embeddings(
    compute: Callable[[Tensor], Tensor], tensor: Axis, first: int, rows: int, ids: Tensor
) -> Tensor:
    """Return embeddings [..., h] of tokens.

    ``compute`` reads this rank's ``rows``, which begin with the row of token ``first``.
    """
    row = ids - first
    here = (row >= 0) & (row < rows)
    return partial_to_whole(compute(row * here) * here.unsqueeze(-1), tensor.group)


def _share_experts(module: nn.Module, tensor: Axis) -> None:
    """Let this rank's experts process only their tokens, and sum the ranks' outputs."""
    count = next(module.parameters(recurse=False)).shape[0]
    vars(module).update({"num_experts": count, EXPERT_PARALLEL: True})

    def enter(_: nn.Module, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        own = given[1] - tensor.rank * count
        here = (own >= 0) & (own < count)
        states, weights = (whole_to_partial(each, tensor.group) for each in given[::2])
        if cast(Any, module).config._experts_implementation == "eager":
            # Loops may use expert ``count``, and have no backward pass without any token.
            return states, own * here, weights * here
        return states, torch.where(here, own, count), weights  # count: another rank's expert

    def leave(_: nn.Module, __: Any, products: Tensor) -> Tensor:
        return partial_to_whole(products, tensor.group)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


def _shared_keys(rotated: int, tensor: Axis) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    """Return a hook that sums gradients of the last ``rotated`` outputs, the keys of all heads."""

    def leave(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        keys = whole_to_partial(output[..., -rotated:], tensor.group)
        return torch.cat((output[..., :-rotated], keys), dim=-1)

    return leave


def _entering(tensor: Axis) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    def enter(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (whole_to_partial(given[0], tensor.group), *given[1:])

    return enter


def _product(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight)


def _leaving(tensor: Axis) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    """Return a hook that sums products, adapters included, over ranks and adds the bias."""

    def leave(module: nn.Module, _: Any, products: Tensor) -> Tensor:
        whole = partial_to_whole(products, tensor.group)
        bias = cast(nn.Linear, module).bias
        return whole if bias is None else whole + bias

    return leave


LAYER: Final = re.compile(r"\.layers\.(\d+)\.")
OF_EXPERTS: Final = ".experts."


class RankElements(NamedTuple):
    """Numbers of parameters' elements on a tensor rank, before data-parallel ranks share them."""

    dense: int
    """Elements outside of routed experts."""
    experts: int
    """Elements of routed experts."""
    dense_layer: tuple[int, int]
    """(dense, experts) elements of the largest layer without experts; ``experts`` is 0."""
    expert_layer: tuple[int, int]
    """(dense, experts) elements of the largest layer with experts."""


@lru_cache(maxsize=16)
def rank_elements(values: str, head: Head, ranks: int) -> RankElements | None:
    """Return the numbers of elements on the first of ``ranks`` ranks, for a config in JSON.

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

"""Any causal model of transformers with the interface of the built-in decoders.

Sequences are one padded batch with a mask, which every model supports. Logits [T, V] are
materialised only if the model does more than multiply hidden states by its head.
T packed tokens, S sequences, L the longest of them, V vocabulary.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DynamicCache,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion

from slurmrl.errors import UsageError
from slurmrl.fsio import inputs
from slurmrl.models.architecture import Head
from slurmrl.models.base import PackedModel
from slurmrl.models.folder_checks import not_finite
from slurmrl.models.hf import as_tensor, is_finite
from slurmrl.models.hf_config import MODULE, HFConfig
from slurmrl.models.model_tensors import open_folder
from slurmrl.models.packed import packed_positions, packed_rows
from slurmrl.models.recompute import CHECKPOINT_OPTIONS, Recompute
from slurmrl.tensors.checkpoint.manifest import is_pinned
from slurmrl.tensors.layout import Box, Index, TensorSpec
from slurmrl.tensors.ops.arguments import OnHost, upload
from slurmrl.tensors.ops.logprobs import packed_logprobs_and_entropy, packed_logprobs_of_logits
from slurmrl.tensors.ops.products import wide_linear
from slurmrl.tensors.ops.sampling import Support

POSITIONS = re.compile(r"posit|\bwpe\b")
OTHER = re.compile(r"vision|image|audio|relative")
"""Names of position embeddings, and of those among them that do not limit the length of text."""
TASKS = {"lm": AutoModelForCausalLM, "value": AutoModelForSequenceClassification}


class HFModel(PackedModel):
    """A model with its weights, read from a folder or initialized by transformers."""

    def __init__(
        self,
        config: HFConfig,
        head: Head,
        *,
        source: Path | None,
        seed: int,
        dtype: torch.dtype,
    ) -> None:
        """``source`` is the model's folder; without it weights are random, from ``seed``."""
        super().__init__()
        self.config = config
        self.head = head
        self.inner = _model(config, head, source, seed, dtype)
        self.inner.train(False)
        self._made = HFConfig(
            model_type=config.model_type,
            values=self.inner.config.to_dict(),
            positions=_positions(self.inner),
        )
        """The config with transformers' defaults."""
        refuse_dropout(self.inner)
        self._multiplies = head == "lm" and only_multiplies(self.inner)
        if head == "value" and not isinstance(getattr(self.inner, "score", None), nn.Linear):
            raise UsageError(
                f"{type(self.inner).__name__} has no linear layer 'score' to compute values with"
            )

    @property
    def layers(self) -> Iterable[nn.Module]:
        names = self.inner._no_split_modules or ()
        return [module for module in self.inner.modules() if type(module).__name__ in names]

    def constants(self) -> dict[str, Tensor]:
        persistent = self.state_dict().keys()
        return {name: values for name, values in self.named_buffers() if name in persistent}

    def use(self, recompute: Recompute) -> None:
        """Set the recomputation in backward passes: ``off`` or ``full``."""
        if recompute == "selective":
            raise UsageError("implementation hf supports activation checkpointing off or full only")
        if recompute == "full":
            enable: Callable[..., None] = self.inner.activation_checkpointing_enable
            enable(dict(CHECKPOINT_OPTIONS))
            self.inner.train()  # it recomputes only in training mode; the config has no dropout

    def forward(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor | OnHost,
        max_len: int,
        step: Mapping[str, Any] | None = None,
    ) -> Any:
        """Logits [T, V], or hidden states [T, h] if they suffice.

        A generation ``step`` is a call of the model itself; it goes through this method because a
        sharded engine's hooks are on this module.

        Raises UsageError for a ``max_len`` at which results would depend on the batch.
        """
        if step is not None:
            return self.inner(**step)
        self._made.check_length(max_len)
        if isinstance(cu_seqlens, OnHost):
            cu_seqlens = cu_seqlens.tensor
        tokens = input_ids.shape[0]
        indices = (packed_rows(cu_seqlens, tokens), packed_positions(cu_seqlens, tokens))
        rows, places, lengths = upload((*indices, cu_seqlens.diff().long()), input_ids.device)
        shape = (cu_seqlens.shape[0] - 1, max_len)
        ids = input_ids.new_zeros(shape).index_put((rows, places), input_ids)
        columns = torch.arange(max_len, device=ids.device)
        mask = (columns < lengths[:, None]).long()
        whole = self.head == "lm" and not self._multiplies
        inner = self.inner if whole else self.inner.base_model
        output = inner(input_ids=ids, attention_mask=mask, use_cache=False)
        return (output.logits if whole else output.last_hidden_state)[rows, places]

    def logprobs(
        self,
        features: Tensor,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        temperature: float,
        support: Support | None = None,
    ) -> tuple[Tensor, Tensor]:
        batch = (input_ids, cu_seqlens, temperature)
        if not self._multiplies:
            return packed_logprobs_of_logits(features, *batch, support)
        weight = cast(Any, self.inner).get_output_embeddings().weight
        return packed_logprobs_and_entropy(features, weight, *batch, support=support)

    def values(self, features: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        score = cast(nn.Linear, self.inner.score)
        values = wide_linear(features, score.weight).squeeze(-1)
        return values if score.bias is None else values + score.bias

    def session(self, lengths: Sequence[int], longest: int, prefill_tokens: int) -> HFSession:
        """A session for prompts of ``lengths``, which get up to ``longest`` tokens in all.

        Whole prompts of together ``prefill_tokens`` are read at a time; a longer one by itself.
        """
        self._made.check_length(longest)
        return HFSession(self, self.inner.config, lengths, prefill_tokens)


def complete(config: HFConfig) -> HFConfig:
    """Return a config for servers, which need the class and the size of the vocabulary.

    Raises UsageError if transformers does not know the family, runs only its text part, or holds
    its tensors in another form than the family's files, which servers read.
    """
    try:
        with torch.device("meta"):
            model = _model(config, "lm", None, 0, torch.float32)
        reason = _other_form(model, config)
        found = {} if reason else _served_values(model)
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - transformers' classes may raise anything
        reason, found = f"{type(error).__name__}: {error}", {}
    if reason:
        raise UsageError(
            f"servers cannot load {config.model_type} models from implementation hf: {reason}; "
            "leave out rollout.backend, so that the trainers generate"
        )
    embedding = found.pop("embedding")
    return replace(config, values={**config.values, **found}, embedding=embedding)


def _other_form(model: PreTrainedModel, config: HFConfig) -> str:
    """Return why the family's files have another form than the model; empty if they do not."""
    made = model.config.model_type
    if made != config.model_type:
        return f"transformers runs only their text part ({made})"
    state = dict(model.state_dict())
    filed = revert_weight_conversion(model, dict(state))
    other = {name for name, values in state.items() if filed.get(name) is not values}
    if not other:
        return ""
    return f"transformers holds {min(other)} in another form than the files of the family"


def _served_values(model: PreTrainedModel) -> dict[str, Any]:
    """Return the fields that servers need, and ``embedding``, the embedding's name in files."""
    inner: Any = model
    table = inner.get_input_embeddings().weight
    (embedding,) = (name for name, each in model.named_parameters() if each is table)
    return {
        "architectures": [type(model).__name__],
        "vocab_size": table.shape[0],
        "tie_word_embeddings": inner.get_output_embeddings().weight is table,
        "embedding": embedding,
    }


def _stated(config: HFConfig) -> dict[str, Any]:
    return {name: deepcopy(value) for name, value in config.values.items() if name != "model_type"}


def tensor_specs(config: HFConfig, head: Head) -> tuple[dict[str, Index], dict[str, TensorSpec]]:
    """Return the shapes of a model's parameters, and its constants, by name, without making them.

    The names match `HFModel`. Raises UsageError if transformers cannot build the model.
    """
    with torch.device("meta"):
        model = _model(config, head, None, 0, torch.float32)
    stored = model.state_dict().keys()
    shapes = {MODULE + name: tuple(each.shape) for name, each in model.named_parameters()}
    constants = {
        MODULE + name: TensorSpec(tuple(each.shape), str(each.dtype).removeprefix("torch."))
        for name, each in model.named_buffers()
        if name in stored
    }
    return shapes, constants


def _model(
    config: HFConfig, head: Head, source: Path | None, seed: int, dtype: torch.dtype
) -> PreTrainedModel:
    task: Any = TASKS[head]
    more = {} if head == "lm" else {"num_labels": 1}
    try:
        if source is not None:
            with inputs.reading(source):
                settings = _without_dropout(AutoConfig.from_pretrained(source, **more))
                model, report = _loaded(task, source, settings, dtype)
            _require_finite(model, source)
            fresh = "score.weight" in report["missing_keys"]
        else:
            stated = {**_stated(config), **more}
            settings = _without_dropout(AutoConfig.for_model(config.model_type, **stated))
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)  # GPU generators are unchanged
                model = task.from_config(settings, dtype=dtype)
            fresh = True
    except UsageError:
        raise
    except (ValueError, KeyError, OSError) as error:
        raise UsageError(
            f"transformers cannot build a {config.model_type} model: {error}"
        ) from error
    if head == "value" and fresh and hasattr(model, "score"):
        nn.init.zeros_(model.score.weight)  # a new critic's values start at zero
    made: PreTrainedModel = model
    return made


def _loaded(
    task: Any, source: Path, settings: Any, dtype: torch.dtype
) -> tuple[Any, dict[str, Any]]:
    """The model of a folder, and transformers' report.

    During this, the weights of a pinned checkpoint are in memory twice.
    """
    options = {"config": settings, "dtype": dtype, "output_loading_info": True}
    if not is_pinned(source):
        loaded: tuple[Any, dict[str, Any]] = task.from_pretrained(source, **options)
        return loaded
    tensors = open_folder(source)
    state = {
        name: as_tensor(tensors.read(name, Box.whole(spec.shape)), spec.dtype)
        for name, spec in tensors.specs().items()
    }
    with torch.device("meta"):
        kind: Any = type(task.from_config(settings, dtype=dtype))
    made, report = kind.from_pretrained(None, state_dict=state, **options)
    return made, report


def _require_finite(model: PreTrainedModel, source: Path) -> None:
    """Raise UsageError if a parameter has NaN or infinite values, or a stored constant has NaN.

    Constants of masks may be infinite. ``source`` is the model's folder.
    """
    parameters = dict(model.named_parameters())
    for name, values in model.state_dict().items():
        if is_finite(values) or (name not in parameters and not values.isnan().any()):
            continue
        known = open_folder(source).specs()
        names = [name] if name in known else sorted(known)  # some are renamed or stacked
        raise UsageError(
            not_finite(source, names)
            or f"{source}: '{name}' is not finite in {values.dtype}, although its file is"
        )


def refuse_dropout(model: nn.Module) -> None:
    """Recomputation does not restore random states.

    Raises UsageError for dropout that the config does not control.
    """
    dropout = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    ]
    if dropout:
        raise UsageError(
            f"{type(model).__name__} has dropout that no field of its config turns off "
            f"({dropout[0]}), so old and new policies would be evaluated on different models"
        )


def _positions(model: nn.Module) -> int | None:
    """Return the size of the smallest position embedding; None if there is none.

    Rows that some families reserve at the start do not count (an ``offset``, or the rows up to the
    padding token).
    """
    tables = [
        table.num_embeddings - int(getattr(table, "offset", 0)) - _padding_rows(table)
        for name, table in model.named_modules()
        if isinstance(table, nn.Embedding) and POSITIONS.search(name) and not OTHER.search(name)
    ]
    return min(tables, default=None)


def _padding_rows(table: nn.Embedding) -> int:
    return 0 if table.padding_idx is None else table.padding_idx + 1


def _without_dropout(settings: Any) -> Any:
    """Disable all dropout: old and new policies must be evaluated on the same model."""
    for name, value in settings.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(settings, name, 0.0)
    return settings


FACTOR = 2.0**10
"""Scale of the trial logits. A power of two, so that scaling is exact; large, so that caps show."""


@torch.no_grad()
def only_multiplies(model: Any) -> bool:
    """Return whether logits are only a product of the last hidden states and the projection.

    ``model`` is a ``PreTrainedModel`` on the CPU. The projection is the weight of the output layer,
    without bias, cap or scale. Configs do not state this, so a few tokens are tried. Return False
    if they cannot be tried.
    """
    head, body = model.get_output_embeddings(), model.base_model
    if not isinstance(head, nn.Linear) or head.bias is not None or body is model:
        return False
    ids = torch.arange(min(4, head.out_features))[None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    head_inputs: list[Tensor] = []

    def amplify(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        head_inputs.append(inputs[0])
        return output * FACTOR

    handle = head.register_forward_hook(amplify)
    try:
        states, logits = body(**given).last_hidden_state, model(**given).logits
    except Exception:  # noqa: BLE001 - the model's own code may raise anything
        return False  # for example, it needs a GPU or other arguments
    finally:
        handle.remove()
    return (
        len(head_inputs) == 1
        and _equal(head_inputs[0], states)
        and _equal(logits, head(states) * FACTOR)
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    """Equal shapes and values; dtypes may differ."""
    return one.shape == other.shape and bool((one == other).all())


class HFSession:
    """A batch of rows that a model extends token by token.

    ``lengths`` [S] are the numbers of tokens read from each row. Prompts are padded on the left to
    the longest one, and the padding counts toward ``prefill_tokens``.
    """

    def __init__(
        self, model: HFModel, settings: Any, lengths: Sequence[int], prefill_tokens: int
    ) -> None:
        self._prompts = torch.tensor(lengths, dtype=torch.int64)
        device = next(model.inner.parameters()).device
        (self.lengths,) = upload([self._prompts], device)
        self._model, self._settings, self._prefill_tokens = model, settings, prefill_tokens
        self._parameters = frozenset(inspect.signature(model.inner.forward).parameters)
        self._begin(len(lengths))

    def _begin(self, rows: int) -> None:
        self._cache = DynamicCache(config=self._settings)
        self._mask = self.lengths.new_zeros((rows, 0))

    def prompts(self, input_ids: Tensor) -> Tensor:
        """Read the packed prompts [T]. Return the logits [S, V] after each prompt."""
        tokens, longest = input_ids.shape[0], int(self._prompts.max())
        cu_seqlens = torch.cat([self._prompts.new_zeros(1), self._prompts.cumsum(0)])
        places = packed_rows(cu_seqlens, tokens)
        columns = packed_positions(cu_seqlens, tokens) + (longest - self._prompts)[places]
        rows, columns = upload((places, columns), input_ids.device)
        ids = input_ids.new_zeros((self.lengths.shape[0], longest))
        ids[rows, columns] = input_ids
        mask = torch.zeros_like(ids)
        mask[rows, columns] = 1
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        each = max(1, self._prefill_tokens // longest)
        logits: list[Tensor] = []
        caches: list[DynamicCache] = []
        for first in range(0, len(ids), each):
            part = slice(first, first + each)
            self._begin(len(ids[part]))
            logits.append(self._read(ids[part], mask[part], positions[part]))
            caches.append(self._cache)
        self._cache, self._mask = _joined(caches), mask
        return torch.cat(logits)

    def next(self, tokens: Tensor, alive: Tensor) -> Tensor:
        """Read one more token [S] of each row.

        Return the logits [S, V] after it. Rows that are not ``alive`` [S] do not advance, and their
        logits are meaningless.
        """
        logits = self._read(
            tokens[:, None], self._mask.new_ones((len(tokens), 1)), self.lengths[:, None]
        )
        self.lengths = self.lengths + alive
        return logits

    def keep(self, rows: Tensor) -> None:
        """Continue with these rows only, in this order; a row may occur several times."""
        self.lengths, self._mask = self.lengths[rows], self._mask[rows]
        # Layers of convolutions or linear attention lack `batch_select_indices`, or select half.
        self._cache.reorder_cache(cast(torch.LongTensor, rows))

    def _read(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        self._mask = torch.cat((self._mask, mask), dim=1)
        arguments = {
            "input_ids": ids,
            "attention_mask": self._mask,
            "position_ids": positions,
            "past_key_values": self._cache,
            "use_cache": True,
            "logits_to_keep": 1,
        }
        missing = {"attention_mask", "past_key_values"} - self._parameters
        if missing:
            name = type(self._model.inner).__name__
            raise UsageError(
                f"{name} cannot generate with a key-value cache: its forward() lacks the arguments "
                f"{', '.join(sorted(missing))}"
            )
        step = {name: value for name, value in arguments.items() if name in self._parameters}
        output = self._model(ids, ids, 0, step)
        logits: Tensor = output.logits[:, -1]
        return logits


def _joined(caches: Sequence[DynamicCache]) -> DynamicCache:
    """One cache of the rows of all. The first one is changed, the others are emptied."""
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        states = [vars(layer) for layer in layers]
        for name in states[0]:
            joined = _joined_values([state[name] for state in states])
            for state in states[1:]:
                state[name] = None  # frees its memory before the next one is joined
            states[0][name] = joined
    return caches[0]


def _joined_values(values: Sequence[Any]) -> Any:
    """Join tensors that have a dim of rows, in lists and dicts too; others are equal."""
    first = values[0]
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(list(values))
    if isinstance(first, list):
        return [_joined_values(items) for items in zip(*values, strict=True)]
    if isinstance(first, dict):
        return {key: _joined_values([value[key] for value in values]) for key in first}
    return first

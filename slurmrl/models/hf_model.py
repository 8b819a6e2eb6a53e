"""Any causal model of transformers with the interface of the built-in decoders.

Sequences are packed into rows if they do not affect each other, else padded (`hf_rows`). Logits [T,
V] are made only if the model does more than multiply hidden states by its output layer.

Shapes: T packed tokens, L tokens of a sequence, h hidden size, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from slurmrl.errors import UsageError
from slurmrl.models.architecture import Head
from slurmrl.models.base import PackedModel, RowKind
from slurmrl.models.experts import Replayed
from slurmrl.models.hf_config import HFConfig, cache_refusal
from slurmrl.models.hf_loading import count_positions, make_model, only_multiplies, reject_dropout
from slurmrl.models.hf_pictures import PictureReader
from slurmrl.models.hf_routers import HFRouters
from slurmrl.models.hf_rows import (
    LONG,
    SHORT,
    choose_rows,
    difference,
    relative,
    row_places,
    tolerance,
    trial_tokens,
)
from slurmrl.models.hf_session import HFSession
from slurmrl.models.hf_tensor import HFTensorSplit, split_over
from slurmrl.models.parallel.split import Axis
from slurmrl.models.recompute import CHECKPOINT_OPTIONS, Recompute
from slurmrl.tensors.ops.arguments import OnHost, upload
from slurmrl.tensors.ops.collectives import whole_to_partial
from slurmrl.tensors.ops.logprobs import (
    Rows,
    packed_logprobs_and_entropy,
    packed_logprobs_of_logits,
    vocab_parallel_logprobs_and_entropy,
)
from slurmrl.tensors.ops.products import wide_linear
from slurmrl.tensors.ops.sampling import SamplingMasks


class PaddedBatches(Protocol):
    """Object that needs the places of packed tokens in padded batches."""

    def arrange_padded(self, places: Sequence[Tensor], shape: tuple[int, int]) -> None:
        """Prepare for a batch of ``shape`` with token t at (``places[0][t]``, ``places[1][t]``)."""
        ...


class HFModel(PackedModel):
    """A model with its weights, read from a folder or initialized by transformers."""

    adapters: PaddedBatches | None = None
    rows: RowKind
    tensor: HFTensorSplit | None = None
    """Division of the parameters among tensor ranks; None with one tensor rank."""
    tensor_rank = 0
    _axis = Axis()
    _vocabulary = 0
    """Number of rows of the whole output layer, if logits are only its product with hidden
    states."""

    def __init__(
        self,
        config: HFConfig,
        head: Head,
        *,
        source: Path | None,
        seed: int,
        dtype: torch.dtype,
    ) -> None:
        """Load the model from the folder ``source``; None: random weights from ``seed``."""
        super().__init__()
        self.config = config
        self.head = head
        self.inner = make_model(config, head, source, seed, dtype)
        self.inner.train(False)
        self._made = HFConfig(
            model_type=config.model_type,
            values=self.inner.config.to_dict(),
            positions=count_positions(self.inner),
        )
        """Config with transformers' defaults."""
        reject_dropout(self.inner)
        self._replayed: Replayed | None = None
        self._multiplies = head == "lm" and only_multiplies(self.inner)
        if self._multiplies:
            self._vocabulary = int(cast(Any, self.inner).get_output_embeddings().out_features)
        if head == "value" and not isinstance(getattr(self.inner, "score", None), nn.Linear):
            raise UsageError(
                f"{type(self.inner).__name__} has no linear layer 'score' to compute values with"
            )
        self._recomputes = self._generates = False
        self.pictures = PictureReader.of(self.inner)
        """Reader of the batches' pictures; None for a model that reads only text."""
        self._shown: Sequence[str] = ()
        self.rows = choose_rows(self, self.inner)

    def split(self, axis: Axis) -> None:
        """Keep only a tensor rank's part. Raises UsageError if the family cannot be split."""
        self.tensor, self.tensor_rank = split_over(self.inner, axis), axis.rank
        self._axis = axis

    @property
    def layers(self) -> Iterable[nn.Module]:
        """Blocks of the language model.

        An image encoder belongs to the root unit. Batches without images do not run the encoder,
        and all ranks must gather the same units.
        """
        inner = set[nn.Module]()
        if self.pictures is not None:
            for part in (self.pictures.tower, *self.pictures.unused):
                inner.update(part.modules())
        return [block for block in _blocks(self.inner) if block not in inner]

    def constants(self) -> dict[str, Tensor]:
        persistent = self.state_dict().keys()
        return {name: values for name, values in self.named_buffers() if name in persistent}

    def use(self, recompute: Recompute) -> None:
        """Set the recomputation in backward passes: ``off`` or ``full``."""
        if recompute == "selective":
            raise UsageError("implementation hf supports activation checkpointing off or full only")
        if recompute == "full":
            enable: Callable[..., None] = self.inner.activation_checkpointing_enable
            try:
                enable(dict(CHECKPOINT_OPTIONS))
            except ValueError as error:
                raise UsageError(f"gradient_checkpointing full is not allowed: {error}") from error
            self._recomputes = True

    def forward(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor | OnHost,
        max_len: int,
        step: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return logits [T, V], or hidden states [T, h] if they suffice.

        With ``step``, call transformers' model with these arguments, for generation. The call goes
        through this method, because a sharded engine's hooks are on this module.

        Raises UsageError for a ``max_len`` at which results would depend on the batch.
        """
        recomputes = self._recomputes and step is None
        if self.inner.training != recomputes:
            # Layers recompute, and ignore a cache, only in training mode. There is no dropout.
            self.inner.train(recomputes)
        if step is not None:
            return self.inner(**step)
        self._made.check_length(max_len)
        if isinstance(cu_seqlens, OnHost):
            cu_seqlens = cu_seqlens.tensor
        places = row_places(cu_seqlens, max_len, "single" if self._shown else self.rows)
        rows, columns = upload((places.rows, places.columns), input_ids.device)
        ids = input_ids.new_zeros(places.shape).index_put((rows, columns), input_ids)
        if self._replayed is not None:
            self._replayed.place(rows * max_len + columns, ids.numel())
        if self.adapters is not None:
            self.adapters.arrange_padded((rows, columns), places.shape)
        given = {"input_ids": ids}
        if self.pictures is not None:
            given = self.pictures.arguments(ids, self.pictures.load(self._shown, ids.device))
        if places.positions is not None:
            (given["position_ids"],) = upload((places.positions,), input_ids.device)
        whole = self.head == "lm" and not self._multiplies
        inner = self.inner if whole else self.inner.base_model
        output = inner(**given, use_cache=False)
        found = (output.logits if whole else output.last_hidden_state)[rows, columns]
        if self.pictures is None or not torch.is_grad_enabled():
            return found
        # FSDP needs a gradient of each parameter on all ranks, even on ranks without images.
        sums = [parameter.sum() for parameter in self.pictures.trained()]
        return found + 0.0 * torch.stack(sums).sum() if sums else found

    def logprobs(
        self,
        features: Tensor,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        temperature: float,
        masks: SamplingMasks | None = None,
    ) -> tuple[Tensor, Tensor]:
        batch = (input_ids, cu_seqlens, temperature)
        if not self._multiplies:
            return packed_logprobs_of_logits(features, *batch, masks)
        weight = cast(Any, self.inner).get_output_embeddings().weight
        compute = None
        if (own := weight.shape[0]) < self._vocabulary:
            rows = Rows(self._axis.group, own)
            features = whole_to_partial(features, rows.group)
            compute = partial(vocab_parallel_logprobs_and_entropy, rows=rows)
        return packed_logprobs_and_entropy(features, weight, *batch, masks=masks, compute=compute)

    def values(self, features: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        score = cast(nn.Linear, self.inner.score)
        values = wide_linear(features, score.weight).squeeze(-1)
        return values if score.bias is None else values + score.bias

    @cached_property
    def routers(self) -> HFRouters:
        """Routers of the model. Raises UsageError if their choices cannot be replayed."""
        return HFRouters(self.inner)

    @contextmanager
    def routed(self, routes: Replayed) -> Iterator[None]:
        """Make the blocks with experts follow ``routes`` in this context and in backward passes."""
        self._replayed = self.routers.routes = routes
        try:
            yield
        finally:
            self._replayed = self.routers.routes = None

    @contextmanager
    def showing(self, paths: Sequence[str]) -> Iterator[None]:
        """Give prepared pictures (`tensors.pictures`) to batches in this context.

        ``paths`` has one path for each sequence. Sequences are padded, not packed.
        """
        assert self.pictures is not None, "the plan rejects images for other models"
        self._shown = paths
        try:
            yield
        finally:
            self._shown = ()

    def check_length(self, tokens: int) -> None:
        """Check a length like `HFConfig.check_length`, but with transformers' defaults."""
        self._made.check_length(tokens)

    def require_generation(self) -> None:
        """Raise UsageError if generation with the cache gives other outputs than training.

        The first call computes a few tokens.
        """
        if self._generates:
            return
        if reason := cache_refusal(self._made.values):
            raise UsageError(reason)
        check_generation(self, self.inner)
        self._generates = True

    def session(
        self,
        lengths: Sequence[int],
        prefill_tokens: int,
        width: int = 0,
        *,
        experts: bool = False,
        pictures: Sequence[str] = (),
    ) -> HFSession:
        """Return a session for prompts of ``lengths``, padded to at least ``width`` columns.

        Prompts are prefilled together up to ``prefill_tokens`` in total. A longer prompt is
        prefilled separately. With ``experts``, experts are recorded. ``pictures`` are the paths of
        the prompts' pictures, as for `showing`. Raises UsageError as `require_generation` does.
        """
        self.require_generation()
        return HFSession(
            self,
            self.inner,
            lengths,
            prefill_tokens,
            width,
            routers=self.routers if experts else None,
            reader=self.pictures,
            pictures=pictures,
        )


def _blocks(inner: PreTrainedModel) -> list[nn.Module]:
    """Return the outermost modules that transformers does not split over devices.

    If a family names none, return the modules that support recomputation. Exclude a block that
    shares a parameter with another block, because a parameter belongs to one shard.
    """
    names = inner._no_split_modules or ()
    found = [module for module in inner.modules() if type(module).__name__ in names] or [
        module for module in inner.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    nested = {id(below) for module in found for below in module.modules() if below is not module}
    outer = [module for module in found if id(module) not in nested]
    uses = Counter(id(parameter) for module in outer for parameter in module.parameters())
    return [module for module in outer if all(uses[id(p)] == 1 for p in module.parameters())]


ADVICE = "Set rollout.backend to sglang or vllm if such a server knows the family"
NEW = 2
"""Number of tokens that the test generates after each prompt."""


@torch.no_grad()
def check_generation(model: nn.Module, inner: PreTrainedModel) -> None:
    """Raise UsageError if logits of generated tokens differ from logits of the training pass.

    ``model`` calls ``inner``, whose weights are gathered.
    """
    name = inner.config.model_type
    try:
        found = difference(inner, lambda trial: _difference(model, inner, trial))
    except (ValueError, AttributeError, TypeError, NotImplementedError) as error:
        raise UsageError(
            f"{name} models cannot generate with implementation hf: a test of their cache failed "
            f"({error}). {ADVICE}"
        ) from error
    if found > tolerance(inner):
        raise UsageError(
            f"{name} models cannot generate with implementation hf: in a test, logits of "
            f"generated tokens differ by {found:.1%} from a pass over the whole sequence. {ADVICE}"
        )


def _difference(model: nn.Module, inner: PreTrainedModel, trial: int) -> float:
    """Return the relative difference between logits from generation and from one whole pass.

    The test has two prompts and pads the shorter one. Before the new tokens, another session
    begins, and the rows of the first session change places.
    """
    ids = trial_tokens(inner, trial, LONG + SHORT)
    rows = (ids[:LONG], ids[LONG:])
    wanted = [_logits(model, row)[-NEW - 1 :] for row in rows]
    lengths = [LONG - NEW, SHORT - NEW]
    session, other = (HFSession(model, inner, lengths, 2 * LONG) for _ in range(2))
    prompts = torch.cat([row[:-NEW] for row in rows])
    found = [session.prompts(prompts)]
    other.prompts(prompts.flip(0))
    session.keep(torch.tensor([1, 0], device=prompts.device))
    alive = torch.ones(2, dtype=torch.bool, device=prompts.device)
    for place in range(-NEW, 0):
        read = session.next(torch.stack([rows[1][place], rows[0][place]]), alive)
        found.append(read.flip(0))
    return relative(torch.stack(found, dim=1), torch.stack(wanted))


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits [L, V] of one sequence."""
    step = {"input_ids": ids[None], "use_cache": False}
    logits: Tensor = model(ids, ids, 0, step).logits[0]
    return logits

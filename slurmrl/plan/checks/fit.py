"""Whether an architecture fits a layout: every rule that can be checked before anything runs.

Each rule is a function that yields what does not fit. To add one, write the function and list it in
RULES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from slurmrl.config.allocation import Allocation
from slurmrl.config.schema import Model, ParallelSizes
from slurmrl.plan.engine_rules import ENGINES
from slurmrl.plan.estimates.lengths import Lengths
from slurmrl.plan.estimates.shape import ModelShape


@dataclass(frozen=True)
class Fit:
    """One model on one layout. ``minibatches`` are a step's optimizer steps; 0 if not trained."""

    model: Model
    allocation: Allocation
    shape: ModelShape | None
    lengths: Lengths | None
    minibatches: int = 0

    @property
    def sizes(self) -> ParallelSizes:
        return self.model.model or ParallelSizes()

    @property
    def virtual(self) -> int:
        return self.sizes.virtual_pipeline_model_parallel_size or 1


@dataclass(frozen=True)
class Misfit:
    """A size that does not fit the architecture, the data or the other sizes."""

    axis: str
    """``tp``, ``pp``, ``cp``, ``ep``, ``etp``, ``dp``, ``length``, or a field of ``model``."""
    reason: str
    value: str = ""
    """What is not allowed; empty: the layout as a whole."""


Found: TypeAlias = Iterator[Misfit]
Rule: TypeAlias = Callable[[Fit], Found]


def check(fit: Fit) -> Found:
    """Everything that does not fit; only the first misfit of an axis, because another size may
    solve all."""
    reported = set()
    for rule in RULES:
        for misfit in rule(fit):
            part = PART_OF.get(misfit.axis, misfit.axis)
            if part not in reported:
                yield misfit
            reported.add(part)


def divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, min(number, 256) + 1) if number % size == 0)


def _indivisible(letter: str, size: int, what: str, number: int) -> str:
    return f"{letter}{size} does not divide {what} {number}; allowed: {divisors(number)}"


def _widths(fit: Fit) -> Found:
    tp, shape = fit.allocation.sizes["tp"], fit.shape
    if tp == 1 or shape is None:
        return
    widths = [("num_attention_heads", shape.heads), ("hidden_size", shape.hidden)]
    if shape.expert_layers < shape.layers:
        widths.append(("intermediate_size", shape.inner))
    if shape.expert_layers and fit.allocation.experts is None:
        widths.append(("the inner size of experts", shape.expert_inner))
    for what, number in widths:
        if number % tp:
            yield Misfit("tp", _indivisible("t", tp, what, number))
            return
    rules = ENGINES.get(fit.allocation.backend)
    if shape.kv_heads % tp and rules is not None and not rules.copies_heads:
        yield Misfit("tp", _indivisible("t", tp, "num_key_value_heads", shape.kv_heads))
    elif shape.kv_heads % tp and tp % shape.kv_heads:
        yield Misfit(
            "tp",
            f"t{tp} neither divides num_key_value_heads {shape.kv_heads} nor is a multiple of it "
            "(heads are divided, or replicated as a whole)",
        )


def padded_vocabulary(fit: Fit) -> int | None:
    """Rows of the embedding, including the padding that makes it divisible."""
    if fit.shape is None:
        return None
    tp = fit.allocation.sizes["tp"]
    megatron = fit.allocation.backend == "megatron"
    multiple = tp * (fit.sizes.make_vocab_size_divisible_by if megatron else 1)
    return -(-fit.shape.vocabulary // multiple) * multiple


def _vocabulary(fit: Fit) -> Found:
    """Padding makes every size divisible, but each rank must hold at least one real token."""
    padded, tp = padded_vocabulary(fit), fit.allocation.sizes["tp"]
    if padded is None or fit.shape is None or tp == 1:
        return
    if padded // tp * (tp - 1) < fit.shape.vocabulary:
        return
    size, multiple = fit.shape.vocabulary, fit.sizes.make_vocab_size_divisible_by
    reason = (
        f"vocab_size {size}, padded to {padded}, leaves at least one of t{tp} ranks without a token"
    )
    most = next((each for each in (64, 32, 16, 8, 4, 2, 1) if _is_spread(size, tp, each)), None)
    if padded // tp == 1 or most is None or most >= multiple:
        yield Misfit("tp", reason)
        return
    yield Misfit("make_vocab_size_divisible_by", f"{reason}; set it to {most}, it is {multiple}")


def _is_spread(vocabulary: int, tp: int, multiple: int) -> bool:
    """Return whether each rank holds a token if the rows are padded to a multiple."""
    rows = -(-vocabulary // (tp * multiple)) * multiple
    return rows * (tp - 1) < vocabulary


def _layers(fit: Fit) -> Found:
    pp, virtual = fit.allocation.sizes["pp"], fit.virtual
    if virtual > 1 and pp == 1:
        yield Misfit(
            "virtual_pipeline_model_parallel_size",
            "it needs more than one pipeline stage (p above 1)",
            f"{virtual}",
        )
    elif fit.shape is not None and fit.shape.layers % pp:
        yield Misfit("pp", _indivisible("p", pp, "num_hidden_layers", fit.shape.layers))
    elif fit.shape is not None and fit.shape.layers % (pp * virtual):
        yield Misfit(
            "virtual_pipeline_model_parallel_size",
            f"p{pp} times {virtual} does not divide num_hidden_layers {fit.shape.layers}",
            f"{virtual}",
        )


def _sequence_parallel(fit: Fit) -> Found:
    if fit.sizes.sequence_parallel and fit.allocation.sizes["tp"] == 1:
        yield Misfit(
            "sequence_parallel",
            "sequence parallelism needs tensor parallelism (t above 1)",
            "true",
        )


def _whole_sequences(fit: Fit) -> Found:
    rules = ENGINES.get(fit.allocation.backend)
    if rules is None or rules.experts_of_whole_sequences:
        return
    trains_experts = fit.minibatches > 0 and fit.shape is not None and fit.shape.experts > 0
    split = fit.allocation.sizes["tp"] > 1
    if trains_experts and split and fit.sizes.sequence_parallel is False:
        yield Misfit(
            "sequence_parallel",
            f"{fit.allocation.backend} trains experts on several tensor ranks with sequence "
            "parallelism only",
            "false",
        )


def _context_heads(fit: Fit) -> Found:
    """In attention, context-parallel ranks exchange tokens for heads."""
    tp, cp, shape = fit.allocation.sizes["tp"], fit.allocation.sizes["cp"], fit.shape
    rules = ENGINES.get(fit.allocation.backend)
    if cp == 1 or shape is None or rules is None or not rules.context_heads or shape.heads % tp:
        return
    heads, kv_heads = shape.heads // tp, shape.kv_heads_of_rank(tp)
    if heads % cp:
        yield Misfit("cp", _indivisible("c", cp, "the attention heads of a rank,", heads))
    elif kv_heads % cp and cp % kv_heads:
        yield Misfit(
            "cp",
            f"c{cp} neither divides the {kv_heads} key and value heads of a rank nor is a multiple "
            "of them (heads are divided, or replicated as a whole)",
        )


def _positions(fit: Fit) -> Found:
    if fit.shape is None or fit.lengths is None or fit.shape.positions is None:
        return
    if not fit.lengths.assumed and fit.lengths.longest > fit.shape.positions:
        yield Misfit(
            "length",
            f"sequences of up to {fit.lengths.longest} tokens exceed max_position_embeddings "
            f"{fit.shape.positions}",
        )


def _experts(fit: Fit) -> Found:
    allocation, shape = fit.allocation, fit.shape
    ep, etp = allocation.sizes["ep"], allocation.etp
    if shape is None or (ep == 1 and etp == 1):
        return
    if not shape.experts:
        axis, size = ("ep", f"e{ep}") if ep > 1 else ("etp", f"t{etp} of ffn")
        yield Misfit(axis, "the model has no experts", size)
    elif shape.experts % ep:
        yield Misfit("ep", _indivisible("e", ep, "the number of experts", shape.experts))
    elif shape.expert_inner % etp:
        yield Misfit("etp", _indivisible("t", etp, "moe_intermediate_size", shape.expert_inner))


def _microbatches(fit: Fit) -> Found:
    """Each optimizer step needs at least one micro-batch for each pipeline stage."""
    pp = fit.allocation.sizes["pp"]
    if fit.lengths is None or not fit.minibatches:
        return
    dp = fit.allocation.sizes["dp"]
    each = fit.lengths.sequences // dp // fit.minibatches
    if each < 1:
        yield Misfit(
            "dp",
            f"d{dp} leaves a rank without a sequence in each of {fit.minibatches} minibatches of "
            f"{fit.lengths.sequences} sequences",
        )
    elif each < pp:
        yield Misfit(
            "pp",
            f"p{pp} stages need at least as many micro-batches, but d{dp} and {fit.minibatches} "
            f"minibatches of {fit.lengths.sequences} sequences leave {each}",
        )
    elif fit.virtual > 1 and each % pp:
        yield Misfit(
            "virtual_pipeline_model_parallel_size",
            f"the interleaved schedule needs a multiple of p{pp} micro-batches, and a rank's "
            f"minibatch has {each} sequences",
            f"{fit.virtual}",
        )


PART_OF: Final = {
    "make_vocab_size_divisible_by": "tp",
    "virtual_pipeline_model_parallel_size": "pp",
}
"""Fields that are valid or invalid together with an axis."""
RULES: Final[tuple[Rule, ...]] = (
    _widths,
    _vocabulary,
    _layers,
    _sequence_parallel,
    _whole_sequences,
    _context_heads,
    _positions,
    _experts,
    _microbatches,
)

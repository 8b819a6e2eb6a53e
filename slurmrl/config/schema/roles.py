"""The models of a trial: layout, precision, adapters and optimizer of each role."""

from __future__ import annotations

from collections.abc import Mapping
from math import cos, pi
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import Field, Strict, field_validator, model_validator

from slurmrl.config.schema.base import (
    Fraction,
    HubPathText,
    Line,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Section,
    Sequence,
)

TRIAL_PREFIX = "trial:"


class ParallelSizes(Section):
    """The layout in the terms of Megatron and RLinf.

    If `backend` has dimensions too, both must agree. If `backend` is only an engine's name, these
    sizes define the layout, and data parallelism uses the remaining GPUs of `cluster.hosts`.
    """

    tensor_model_parallel_size: PositiveInt | None = None
    """Ranks that share each matrix: `t`."""
    pipeline_model_parallel_size: PositiveInt | None = None
    """Stages that share the layers: `p`."""
    context_parallel_size: PositiveInt | None = None
    """Ranks that share each sequence: `c`."""
    expert_model_parallel_size: PositiveInt | None = None
    """Ranks that share the experts: `e`."""
    expert_tensor_parallel_size: PositiveInt | None = None
    """Ranks that share each expert. Default: the tensor size, as in Megatron."""
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    """Model chunks per pipeline stage (interleaved schedule); requires more than one stage."""
    sequence_parallel: bool | None = None
    """Split the activations between tensor-parallel blocks along the sequence; requires a tensor
    size above 1. Default: on for megatron with a tensor size above 1."""
    make_vocab_size_divisible_by: PositiveInt = 128
    """megatron pads the vocabulary to a multiple of this number times the tensor size."""


ALL_LINEAR: Final = "all-linear"
TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a decoder's layer, by their names in the files."""


class Lora(Section):
    """Train low-rank adapters instead of the weights (LoRA, Hu et al. 2021).

    A target's weight W becomes W + scale * B A, where A has `rank` rows and B has `rank` columns. W
    is frozen, in the role's `dtype`. Only A and B, in float32, are trained and committed; for a
    critic, the value head too. LoRA needs fsdp with the built-in decoder (docs/lora.md).
    """

    rank: PositiveInt = 16
    """Rows of A and columns of B."""
    alpha: PositiveFloat = 32.0
    """The scale is alpha / rank."""
    targets: Literal["all-linear"] | Sequence[str] = ALL_LINEAR
    """The linear layers with an adapter: a list of `q_proj`, `k_proj`, `v_proj`, `o_proj`,
    `gate_proj`, `up_proj` and `down_proj`, or `all-linear` for all that the model has."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability with which each input of A is zero in training, rounded to a multiple of 1/65536.
    The draws depend on the seed, the step, and the token's sample and position, not on the layout.
    Keep it at 0 for policy gradients: dropout changes their probability ratios."""
    rslora: bool = False
    """Whether the scale is alpha / sqrt(rank) (Kalajdzievski 2023), which suits large ranks."""

    @field_validator("targets")
    @classmethod
    def _known(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(targets, str):
            return targets
        rule = f"allowed: '{ALL_LINEAR}', or a list of {', '.join(TARGETS)}"
        unknown = [name for name in targets if name not in TARGETS]
        if unknown:
            raise ValueError(f"'{unknown[0]}' is not allowed; {rule}")
        if not targets or len(set(targets)) < len(targets):
            raise ValueError(f"an empty list or a name twice is not allowed; {rule}")
        return targets

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def adapts(self, name: str) -> bool:
        """Whether a linear layer, by the last part of its name, has an adapter."""
        return name in (TARGETS if self.targets == ALL_LINEAR else self.targets)


Beta = Annotated[float, Field(ge=0, lt=1)]
Kind = Literal["adamw", "adam", "sgd"]

MOMENTS: Final[Mapping[Kind, tuple[str, ...]]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum",),
}
"""State of each optimizer for a parameter, by the names in checkpoints."""

USERS: Final[Mapping[str, tuple[Kind, ...]]] = {
    "betas": ("adamw", "adam"),
    "momentum": ("sgd",),
    "eps": ("adamw", "adam"),
}
"""Settings that only some optimizers use."""

_WHOLE: Final = "it needs whole matrices, and a rank holds only a part of each"
LEFT_OUT: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("adamax", "nadam", "radam", "rmsprop", "adagrad", "adadelta"), "it is no longer supported"
    ),
    "muon": _WHOLE,
    "adafactor": _WHOLE,
    "lbfgs": "it computes the loss several times a step",
    "sparseadam": "it is for sparse gradients, which no model here has",
    "rprop": "it is for gradients of a whole dataset and has neither schedule nor decay",
    "asgd": "its purpose is averaged weights, which are neither used nor exported",
}
"""torch's optimizers that are not supported, in lower case, with the reason."""


class Optimizer(Section):
    """The optimizer and its schedule.

    A role that is not trained ignores it. The defaults suit fine-tuning with `adamw`. torch's own
    learning rate is 0.001, its `betas` are 0.9 and 0.999.
    """

    name: Kind = "adamw"
    """Optimizer of torch.optim. Options that are not listed here have torch's defaults. `sgd` is
    plain gradient descent, with momentum if `momentum` is above 0."""
    lr: NonNegativeFloat = 1e-5
    """Learning rate after warm-up."""
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = (0.9, 0.95)
    """Decay rates of the first and second moments of `adamw` and `adam`."""
    momentum: Beta = 0.0
    """Momentum factor of `sgd`; 0 disables momentum."""
    eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment, to keep the denominator above 0. `sgd` does
    not use it."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of matrices (not of norms and biases) per step: `adamw` and `sgd` shrink weights
    by this times the learning rate, `adam` adds this times the weights to the gradient."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls from the end of warm-up to the end of the schedule."""
    schedule_steps: PositiveInt | None = None
    """Length of the schedule in optimizer steps, including warm-up. Default: the whole run, so that
    the schedule changes with `total_steps`."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of the schedule and after it, as a fraction of `lr`."""
    gradient_clip: PositiveFloat | None = 1.0
    """Maximum norm of the whole gradient; null disables clipping."""

    @field_validator("name", mode="before")
    @classmethod
    def _left_out(cls, name: Any) -> Any:
        reason = LEFT_OUT.get(name.lower()) if isinstance(name, str) else None
        if reason is not None:
            raise ValueError(f"{reason}; allowed: {', '.join(get_args(Kind))}")
        return name

    def learning_rate(self, step: int, run_steps: int) -> float:
        """Return the rate of optimizer step ``step`` (from 0) in a run of ``run_steps``.

        Warm-up rises linearly and ends at ``lr``. Then the rate is constant, linear or half a
        cosine down to ``lr * min_lr_ratio`` at the schedule's last step, where it stays.
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        falling_steps = max(1, self.last_step(run_steps) - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / falling_steps)
        left = 1.0 - progress if self.schedule == "linear" else 0.5 * (1.0 + cos(pi * progress))
        return self.lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * left)

    def last_step(self, run_steps: int) -> int:
        """The optimizer step (from 0) at which the schedule ends."""
        return (self.schedule_steps or run_steps) - 1

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the state tensors of each parameter, which have its shape."""
        return tuple(kept for kept in MOMENTS[self.name] if kept != "momentum" or self.momentum)

    @property
    def unused(self) -> tuple[str, ...]:
        """Settings that differ from their defaults and that this optimizer does not use."""
        fields = type(self).model_fields
        return tuple(
            name
            for name, users in USERS.items()
            if self.name not in users and getattr(self, name) != fields[name].default
        )


class Model(Section):
    """One role.

    The other roles inherit from the actor each of these that they do not set: the weights (`path`
    or `architecture`; `teacher` and `reward_model` must set theirs), `implementation`, `tokenizer`,
    `backend`, `gpus`, `model`, `dtype`, `gradient_checkpointing`, `transformer_engine` and
    `max_tokens_per_microbatch`, but not `lora` and the optimizer.
    """

    path: HubPathText | None = None
    """Folder in Hugging Face format, `org/name` or `hf://org/name@revision` for a model of the
    Hugging Face hub, or `trial:EXPERIMENT/TRIAL` for that trial's newest export,
    `trial:EXPERIMENT/TRIAL@STEP` for its export of a step and `@last` for that of its newest
    checkpoint. A model that is not trained needs no export: it is the checkpoint of that step
    (docs/checkpoints.md)."""
    architecture: dict[str, Any] | None = None
    """A new model instead of a path, as in a Hugging Face `config.json`: `model_type`,
    `hidden_size`, … Its weights are initialized with the run's seed."""
    implementation: Literal["builtin", "hf"] = "builtin"
    """Model code: `builtin` is the built-in decoder for the supported families; `hf` is any causal
    language model of transformers, on fsdp with data parallelism only, and slower."""
    tokenizer: HubPathText | None = None
    """Folder of the tokenizer, or a repository of the hub. Default: `path`."""
    backend: Line = ""
    """Engine and layout: `fsdp:d2`. Default of the actor: `fsdp:d1`."""
    gpus: Line = ""
    """GPUs for this role, numbered over all hosts of the trial: `0-3`. Roles may share GPUs.
    Default: as many as the layout needs, from 0."""
    model: ParallelSizes | None = None
    """The layout in the terms of Megatron and RLinf, instead of or in addition to `backend`."""
    dtype: Annotated[
        Literal["float32", "bfloat16"], Field(json_schema_extra={"default": "by device"})
    ] = "float32"
    """Data type of the computation. A trained role keeps its weights in float32. Default: bfloat16
    on GPUs, float32 on CPUs."""
    gradient_checkpointing: bool | Literal["off", "selective", "full"] = False
    """Recompute activations in the backward pass: less memory, more time. `full` (or true) keeps
    only each layer's input and takes about a third more time. `selective` takes about a sixth more:
    it recomputes the feed-forward block and the norms, but keeps queries, keys, values and the
    result of attention. `off` (or false) keeps all activations."""
    max_tokens_per_microbatch: PositiveInt = 16384
    """Maximum number of tokens in a micro-batch of one rank; with `implementation: hf`, padding
    counts too. A prefix that several sequences share counts once where fsdp reads it once (on
    CPUs). A longer sequence gets a micro-batch of its own."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory and copy each layer to the GPU
    when it computes: much less GPU memory, much more time. The optimizer runs on the CPU. fsdp
    only."""
    offload: bool = False
    """Keep weights and optimizer state in host memory except during the role's own calls: GPU
    memory for the other models and for generation, at the cost of copies around each call."""
    transformer_engine: bool | None = None
    """Whether megatron builds its layers from TransformerEngine's linear layers, norms and grouped
    experts. Default: true in bfloat16 on GPUs if a release that megatron-core supports is
    installed. In float32, its matrix products use TF32."""
    ema: PositiveFraction | None = None
    """For `ref` on fsdp: the reference follows the actor. After each training step, each of its
    weights becomes ema times the actor's plus (1 - ema) times its own. They are then float32, and
    checkpoints hold them. Default: the reference does not change."""
    lora: Lora | None = None
    """Train low-rank adapters of frozen weights, for a trained role with a `path`. The reference is
    then the actor without its adapters, on the actor's GPUs and without memory of its own, unless
    it has weights, a layout or a `dtype` of its own. Default: train all weights."""
    optimizer: Optimizer = Optimizer()

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if self.path is not None and self.architecture is not None:
            raise ValueError("path and architecture exclude each other: set only one of them")
        return self

    @property
    def recompute(self) -> Literal["off", "selective", "full"]:
        """The value of `gradient_checkpointing`, with true and false spelled out."""
        if isinstance(self.gradient_checkpointing, bool):
            return "full" if self.gradient_checkpointing else "off"
        return self.gradient_checkpointing

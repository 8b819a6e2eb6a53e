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
    Unit,
)

TRIAL_PREFIX = "trial:"


class ParallelSizes(Section):
    """The layout in the terms of Megatron and RLinf.

    If `backend` has dimensions too, both must agree. If `backend` is only the name of an engine,
    these sizes define the layout, and data parallelism uses the remaining GPUs of `cluster.hosts`.
    Example: `{tensor_model_parallel_size: 4, pipeline_model_parallel_size: 2}`
    """

    tensor_model_parallel_size: PositiveInt | None = None
    """Ranks that share each matrix (`t`). Default: the size in `backend`, or 1. Example: `4`"""
    pipeline_model_parallel_size: PositiveInt | None = None
    """Stages that share the layers (`p`). Default: the size in `backend`, or 1. Example: `2`"""
    context_parallel_size: PositiveInt | None = None
    """Ranks that share each sequence (`c`). Default: the size in `backend`, or 1. Example: `2`"""
    expert_model_parallel_size: PositiveInt | None = None
    """Ranks that share the experts (`e`). Default: the size in `backend`, or 1. Example: `8`"""
    expert_tensor_parallel_size: PositiveInt | None = None
    """Ranks that share each expert. Default: the tensor size, as in Megatron. Example: `1`"""
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    """Model chunks per pipeline stage (interleaved schedule). Requires more than one stage.
    Default: 1. Example: `2`"""
    sequence_parallel: bool | None = None
    """Split the activations between tensor-parallel blocks along the sequence. Requires a tensor
    size above 1. Default: true for megatron with a tensor size above 1."""
    make_vocab_size_divisible_by: PositiveInt = 128
    """Divisor of the padded vocabulary: megatron pads the vocabulary to a multiple of this number
    times the tensor size."""


ALL_LINEAR: Final = "all-linear"
TARGETS: Final = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
)
"""Names, in weight files, of the linear layers in a decoder layer."""


class Lora(Section):
    """Train low-rank adapters instead of the weights (LoRA, Hu et al. 2021).

    The weight W of a target becomes W + scale * B A. A has `rank` rows and B has `rank` columns. W
    is frozen and has the role's `dtype`. Only A and B, in float32, are trained and committed; a
    critic also trains its value head. LoRA requires fsdp (docs/lora.md).
    Example: `{rank: 16}`
    """

    rank: PositiveInt = 16
    """Rank of the adapters: rows of A and columns of B."""
    alpha: PositiveFloat = 32.0
    """Numerator of the scale, which is alpha / rank."""
    targets: Literal["all-linear"] | Sequence[str] | None = None
    """Linear layers with an adapter: `all-linear` for all except the output layer, or a list of
    names. The built-in decoder knows `q_proj`, `k_proj`, `v_proj`, `o_proj`, `gate_proj`,
    `up_proj`, `down_proj` and the names of latent attention. With `implementation: hf`, a name
    selects every linear layer whose name ends with it, as in PEFT. Default: `all-linear`; with
    `implementation: hf`, the names that PEFT uses for the family, if it lists any
    (docs/lora.md#targets). Example: `[q_proj, v_proj]`"""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability with which each input of A is zero in training, rounded to a multiple of 1/65536.
    The random numbers depend on the seed, the step, and the token's sample and position, not on the
    layout. Keep 0 for policy gradients: dropout changes their probability ratios. Example: `0.05`
    """
    rslora: bool = False
    """Use the scale alpha / sqrt(rank) (Kalajdzievski 2023), which suits large ranks."""

    @field_validator("targets")
    @classmethod
    def _distinct(cls, targets: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if targets is None or isinstance(targets, str):
            return targets
        if not all(targets) or not targets or len(set(targets)) < len(targets):
            raise ValueError(
                "must have at least one name, no empty name and no name twice; allowed: "
                f"'{ALL_LINEAR}', or a list of names of linear layers"
            )
        return targets

    @property
    def scale(self) -> float:
        """Factor of the product B A."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def adapts(self, name: str) -> bool:
        """Return whether layers whose full names end with ``name`` have adapters."""
        return name in (TARGETS if self.targets in (None, ALL_LINEAR) else self.targets)


Beta = Annotated[float, Field(ge=0, lt=1)]
Kind = Literal["adamw", "adam", "sgd"]

MOMENTS: Final[Mapping[Kind, tuple[str, ...]]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum",),
}
"""Mapping from an optimizer to the names, in checkpoints, of a parameter's state tensors."""

USERS: Final[Mapping[str, tuple[Kind, ...]]] = {
    "betas": ("adamw", "adam"),
    "momentum": ("sgd",),
    "eps": ("adamw", "adam"),
}
"""Mapping from a setting to the optimizers that use it; all optimizers use unlisted settings."""

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
"""Mapping from an unsupported optimizer of torch, in lower case, to the reason."""


class Optimizer(Section):
    """The optimizer and its schedule.

    A role that is not trained ignores this section. The defaults suit fine-tuning with `adamw`;
    torch's defaults are a learning rate of 0.001 and betas of 0.9 and 0.999. Example: `{lr: 1e-6,
    schedule: cosine, warmup_steps: 20}`
    """

    name: Kind = "adamw"
    """Optimizer of torch.optim. Options without a key here have torch's defaults. `sgd` is plain
    gradient descent, with momentum if `momentum` is above 0."""
    lr: NonNegativeFloat = 1e-5
    """Learning rate after warm-up. Example: `1e-6`"""
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = (0.9, 0.95)
    """Decay rates of the first and second moments of `adamw` and `adam`."""
    momentum: Beta = 0.0
    """Momentum factor of `sgd`. 0 disables momentum. Example: `0.9`"""
    eps: PositiveFloat = 1e-8
    """Number that `adamw` and `adam` add to the square root of the second moment, to keep the
    denominator above 0."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of matrices per step; norms and biases do not decay. `adamw` and `sgd` shrink
    weights by this number times the learning rate. `adam` adds this number times the weights to the
    gradient. Example: `0.01`"""
    warmup_steps: Annotated[NonNegativeInt, Unit("optimizer steps")] = 0
    """Steps over which the learning rate rises linearly from 0. Example: `20`"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls from the end of warm-up to the end of the schedule. Example:
    `cosine`"""
    schedule_steps: Annotated[PositiveInt, Unit("optimizer steps")] | None = None
    """Length of the schedule, including warm-up. Default: the entire run, so that the schedule
    changes with `total_steps`. Example: `1000`"""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of the schedule and after it, as a fraction of `lr`. Example: `0.1`
    """
    gradient_clip: PositiveFloat | None = 1.0
    """Maximum norm of the whole gradient. `null` disables clipping."""

    @field_validator("name", mode="before")
    @classmethod
    def _left_out(cls, name: Any) -> Any:
        reason = LEFT_OUT.get(name.lower()) if isinstance(name, str) else None
        if reason is not None:
            raise ValueError(f"{reason}; allowed: {', '.join(get_args(Kind))}")
        return name

    def learning_rate(self, step: int, run_steps: int) -> float:
        """Return the learning rate of optimizer step ``step`` (from 0) in a run of ``run_steps``.

        Warm-up rises linearly and ends at ``lr``. Then the rate is constant, or falls linearly or
        by half a cosine to ``lr * min_lr_ratio`` at the schedule's last step, and stays there.
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
        """Return the optimizer step (from 0) at which the schedule ends."""
        return (self.schedule_steps or run_steps) - 1

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of each parameter's state tensors, which have the parameter's shape."""
        return tuple(kept for kept in MOMENTS[self.name] if kept != "momentum" or self.momentum)

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of settings with non-default values that this optimizer does not use."""
        fields = type(self).model_fields
        return tuple(
            name
            for name, users in USERS.items()
            if self.name not in users and getattr(self, name) != fields[name].default
        )


VISION: Final = "slurmrl_vision"
"""Key that `Model.marked` adds to a ``config.json`` object in memory. No file has this key."""


class Model(Section):
    """Weights, layout, precision and optimizer of one role.

    Other roles take these keys from the actor unless they set them: the weights (`path` or
    `architecture`), `implementation`, `tokenizer`, `backend`, `gpus`, `model`, `dtype`, `fp8`,
    `gradient_checkpointing`, `transformer_engine` and `max_tokens_per_microbatch`. `teacher` and
    `reward_model` must set their weights. No role takes `lora` or `optimizer` from the actor.
    Example: `{path: /models/Qwen2.5-0.5B-Instruct, backend: "fsdp:d4"}`
    """

    path: HubPathText | None = None
    """Weights of the model.

    - a folder in Hugging Face format;
    - `org/name` or `hf://org/name@revision`: a model of the Hugging Face hub;
    - `trial:EXPERIMENT/TRIAL`: that trial's newest export;
    - `trial:EXPERIMENT/TRIAL@STEP`: that trial's export of a step; `@last`: the export of its
      newest checkpoint.

    A model that is not trained needs no export: it reads the checkpoint of that step
    (docs/checkpoints.md). Required unless `architecture` is given. Example:
    `/models/Qwen2.5-0.5B-Instruct`"""
    architecture: dict[str, Any] | None = None
    """Description of a new model in place of `path`, as in a Hugging Face `config.json`. The run's
    seed initializes its weights. Default: none. Example: `{model_type: qwen3, hidden_size: 64,
    num_hidden_layers: 2}`"""
    implementation: Literal["builtin", "hf"] = "builtin"
    """Code of the model. `builtin` is the built-in decoder for the supported families. `hf` is any
    causal language model of transformers; it is slower and needs fsdp with data parallelism. Some
    families allow tensor parallelism."""
    tokenizer: HubPathText | None = None
    """Folder of the tokenizer, or a repository of the hub. Default: the value of `path`. Example:
    `/models/Qwen2.5-0.5B-Instruct`"""
    backend: Line = ""
    """Engine and layout (docs/allocation.md). Default: the actor's value; for the actor itself
    `fsdp:d1`. Example: `fsdp:d4`"""
    gpus: Line = ""
    """GPUs for this role, numbered over all hosts of the trial. Roles may share GPUs. Default: as
    many as the layout needs, from 0. Example: `0-3`"""
    model: ParallelSizes | None = None
    """The layout in the terms of Megatron and RLinf, instead of or in addition to `backend`."""
    dtype: Annotated[
        Literal["float32", "bfloat16"], Field(json_schema_extra={"default": "by device"})
    ] = "float32"
    """Data type of the computation. A trained role keeps its weights in float32. Default: bfloat16
    on GPUs, float32 on CPUs. Example: `bfloat16`"""
    gradient_checkpointing: bool | Literal["off", "selective", "full"] = False
    """Recompute activations in the backward pass, which saves memory and costs time.

    - `off` or `false`: keep all activations.
    - `selective`: recompute the feed-forward block and the norms; keep queries, keys, values and
      the result of attention. A step takes about a sixth more time.
    - `full` or `true`: keep only each layer's input. A step takes about a third more time.

    Example: `full`"""
    max_tokens_per_microbatch: Annotated[PositiveInt, Unit("tokens")] = 16384
    """Maximum number of tokens in a micro-batch of one rank; with `implementation: hf`, padding
    counts too. A prefix that several sequences share counts once if fsdp computes it once (on
    CPUs). A longer sequence gets a separate micro-batch."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory, and copy each layer to the GPU
    when it computes. This takes much less GPU memory and much more time. The optimizer runs on
    the CPU. Requires fsdp."""
    offload: bool = False
    """Keep weights and optimizer state in host memory except during the role's own calls. This
    frees GPU memory for the other models and for generation, at the cost of copies around each
    call."""
    transformer_engine: bool | None = None
    """Whether megatron builds its layers from TransformerEngine's linear layers, norms and grouped
    experts. In float32, TransformerEngine's matrix products use TF32. Default: true in bfloat16 on
    GPUs if a release that megatron-core supports is installed."""
    fp8: Literal["hybrid", "e4m3"] | None = None
    """For megatron: compute the linear layers of dense models in FP8 with TransformerEngine
    (docs/engines.md#fp8-in-training). `hybrid` uses e4m3 in forward passes and e5m2 for gradients
    of outputs; `e4m3` uses e4m3 for both. Weights keep their types. Default: none. Example:
    `hybrid`"""
    ema: PositiveFraction | None = None
    """For `ref` on fsdp: the reference follows the actor. After each training step, each reference
    weight becomes ema times the actor's weight plus (1 - ema) times its old value. The reference
    weights are then float32 and part of checkpoints. Default: the reference does not change.
    Example: `0.05`"""
    lora: Lora | None = None
    """Train low-rank adapters and freeze the weights of `path`, for a trained role. The reference
    is then the actor without its adapters, on the actor's GPUs and without additional memory,
    unless `ref` sets weights, a layout or a `dtype`. Default: train all weights."""
    train_vision: bool = False
    """Train the image encoder of a vision-language model too (docs/images.md). By default the
    encoder keeps its weights and has no optimizer state."""
    vision: bool = False
    """Build the image encoder of a family that also runs without an image encoder, for example
    `qwen3_5` (docs/images.md). Without the encoder, the role trains and exports only the language
    model. Default: true if rows have images or with `train_vision`."""
    optimizer: Optimizer = Optimizer()

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if self.path is not None and self.architecture is not None:
            raise ValueError("path and architecture exclude each other: set only one of them")
        return self

    def marked(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the ``config.json`` in ``values``, with the key `VISION` if `vision` is set."""
        return {**values, VISION: True} if self.vision else values

    @property
    def recompute(self) -> Literal["off", "selective", "full"]:
        """The value of `gradient_checkpointing`, with true and false spelled out."""
        if isinstance(self.gradient_checkpointing, bool):
            return "full" if self.gradient_checkpointing else "off"
        return self.gradient_checkpointing

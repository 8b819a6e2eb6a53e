"""One model role (actor, critic, ref, teacher, reward_model): its weights and its engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from slurmrl.config.schema.base import HubPathText, Line, PositiveFraction, PositiveInt, Section
from slurmrl.config.schema.lora import Lora
from slurmrl.config.schema.optimizer import Optimizer

TRIAL_PREFIX = "trial:"


class ParallelSizes(Section):
    """The layout in the terms of Megatron and RLinf. If `backend` has dimensions too, both must
    agree. If `backend` is only an engine's name, these sizes define the layout, and data
    parallelism uses the remaining GPUs of `cluster.hosts`."""

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


class Model(Section):
    """One role. The other roles inherit from the actor each of these that they do not set: the
    weights (`path` or `architecture`; `teacher` and `reward_model` must set theirs),
    `implementation`, `tokenizer`, `backend`, `gpus`, `model`, `dtype`, `gradient_checkpointing`,
    `transformer_engine` and `max_tokens_per_microbatch`, but not `lora` and the
    optimizer."""

    path: HubPathText | None = None
    """Folder in Hugging Face format, `org/name` or `hf://org/name@revision` for a model of the
    Hugging Face hub, or `trial:EXPERIMENT/TRIAL` for that trial's newest export,
    `trial:EXPERIMENT/TRIAL@STEP` for its export of a step and `@last` for that of its newest
    checkpoint. A model that is not trained needs no export: it is the checkpoint of that step
    (docs/checkpoints.md)."""
    architecture: dict[str, Any] | None = None
    """A new model instead of a path, as in a Hugging Face `config.json`: `model_type`,
    `hidden_size`, … Its weights are initialised with the run's seed."""
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

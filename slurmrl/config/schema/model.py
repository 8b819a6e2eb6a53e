"""One model role (actor, critic, ref): its weights and its engine."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from slurmrl.config.schema.base import Line, PathText, PositiveInt, Section
from slurmrl.config.schema.optimizer import Optimizer

TRIAL_PREFIX = "trial:"


class ParallelSizes(Section):
    """The layout as Megatron and RLinf write it. Where `backend` names dimensions too, both must
    say the same; where it is only an engine's name, these make up the layout, and data parallelism
    takes the GPUs of `cluster.hosts` that are left."""

    tensor_model_parallel_size: PositiveInt | None = None
    """Ranks that share each matrix: `t`."""
    pipeline_model_parallel_size: PositiveInt | None = None
    """Stages that share the layers: `p`."""
    context_parallel_size: PositiveInt | None = None
    """Ranks that share each sequence: `c`."""
    expert_model_parallel_size: PositiveInt | None = None
    """Ranks that share the experts: `e`."""
    expert_tensor_parallel_size: PositiveInt | None = None
    """Ranks that share each expert. Default: as Megatron, the tensor size."""
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    """Pieces of each pipeline stage (interleaved schedule); needs more than one stage."""
    sequence_parallel: bool | None = None
    """Split activations between tensor-parallel blocks along the sequence; needs a tensor size
    above 1. Default: on where megatron trains with one."""
    make_vocab_size_divisible_by: PositiveInt = 128
    """megatron pads the vocabulary to a multiple of this times the tensor size."""


class Model(Section):
    """One role. `critic` and `ref` take from the actor what they do not say themselves: the
    weights (`path` or `architecture`), `implementation`, `tokenizer`, `backend`, `gpus`, `model`,
    `dtype`, `gradient_checkpointing`, `transformer_engine` and `max_tokens_per_microbatch`, but not
    the optimizer."""

    path: PathText | None = None
    """Folder in Hugging Face form, or `trial:EXPERIMENT/TRIAL` for that trial's newest export."""
    architecture: dict[str, Any] | None = None
    """A new model instead of a path, as in a Hugging Face `config.json`: `model_type`,
    `hidden_size`, … Its weights are drawn from the run's seed."""
    implementation: Literal["builtin", "hf"] = "builtin"
    """What computes the model: the built-in decoder with its families, or `hf` for any causal
    model of transformers, on fsdp with data parallelism alone, and slower."""
    tokenizer: PathText | None = None
    """Folder of the tokenizer. Default: that of `path`."""
    backend: Line = ""
    """Engine and layout: `fsdp:d2`. Default of the actor: `fsdp:d1`."""
    gpus: Line = ""
    """GPUs of the trial that hold it, counted over its hosts: `0-3`. Roles may share them. Default:
    as many as the layout takes, from 0."""
    model: ParallelSizes | None = None
    """The layout in the words of Megatron and RLinf, instead of or beside that of `backend`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that the model computes in. Weights of a trained role are kept in float32."""
    gradient_checkpointing: bool | Literal["off", "selective", "full"] = False
    """Recompute activations in the backward pass: less memory, more time. `full` (or true) keeps
    each layer's input alone, for about a third more time; `selective` keeps the results of matrix
    products and attention, too (with TransformerEngine all but those of norms); `off` (or false)
    keeps all."""
    max_tokens_per_microbatch: PositiveInt = 16384
    """Most tokens on one rank at a time, with `implementation: hf` those of padding, too; a longer
    single sequence gets one of its own."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory and bring a layer to the GPU when
    it computes: much less GPU memory, much more time. The optimizer steps on the CPU. On fsdp."""
    transformer_engine: bool | None = None
    """Whether megatron makes its layers of TransformerEngine's linear layers, norms and grouped
    experts. Default: in bfloat16 on GPUs, where a release that megatron-core takes is installed. In
    float32 its products are of TF32."""
    optimizer: Optimizer = Optimizer()

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if self.path is not None and self.architecture is not None:
            raise ValueError("path and architecture exclude each other: give one of them")
        return self

    @property
    def recompute(self) -> Literal["off", "selective", "full"]:
        """What `gradient_checkpointing` asks for."""
        if isinstance(self.gradient_checkpointing, bool):
            return "full" if self.gradient_checkpointing else "off"
        return self.gradient_checkpointing

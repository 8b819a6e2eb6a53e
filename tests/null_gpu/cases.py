"""Models, engines and batches of the tests on the null GPU and of the benchmark table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.algorithms.policy.hyperparameters import Objective
from slurmrl.algorithms.policy.objective import policy_loss
from slurmrl.config.schema.roles import Model
from slurmrl.data.sample import SequenceSample
from slurmrl.engines import ENGINES
from slurmrl.engines.base import Outputs, TrainEngine
from slurmrl.models.architecture import Head
from slurmrl.tensors.parallel import device
from slurmrl.tensors.parallel.groups import ModelRanks, build
from tests.distributed.engines import megatron_cases
from tests.distributed.engines.cases import Placed

QWEN_1_5B = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}

TINY = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
TINY_EXPERTS = {
    **TINY,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@contextmanager
def first_of(ranks: int) -> Iterator[None]:
    """Make this process rank 0 of a job with this number of ranks, which the null GPU's NCCL
    simulates.
    """
    accelerator = device.choose(gpus=1)
    device.set_up(accelerator, threads=1, deterministic=False)
    dist.init_process_group(accelerator.backend, store=dist.HashStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def engine(
    architecture: dict[str, Any],
    *,
    name: str = "fsdp",
    head: Head = "lm",
    trained: bool = True,
    placed: ModelRanks | None = None,
    **settings: Any,
) -> TrainEngine:
    """An engine in bfloat16, by default over all ranks of the job as data-parallel ones."""
    ranks = tuple(range(dist.get_world_size()))
    if placed is None:
        sizes = {"dp": len(ranks)}
        folded = name == "megatron"
        placed = megatron_cases.placed(**sizes) if folded else Placed("actor", ranks, sizes)
    found: TrainEngine = ENGINES.load(name)(
        "actor",
        Model.model_validate(
            {"architecture": architecture, "dtype": "bfloat16", "optimizer": {"lr": 1e-5}}
            | settings
        ),
        head=head,
        trained=trained,
        context=build([placed], rank=0, device=torch.device("cuda", 0))["actor"],
        seed=1,
        total_steps=10,
        source=None,
    )
    return found


def ppo_loss(outputs: Outputs, sample: SequenceSample) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of PPO's actor for `batch`."""
    return policy_loss(outputs, sample, Objective())


def batch(lengths: Sequence[int]) -> SequenceSample:
    """Return the inputs of PPO's training, for sequences whose first half is the prompt."""
    tokens = sum(lengths)
    prompt = torch.cat([torch.arange(length) < length // 2 for length in lengths])
    return SequenceSample.from_default(
        lengths,
        [f"item{index}" for index in range(len(lengths))],
        {
            "input_ids": torch.arange(tokens) % 100,
            "logprobs": torch.zeros(tokens),
            "ref_logprobs": torch.zeros(tokens),
            "values": torch.zeros(tokens),
            "advantages": torch.ones(tokens),
            "returns": torch.ones(tokens),
            "prompt_mask": prompt,
            "response_mask": ~prompt,
            "state_mask": ~prompt,
        },
        per_sequence={
            "rewards": torch.ones(len(lengths)),
            "finished": torch.ones(len(lengths), dtype=torch.bool),
        },
    )

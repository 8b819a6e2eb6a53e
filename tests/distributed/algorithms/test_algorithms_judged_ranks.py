"""Steps of DPO, KTO and reward models on several ranks have the metrics and updates of one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
import torch
import torch.distributed as dist

from slurmrl.algorithms.base import CallContext, Interface
from slurmrl.algorithms.kto import KTOInterface
from slurmrl.algorithms.pairs import DPOInterface
from slurmrl.algorithms.preference_schema import DPO, KTO, RewardModel
from slurmrl.algorithms.reward_model import RewardModelInterface
from slurmrl.algorithms.sequences import ReferenceInterface
from slurmrl.config.schema import Model, Optimizer
from slurmrl.data.sample import SequenceSample
from slurmrl.engines import ENGINES
from slurmrl.plan.model import ModelPlan
from slurmrl.plan.settings import Settings
from slurmrl.tensors.parallel.groups import build
from tests.pool import RankPool
from tests.support import megatron_cpu

HERE = "tests.distributed.algorithms.test_algorithms_judged_ranks"
ARCHITECTURE = {
    "model_type": "qwen2",
    "vocab_size": 12,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
LENGTHS: Final = {
    "dpo": [[3, 4], [5, 3, 2, 6, 3, 3], [2, 2], [4, 7], [3, 3, 5, 2]],
    "kto": [[3, 4], [5, 3], [2, 2], [4, 7], [6, 2]],
    "reward_model": [[3, 4], [5, 3, 2, 6, 3, 3], [2, 2], [4, 7], [3, 3, 5, 2]],
}
PARTS: Final = {1: [[0, 1, 2, 3, 4]], 2: [[1, 4], [0, 2, 3]], 3: [[0, 3], [], [1, 2, 4]]}
"""Items of each rank: uneven on purpose."""
ALGORITHMS: Final[dict[str, tuple[Any, type[Interface]]]] = {
    "dpo": (DPO(batch_size=5, beta=0.5), DPOInterface),
    "kto": (KTO(batch_size=5, beta=0.5), KTOInterface),
    "reward_model": (RewardModel(batch_size=5), RewardModelInterface),
}


def batch(name: str) -> SequenceSample:
    generator = torch.Generator().manual_seed(3)
    lengths = LENGTHS[name]
    flat = [length for item in lengths for length in item]
    ids = torch.randint(0, 12, (sum(flat),), generator=generator)
    mask = torch.tensor([place == 0 for length in flat for place in range(length)])
    labels = torch.tensor([True, False, True, True, False])
    rows = {"input_ids": lengths, "prompt_mask": lengths, "desirable": [[1]] * 5}
    data = {"input_ids": ids, "prompt_mask": mask, "desirable": labels}
    return SequenceSample(tuple("abcde"), rows, data=dict(data))


def train(size: int, name: str, engine: str) -> tuple[dict[str, float], dict[str, float], Any]:
    """Return the metrics of an evaluation and of a step after it, and the model's outputs
    afterwards.
    """
    if engine == "megatron":
        megatron_cpu.install()
    algorithm, interface = ALGORITHMS[name]
    head = cast(Any, "value" if name == "reward_model" else "lm")
    plan = ModelPlan(
        role="actor",
        backend=f"{engine}:d{size}",
        engine=engine,
        sizes={"dp": size},
        ranks=tuple(range(size)),
        trained=True,
        head=head,
    )
    rank = dist.get_rank()
    config: Any = SimpleNamespace(total_steps=1)
    settings = Settings(config, algorithm, cast(Any, None))
    context = CallContext(1, 1, {}, cast(Any, None), settings, (), ())
    model = ENGINES.load(engine)(
        "actor",
        Model(architecture=ARCHITECTURE, optimizer=Optimizer(lr=1e-3, eps=1e-3)),
        head=head,
        trained=True,
        context=build([plan], rank=rank, device=torch.device("cpu"))["actor"],
        seed=1,
        total_steps=10,
        source=None,
    )
    own = batch(name).take(PARTS[size][rank])
    if head == "lm":
        reference = ReferenceInterface().inference(model, own, context).sample
        assert reference is not None
        reference.tensor("ref_logps").sub_(0.3)
        own.update_(reference)
    evaluated = {}
    for key, values in interface().inference(model, own, context).stats.items():
        total = model.all_reduce_sum(torch.tensor(values, dtype=torch.float64))
        evaluated[key] = float(total[0] / total[1])
    result = interface().train_step(model, own, context)
    stats = {key: total / count for key, (total, count) in result.stats.items()}
    after = model.forward(batch(name).only(["input_ids"]))
    return evaluated, stats, after["values" if head == "value" else "logp"]


@pytest.mark.parametrize(
    ("size", "name", "engine"),
    [
        (2, "dpo", "fsdp"),
        (3, "kto", "fsdp"),
        (3, "reward_model", "fsdp"),
        (2, "dpo", "megatron"),
        (2, "kto", "megatron"),
        (2, "reward_model", "megatron"),
    ],
)
def test_step_on_several_ranks_equals_step_on_one_rank(
    ranks: RankPool, size: int, name: str, engine: str
) -> None:
    """Metrics, KTO's divergence and the update do not depend on the number of ranks or on how items
    are spread over them; a rank may have none.
    """
    ((wanted, trained, after_one),) = ranks(1, f"{HERE}:train", 1, name, engine)
    results = ranks(size, f"{HERE}:train", size, name, engine)
    for evaluated, stats, after in results:
        assert stats == results[0][1]
        assert evaluated == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        assert stats == pytest.approx(trained, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(after, after_one, rtol=1e-5, atol=1e-5)
    assert {key: trained[key] for key in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    if name == "kto":
        assert trained["kl"] == pytest.approx(0.3, abs=1e-5)

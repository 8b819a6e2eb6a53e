"""Weights move from every engine to the native one with all tensors where they belong."""

from __future__ import annotations

import pytest
import torch

from slurmrl.transfer.execute import Holdings, Mover
from slurmrl.transfer.plan import plan_move
from slurmrl.transfer.regions import PlacedLayout
from slurmrl.transfer.verify import verify_move
from tests.null_gpu import cases
from tests.null_gpu.test_null_gpu_engines import ENGINES, LENGTHS, generated, loss, make
from tests.null_gpu.values import SmallValues

pytestmark = pytest.mark.filterwarnings("ignore")  # megatron-core warns of its own settings


@pytest.mark.parametrize(
    ("kind", "experts", "ranks"),
    [*((kind, False, 1) for kind in ENGINES), ("fsdp", True, 2), ("megatron", True, 1)],
)
def test_a_move_has_no_tensor_on_a_wrong_device(kind: str, experts: bool, ranks: int) -> None:
    sample = cases.batch(LENGTHS)
    with cases.first_of(ranks), SmallValues():
        trained = make(kind, experts, head="lm")
        settings = {"implementation": "hf"} if kind == "hf" else {}
        native = cases.engine(
            cases.TINY_EXPERTS if experts else cases.TINY, name="native", trained=False, **settings
        )
        sides = [PlacedLayout(side.layout(), tuple(range(ranks))) for side in (trained, native)]
        plan = plan_move(*sides, hosts=dict.fromkeys(range(ranks), 0), budget=1 << 20)
        for _ in range(2):
            native.onload()
            trained.train_batch(sample, loss, float(sum(LENGTHS)))
            trained.offload()
            trained.onload()
            held, taken = (
                Holdings(side, 0, engine.storages())
                for side, engine in zip(sides, (trained, native), strict=True)
            )
            device = torch.device("cuda", 0)
            Mover(plan, 0, held, taken, group=None, device=device).run()
            if ranks == 1:
                verify_move(*sides, 0, held, taken, group=None, device=device)
            assert generated(native, sample).tokens.is_cuda
            weights = list(native.storages().values())
            native.offload()
            assert not any(tensor.untyped_storage().nbytes() for tensor in weights)

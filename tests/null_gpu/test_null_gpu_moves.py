"""Weights move from every engine to the native one with all tensors on the right device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slurmrl.tensors.ops import intervals
from slurmrl.tensors.transfer import execute
from slurmrl.tensors.transfer.execute import BoxCopies, Holdings, Mover, verify_move
from slurmrl.tensors.transfer.plan import PlacedLayout, plan_move
from tests.null_gpu import cases, device
from tests.null_gpu.test_null_gpu_engines import ENGINES, LENGTHS, generated, loss, make
from tests.null_gpu.values import SmallValues

GPU = torch.device("cuda", 0)
pytestmark = pytest.mark.filterwarnings("ignore")  # megatron-core warns of its own settings


@pytest.mark.parametrize(
    ("kind", "experts", "ranks"),
    [*((kind, False, 1) for kind in ENGINES), ("fsdp", True, 2), ("megatron", True, 1)],
)
def test_weight_move_uses_only_the_right_device(kind: str, experts: bool, ranks: int) -> None:
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
            Mover(plan, 0, held, taken, group=None, device=GPU).run()
            if ranks == 1:
                verify_move(*sides, 0, held, taken, group=None, device=GPU)
            assert generated(native, sample).tokens.is_cuda
            weights = list(native.storages().values())
            native.offload()
            assert not any(tensor.untyped_storage().nbytes() for tensor in weights)


def test_strided_and_averaging_copies_take_one_kernel_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies make no temporary tensors and no host waits.

    torch's moving average needs four kernels per 2**20 elements.
    """
    launched: list[Any] = []
    compiled = SimpleNamespace(copy=lambda *arguments: launched.append(arguments))
    for module in (intervals, execute):
        monkeypatch.setattr(module, "operators", lambda *_: compiled)
    made = BoxCopies(GPU)
    columns = torch.zeros(4096, 4096, dtype=torch.bfloat16, device=GPU)[:, :2048]
    elements = torch.zeros(4096, 2048, dtype=torch.bfloat16, device=GPU)
    averaged = torch.zeros(4096, 2048, device=GPU)

    def run() -> None:
        made.packed(columns, torch.bfloat16)
        made.write(columns, elements, 1.0)
        made.write(columns, elements, 0.1)
        made.write(averaged, elements, 0.1)

    run()  # makes the intervals
    launched.clear()
    with device.counted() as found:
        run()
    assert len(launched) == 4
    assert not any(found[kind] for kind in ("launches", "to_device", "on_device", "waits")), found

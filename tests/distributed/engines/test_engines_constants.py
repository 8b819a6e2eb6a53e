"""Models of transformers with constant tensors: biases that balance the experts of deepseek_v3, and
the experts of each token in deepseek_v4.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from slurmrl.engines.base import TrainEngine
from slurmrl.errors import UsageError
from slurmrl.models.base import PackedModel
from tests.distributed.engines import cases
from tests.distributed.engines.cases import Setup, batch, model
from tests.distributed.engines.exported import train, train_and_export
from tests.pool import RankPool
from tests.support.families import tiny

HERE = "tests.distributed.engines.test_engines_constants"
SPLIT = [[1, 5], [0, 2, 3, 4, 6, 7, 8, 9]]
ARCHITECTURE = tiny("deepseek_v3", vocab_size=33, n_routed_experts=8)
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**ARCHITECTURE))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.2)
        dict(made.named_buffers())[BIAS].copy_(torch.linspace(-1, 1, 8))
    made.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def logits(made: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = made(batch().tensor("input_ids")[None]).logits
    return found


@pytest.fixture
def hashed(tmp_path: Path) -> Path:
    """A folder of deepseek_v4, whose first layers choose experts by token id."""
    torch.manual_seed(4)
    config = AutoConfig.for_model(**tiny("deepseek_v4", vocab_size=33))
    made = AutoModelForCausalLM.from_config(config)
    for name, values in made.named_buffers():
        if name.endswith("tid2eid"):
            values.random_(config.n_routed_experts)
    made.save_pretrained(tmp_path / "hashed")
    return tmp_path / "hashed"


def test_export_keeps_integer_constants(ranks: RankPool, tmp_path: Path, hashed: Path) -> None:
    """Training changes the other weights; checkpoint and export keep the table of experts."""
    config = tiny("deepseek_v4", vocab_size=33)
    settings = model(architecture=config, implementation="hf", optimizer={"lr": 1e-2})
    setup = Setup(model=settings, split=SPLIT, source=hashed)
    _, again = train_and_export(ranks, setup, tmp_path, "hf")
    before, after = AutoModelForCausalLM.from_pretrained(hashed).state_dict(), again.state_dict()
    tables = [name for name, values in after.items() if values.dtype == torch.int64]
    assert tables
    assert all(torch.equal(after[name], before[name]) for name in tables)
    assert all(before[name].any() for name in tables)
    assert any(not torch.equal(after[name], before[name]) for name in after)


@pytest.mark.parametrize("layers", [False, True])
def test_export_keeps_constant_tensors(
    ranks: RankPool, tmp_path: Path, source: Path, layers: bool
) -> None:
    """After training with a learning rate of 0, the export equals the initial model."""
    settings = model(
        architecture=ARCHITECTURE,
        implementation="hf",
        optimizer={"lr": 0.0},
        dtype="bfloat16" if layers else "float32",
    )
    options = {"small_bytes": 0} if layers else {}
    setup = Setup(model=settings, split=SPLIT, source=source, options=options)
    _, again = train_and_export(ranks, setup, tmp_path, "hf")
    assert torch.equal(logits(again), logits(AutoModelForCausalLM.from_pretrained(source)))


def saved_and_loaded(setup: Setup, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The bias of a fresh engine before and after a checkpoint is loaded."""
    engine = cases.make(setup)
    before = bias(engine).clone()
    engine.load(folder)
    return before, bias(engine)


def bias(engine: TrainEngine) -> torch.Tensor:
    decoder: PackedModel = engine._shards.decoder  # type: ignore[attr-defined]
    (found,) = decoder.constants().values()
    return found


def test_checkpoint_keeps_constant_tensors(ranks: RankPool, tmp_path: Path, source: Path) -> None:
    settings = model(architecture=ARCHITECTURE, implementation="hf")
    setup = Setup(model=settings, split=SPLIT, source=source)
    train(ranks, setup, tmp_path)
    fresh = Setup(model=settings, split=SPLIT)  # random, because the bias is initialized with 0
    for before, after in ranks(2, f"{HERE}:saved_and_loaded", fresh, tmp_path):
        assert not before.any()
        assert torch.equal(after, torch.linspace(-1, 1, 8))


def counting(setup: Setup) -> str:
    """Make an engine of a model whose constant is a boolean."""
    from slurmrl.models.hf_model import HFModel

    made = HFModel.constants
    HFModel.constants = lambda self: {"inner.count": torch.zeros(1, dtype=torch.bool)}  # type: ignore[method-assign]
    try:
        cases.make(setup)
    except UsageError as error:
        return str(error)
    finally:
        HFModel.constants = made  # type: ignore[method-assign]
    return ""


def test_constants_that_a_checkpoint_cannot_hold_are_rejected(ranks: RankPool) -> None:
    settings = model(architecture=ARCHITECTURE, implementation="hf")
    (message,) = ranks(1, f"{HERE}:counting", Setup(model=settings, split=[range(10)]))
    assert message == (
        "deepseek_v3 models cannot be trained here: inner.count is bool, not float32 or int64"
    )

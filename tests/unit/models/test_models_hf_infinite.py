"""Configs with infinite numbers, which files write as objects."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoConfig

from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_loading import tensor_specs
from tests.support.families import tiny


def test_shapes_are_known_even_if_the_config_has_an_infinite_number(tmp_path: Path) -> None:
    AutoConfig.for_model(**tiny("nemotron_h")).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    shapes, _ = tensor_specs(HFConfig.from_hf(values), "lm")
    assert "inner.model.layers.0.mixer.A_log" in shapes

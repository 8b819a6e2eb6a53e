"""The examples are valid configurations. Only data files and start models may be missing."""

from __future__ import annotations

import importlib.util
import math
import sys
from functools import reduce
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML

from slurmrl.data.sample import SequenceSample
from slurmrl.errors import ConfigError
from slurmrl.plan.settings import load_settings

EXAMPLES = Path(__file__).parents[3] / "examples"
CONFIGS = sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.yaml"))
MADE_ELSEWHERE = ("trial:", "data/")
"""How values begin that name models of other trials and data that is not in the repository."""


@pytest.mark.parametrize("name", CONFIGS)
def test_example_is_valid_except_for_files_made_elsewhere(name: str, tmp_path: Path) -> None:
    """The file is checked without overrides."""
    try:
        load_settings(EXAMPLES / name, root=tmp_path)
    except ConfigError as error:
        values = YAML(typ="safe").load(EXAMPLES / name)
        for problem in error.problems:
            if problem.key == "rollout.python":  # an environment of the user's
                continue
            if "needs a GPU for each worker" in str(problem):
                continue
            value = reduce(lambda section, key: section[key], problem.key.split("."), values)
            assert value.startswith(MADE_ELSEWHERE), problem


def test_custom_loss_example_is_correct_and_short() -> None:
    """Compares with SimPO computed by hand, with answers of 1 and 2 tokens."""
    path = EXAMPLES / "custom" / "simpo.py"
    assert len(path.read_text().splitlines()) < 60
    spec = importlib.util.spec_from_file_location("simpo", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["simpo"] = module
    spec.loader.exec_module(module)
    options = module.SimPO(name="simpo:SimPO", batch_size=1, beta=2.0, gamma=0.5)
    lengths = {"input_ids": [[2, 3, 2, 3]], "prompt_mask": [[2, 3, 2, 3]]}
    mask = torch.tensor([1, 0, 1, 0, 0, 1, 0, 1, 0, 0]).bool()
    logp = torch.tensor([0, -0.5, 0, -1.0, -2.0, 0, -3.0, 0, -0.2, -0.6], dtype=torch.float64)
    ids = torch.zeros(10, dtype=torch.long)
    batch = SequenceSample(("a@0",), lengths, data={"input_ids": ids, "prompt_mask": mask})
    loss, stats = module.simpo_loss({"logp": logp}, batch, options)
    margins = [2.0 * (-0.5 + 1.5) - 0.5, 2.0 * (-3.0 + 0.4) - 0.5]
    expected = sum(math.log1p(math.exp(-margin)) for margin in margins) / 2
    assert float(loss) == pytest.approx(expected, rel=1e-9)
    assert float(stats["accuracy"]) == 0.5


def test_sentiment_example_classifier_scores_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A score is the probability of POSITIVE. It does not depend on padding in a batch."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "custom"))
    reward = importlib.import_module("sentiment").Sentiment(batch_size=3)
    positive = ["good", "very good and lovely", "fine", "superb superb bad"]
    negative = ["bad", "so awful and very poor", "dull", "it is bad good and awful"]
    texts = [*positive, *negative]
    scores = reward(["the film was"] * len(texts), texts, [{}] * len(texts))
    assert min(scores[:4]) > 0.8
    assert max(scores[4:]) < 0.2
    alone = [reward(["the film was"], [text], [{}])[0] for text in texts]
    assert alone == pytest.approx(scores, abs=1e-5)
    with pytest.raises(ValueError, match="label 'JOY' is unknown; known: NEGATIVE, POSITIVE"):
        importlib.import_module("sentiment").Sentiment(label="JOY")(["a"], ["b"], [{}])

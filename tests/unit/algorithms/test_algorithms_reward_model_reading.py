"""A reward model is read at the same token of pairs and of completions."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.preference_schema import RewardModel
from slurmrl.algorithms.reward_model import (
    PairScoresInterface,
    RewardModelInterface,
    ScoresInterface,
    turn_ends,
)
from slurmrl.config.schema import Dataset, Model
from slurmrl.data.sample import SequenceSample
from slurmrl.plan.estimates.shape import SCORE_AT, TURN_END
from tests.unit.data.test_data_chat import CHATML, GENERATION, Site

PAIR = {"prompt": "Hi", "chosen": "Hello", "rejected": "Bye"}
LLAMA = CHATML.replace("<|im_end|>\n", "<|im_end|>")
WIDE = GENERATION.replace("{% endgeneration %}{{ '\n' }}", "{{ '\n' }}{% endgeneration %}")
NARROW = GENERATION.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
TEMPLATES = {
    "chatml": CHATML,
    "nothing after the end": LLAMA,
    "blocks": GENERATION,
    "blocks with the newline": WIDE,
    "blocks without the end": NARROW,
}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


class Reader:
    """A stand-in for a reward model. The value at a token is ``100 * position + token``."""

    def __init__(self) -> None:
        self.read: list[list[int]] = []

    def forward(self, sample: SequenceSample) -> dict[str, Tensor]:
        ids, cuts = sample.tensor("input_ids"), sample.cu_seqlens("input_ids").tolist()
        self.read = [ids[a:b].tolist() for a, b in pairwise(cuts)]
        places = torch.cat([torch.arange(len(row)) for row in self.read])
        return {"values": (1000.0 * places + ids)}


def context(site: Site, *, rule: bool, steps: int | None = None, chat: bool = True) -> CallContext:
    folder = site.folder / f"model {rule}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({SCORE_AT: TURN_END} if rule else {}))
    config = SimpleNamespace(
        total_steps=steps,
        actor=Model(path=str(folder)),
        reward_model=Model(path=str(folder)),
        dataset=Dataset(type="prompt", path="rows.jsonl", chat_template=chat),
    )
    settings = SimpleNamespace(config=config, algorithm=RewardModel(batch_size=1))
    end = site.tokenizer.convert_tokens_to_ids("<|im_end|>")
    stops = (end, site.tokenizer.eos_token_id)
    return CallContext(1, 1, {}, site.tokenizer, cast(Any, settings), stops, ())


def completions(site: Site, *endings: str) -> SequenceSample:
    """Return completions of a prompt, as generation makes them with the template."""
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    texts = [[site.tokenizer(text).input_ids for text in (prompt, ending)] for ending in endings]
    return SequenceSample(
        ("a@0",),
        {key: [[len(a) + len(b) for a, b in texts]] for key in ("input_ids", "prompt_mask")},
        data={
            "input_ids": torch.tensor([token for a, b in texts for token in (*a, *b)]),
            "prompt_mask": torch.tensor(
                [mask for a, b in texts for mask in [True] * len(a) + [False] * len(b)]
            ),
        },
    )


def scores(interface: Any, model: Reader, sample: SequenceSample, of: CallContext) -> list[float]:
    result = interface.inference(model, sample, of)
    values: list[float] = result.sample.tensor("model_scores").tolist()
    return values


@pytest.mark.parametrize("template", TEMPLATES)
def test_pair_is_scored_where_generation_would_end(site: Site, template: str) -> None:
    site.template(TEMPLATES[template])
    pairs = site.sample(PAIR, type="preference", chat_template=True)
    of = context(site, rule=True)
    read = pairs.tensor("input_ids")[turn_ends(pairs, of.stop_token_ids)]
    assert site.tokenizer.convert_ids_to_tokens(read) == ["<|im_end|>"] * 2
    found = scores(PairScoresInterface(), Reader(), pairs, of)
    outputs = Reader().forward(pairs)
    assert RewardModelInterface().scores(outputs, pairs, of).tolist() == found
    assert [int(score) % 1000 for score in found] == read.tolist()


def test_pair_and_completion_have_equal_scores(site: Site) -> None:
    pairs = site.sample(PAIR, type="preference", chat_template=True)
    made = completions(site, "Hello<|im_end|>", "Bye<|im_end|>")
    for rule in (True, False):
        of = context(site, rule=rule, steps=0)
        given = scores(PairScoresInterface(), Reader(), pairs, of)
        assert RewardModelInterface().scores(Reader().forward(pairs), pairs, of).tolist() == given
        assert scores(ScoresInterface(), Reader(), made, of) == given


def test_older_reward_model_reads_the_whole_conversation(site: Site) -> None:
    """An export without the rule was trained at the newline that follows the end of the turn."""
    made, model = completions(site, "Hello<|im_end|>", "Hel", "Hello"), Reader()
    newline = site.tokenizer("\n").input_ids
    end = site.tokenizer.eos_token_id
    scores(ScoresInterface(), model, made, context(site, rule=False))
    cuts = made.cu_seqlens("input_ids").tolist()
    plain = [made.tensor("input_ids")[a:b].tolist() for a, b in pairwise(cuts)]
    assert model.read == [plain[0] + newline, *plain[1:]]
    text = completions(site, "Hello" + site.tokenizer.decode([end]))
    scores(ScoresInterface(), model, text, context(site, rule=False, chat=False))
    assert model.read == [text.tensor("input_ids").tolist()]


def test_truncated_completion_is_scored_at_its_last_token(site: Site) -> None:
    made = completions(site, "Hello", "Hello<|im_end|>")
    cuts = made.cu_seqlens("input_ids").tolist()
    assert turn_ends(made, context(site, rule=True).stop_token_ids).tolist() == [
        cuts[1] - 1,
        cuts[2] - 1,
    ]


def test_episode_is_scored_at_its_last_turn() -> None:
    """Stop tokens (9) of earlier turns, of the context, and after the turn are not read."""
    read = [1, 0, 0, 1, 0, 0, 0, 1], [1, 1, 0, 0, 1, 1], [1, 1]
    ids = [5, 6, 9, 9, 6, 9, 9, 9], [9, 5, 6, 7, 9, 5], [9, 5]
    rows = [[len(row) for row in read]]
    sample = SequenceSample(
        ("a@0",),
        {"input_ids": rows, "prompt_mask": rows},
        data={
            "input_ids": torch.tensor([token for row in ids for token in row]),
            "prompt_mask": torch.tensor([bool(each) for row in read for each in row]),
        },
    )
    assert turn_ends(sample, (9,)).tolist() == [5, 8 + 4, 14 + 1]
    assert turn_ends(sample, ()).tolist() == [6, 8 + 3, 14 + 1]
    assert turn_ends(sample.take([]), (9,)).tolist() == []


def test_scores_come_from_the_last_token_in_plans_without_masks(site: Site) -> None:
    """A trial that an earlier version planned continues with its earlier rule."""
    pairs = site.sample(PAIR, type="preference", chat_template=True)
    outputs, of = Reader().forward(pairs), context(site, rule=False)
    old = RewardModelInterface().scores(outputs, pairs.only(["input_ids"]), of)
    new = RewardModelInterface().scores(outputs, pairs, of)
    assert (old - new).min() > 500  # a later place

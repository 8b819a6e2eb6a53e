"""Datasets with judged answers: pairs and labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.schema import Dataset
from slurmrl.data.dataset import SampleRows
from slurmrl.data.rows import DatasetRows
from slurmrl.data.tokenizer import load_tokenizer
from slurmrl.errors import ConfigError
from tests.support.datasets import prepared, write_rows

TOKENIZER = load_tokenizer(Path(__file__).parents[3] / "examples" / "addition" / "tokenizer")


def make(kind: str, folder: Path, *rows: dict[str, Any], **options: Any) -> SampleRows:
    config = Dataset(type=kind, path=write_rows(folder, *rows), **options)
    return prepared(config, TOKENIZER, folder / "data")


def texts(made: SampleRows, *indices: int) -> list[list[tuple[str, str]]]:
    """Return (prompt, answer) of each sequence of the items, according to the masks."""
    sample = made.sample([(0, index) for index in indices])
    ids = iter(sample.tensor("input_ids").tolist())
    mask = iter(sample.tensor("prompt_mask").tolist())
    found = []
    for lengths in sample.lengths["input_ids"]:
        item = []
        for length in lengths:
            tokens = [(next(ids), next(mask)) for _ in range(length)]
            item.append(
                (
                    TOKENIZER.decode([token for token, prompt in tokens if prompt]),
                    TOKENIZER.decode([token for token, prompt in tokens if not prompt]),
                )
            )
        found.append(item)
    return found


def problems(kind: str, folder: Path, *rows: dict[str, Any], **options: Any) -> list[str]:
    """Return the problems that the run rejects, which the submission also rejects."""
    with pytest.raises(ConfigError) as caught:
        make(kind, folder, *rows, **options)
    found = [
        f"{problem.where.rpartition(':')[2]} {problem.key} {problem.message}"
        for problem in caught.value.problems
    ]
    config = Dataset(type=kind, path=str(folder / "rows.jsonl"), **options)
    with pytest.raises(ConfigError) as caught:
        DatasetRows(config).count_long(TOKENIZER, None)
    assert len(caught.value.problems) == len(found)
    return found


PAIR = {"id": "a", "prompt": "1+2=", "chosen": "3", "rejected": "44"}
PAIRS = {"id": "b", "prompt": "2+2=", "chosen": ["4", "04"], "rejected": ["5", "6"]}
REAL = {"id": "c", "prompt": "1+1=", "pos_answers": ["2", "2"], "neg_answers": ["3", "4"]}


def test_pairs_of_a_prompt_stay_in_one_item(tmp_path: Path) -> None:
    """Covers each spelling of the keys."""
    made = make("preference", tmp_path, PAIR, PAIRS, REAL)
    assert texts(made, 1, 0, 2) == [
        [("2+2=", f"{answer}<eos>") for answer in ("4", "5", "04", "6")],
        [("1+2=", "3<eos>"), ("1+2=", "44<eos>")],
        [("1+1=", f"{answer}<eos>") for answer in ("2", "3", "2", "4")],
    ]
    meta, sample = made.meta([(3, 1), (3, 0)]), made.sample([(3, 1), (3, 0)])
    assert meta.ids == sample.ids == ("b@3", "a@3")
    assert meta.item_lengths() == sample.item_lengths("input_ids")
    assert made.sample([]).tensor("input_ids").shape == (0,)


def test_pos_answers_are_read_if_chosen_is_null(tmp_path: Path) -> None:
    pair = {"prompt": "1+2=", "chosen": None, "pos_answers": ["3"], "rejected": "4"}
    assert texts(make("preference", tmp_path, pair), 0) == [
        [("1+2=", "3<eos>"), ("1+2=", "4<eos>")]
    ]


def test_pair_settings_choose_the_pairs(tmp_path: Path) -> None:
    row = {"q": "1+2", "good": ["3", "03"], "bad": ["4", "5"], "unit": "-"}
    made = make(
        "preference",
        tmp_path,
        row,
        prompt_template="{q}=",
        answer_template="{unit}{answer}",
        chosen_key="good",
        rejected_key="bad",
        max_pairs_per_prompt=1,
    )
    assert texts(made, 0) == [[("1+2=", "-3<eos>"), ("1+2=", "-4<eos>")]]


def test_row_with_one_too_long_sequence_is_left_out(tmp_path: Path) -> None:
    made = make("preference", tmp_path, PAIR, PAIRS, REAL, max_tokens=6)
    assert (made.size, made.left_out) == (1, 2)
    assert texts(made, 0) == texts(make("preference", tmp_path, REAL), 0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"chosen": None}, "1 chosen must be a string, but is null"),
        ({"chosen": ["3"], "rejected": ["4", "5"]}, "1 chosen has 1 answers, but 'rejected' has 2"),
        ({"rejected": []}, "1 rejected must not be an empty list"),
        ({"rejected": [" "]}, "1 rejected answer 1 must not be empty"),
        ({"chosen": ["3", 4]}, "1 chosen answer 2 must be a string, but is a number (4)"),
        ({"prompt": ""}, "1 prompt must not be empty"),
        ({"pos_answers": ["4"]}, "1 chosen and 'pos_answers' are both present; remove one of"),
        ({"neg_answers": "4"}, "1 rejected and 'neg_answers' are both present"),
    ],
)
def test_invalid_pairs_are_named(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    found = problems("preference", tmp_path, {**PAIR, **changes}, PAIRS)
    assert len(found) == 1
    assert found[0].startswith(expected)


def test_keys_missing_in_all_rows_are_problems_of_the_settings(tmp_path: Path) -> None:
    found = problems("preference", tmp_path, PAIR, chosen_key="choosen")
    assert found == [
        " chosen_key 'choosen' is not a key of any line of "
        f"{tmp_path}/rows.jsonl; did you mean 'chosen'? allowed: id, prompt, chosen, rejected"
    ]
    assert problems("kto", tmp_path, {"prompt": "1+1=", "answer": "2"})[0].startswith(" label_key")
    wrong = problems("preference", tmp_path, PAIR, answer_template="{id}")
    assert [text.split()[0] for text in wrong] == ["answer_template"]
    missing = problems("preference", tmp_path, PAIR, {"id": "b", "prompt": "1+1=", "chosen": "2"})
    assert missing == ["2 rejected is missing; the line has the keys id, prompt, chosen"]


LABELED = [
    {"id": "a", "prompt": "1+2=", "answer": "3", "label": True},
    {"id": "b", "prompt": "1+2=", "answer": "44", "label": False},
    {"id": "c", "prompt": "2+2=", "answer": "44444444", "label": False},
    {"id": "d", "prompt": "2+2=", "answer": "4", "label": True},
    {"id": "e", "prompt": "1+2=", "answer": "33", "label": True},
]


def test_mismatched_answers_belong_to_other_prompts(tmp_path: Path) -> None:
    """The second sequence of a labeled row has the answer of the closest earlier row with another
    prompt, or of the first later one at the start of the file. The answer is cut at the limit. Rows
    that are left out give no answers.
    """
    made = make("kto", tmp_path, *LABELED)
    mismatched = [item[1] for item in texts(made, *range(5))]
    assert mismatched == [
        ("1+2=", "44444444<eos>"),
        ("1+2=", "44444444<eos>"),
        ("2+2=", "44<eos>"),
        ("2+2=", "44<eos>"),
        ("1+2=", "4<eos>"),
    ]
    own = [item[0] for item in texts(made, *range(5))]
    assert own == [(row["prompt"], f"{row['answer']}<eos>") for row in LABELED]
    sample = made.sample([(0, 4), (0, 2)])
    assert sample.tensor("desirable").tolist() == [True, False]
    assert sample.lengths["desirable"] == [[1], [1]]
    limited = make("kto", tmp_path, *LABELED, max_tokens=7)
    assert limited.size == 4
    assert texts(limited, 0)[0][1] == ("1+2=", "4<eos>")
    long = {**LABELED[0], "prompt": "01+2="}
    assert texts(make("kto", tmp_path, long, LABELED[1], max_tokens=7), 0)[0][1] == ("01+2=", "44")


def test_labels_must_be_true_or_false(tmp_path: Path) -> None:
    rows = [LABELED[0], {**LABELED[1], "label": 1}, {"id": "z", "prompt": "1=", "answer": "1"}]
    assert problems("kto", tmp_path, *rows) == [
        "2 label must be true or false, but is 1",
        "3 label is missing; the line has the keys id, prompt, answer",
    ]
    alone = problems("kto", tmp_path, *LABELED[:2])
    assert "at least two different prompts" in alone[0]

"""Make preference pairs and labels, for DPO and KTO, from a model's answers and rewards.

    python examples/addition/judged.py RESULTS PAIRS LABELS

RESULTS is the `results.jsonl` of a `generate` trial with a reward. An answer is right if its reward
is at least 1. If a prompt has both right and wrong answers, its first right and its first wrong
answer become a line in PAIRS and two lines in LABELS. Answers without a stop token are left out.

This script made ``sampled_pairs.jsonl`` and ``sampled_labels.jsonl``, from answers of the model of
examples/sft.yaml.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RIGHT = 1.0
Row = Mapping[str, Any]


def pairs(results: Iterator[Row]) -> Iterator[Row]:
    """Yield a right and a wrong answer to each prompt that has both."""
    for row in results:
        answers: dict[bool, str] = {}
        for completion in row["completions"]:
            if "reward" not in completion:
                raise SystemExit(f"{row['id']} has no reward: submit the trial with a `reward`")
            judged = completion["finished"] and completion["reward"] is not None
            if judged and completion["text"]:
                answers.setdefault(completion["reward"] >= RIGHT, completion["text"])
        if len(answers) == 2:
            problem = {"id": row["id"], "prompt": row["prompt"]}
            yield {**problem, "chosen": answers[True], "rejected": answers[False]}


def labels(pair: Row) -> Iterator[Row]:
    """Yield both answers of a pair: the right answer is desirable, the wrong answer is not."""
    for key in ("chosen", "rejected"):
        name = f"{pair['id']} {key}"
        answer = {"answer": pair[key], "label": key == "chosen"}
        yield {"id": name, "prompt": pair["prompt"], **answer}


def write(results: Path, to_pairs: Path, to_labels: Path) -> int:
    """Write both files; return the number of pairs."""
    with results.open(encoding="utf-8") as lines:
        made = list(pairs(json.loads(line) for line in lines))
    labeled = [row for pair in made for row in labels(pair)]
    for path, rows in ((to_pairs, made), (to_labels, labeled)):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return len(made)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    print(f"{write(*map(Path, sys.argv[1:]))} pairs")

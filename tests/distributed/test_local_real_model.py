"""Training of a small pretrained model, whose results a tiny random model cannot show."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmrl.run import events
from tests.support.real_model import smollm2
from tests.support.trials import Site

pytestmark = [pytest.mark.soak, pytest.mark.long, pytest.mark.timeout(3600)]

QUESTIONS = ("the sea", "a lamp", "rain", "bread", "a bridge", "snow", "a clock", "the moon", "tea")
PROMPTS = [f"{verb} {thing}." for verb in ("Describe", "Define") for thing in QUESTIONS]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def rows(path: Path, lines: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def trial(name: str, algorithm: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "experiment": name,
        "algorithm": algorithm,
        "cluster": {"gpus_per_worker": 0},
        "actor": {"path": str(smollm2()), "dtype": "float32"},
        "checkpoint": {"every_steps": None},
        **changes,
    }


def run(site: Site, config: dict[str, Any]) -> None:
    name = config["experiment"]
    path = site.write(f"{name}.yaml", config)
    site.slurmrl("submit", str(path), "--scheduler", "local", "--detach")
    state = site.wait_for_end(f"{name}/1", timeout_s=3000.0)
    assert state["state"] == "COMPLETED", state


def results(site: Site, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in site.paths(f"{name}/1").results.read_text().splitlines()]


def test_reward_model_scores_completions_at_the_trained_token(site: Site) -> None:
    """The accuracy at the token that rollouts read equals the training accuracy. Scores of
    completions equal transformers' scores at their last tokens.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    pairs = [
        {"prompt": p, "chosen": f"Gladly. {p} It is a good question.", "rejected": "I will not."}
        for p in PROMPTS
    ]
    path = rows(site.folder / "pairs.jsonl", pairs)
    preference = {"type": "preference", "path": path, "chat_template": True}
    config = trial("rm", {"name": "reward_model", "batch_size": len(pairs)}, dataset=preference)
    config["actor"]["optimizer"] = {"lr": 1e-5}
    config |= {"total_steps": 6, "evaluation": {"every_steps": 6, "dataset": preference}}
    run(site, config)
    trained = site.metrics("rm/1")[-1]
    assert trained["eval/accuracy"] == 1.0

    short = ("Hi", "What is 2 + 2?", "What is the capital of France?")  # answered in 12 tokens
    asked = [{"prompt": each} for each in (*short, "Describe the sea.")]
    prompts = rows(site.folder / "prompts.jsonl", asked)
    config = trial("judged", {"name": "generate", "batch_size": 4})
    config |= {
        "rollout": {"n": 1, "max_new_tokens": 12, "greedy": True},
        "reward": {"name": "model"},
        "reward_model": {"path": "trial:rm/1"},
        "dataset": {"type": "prompt", "path": prompts, "chat_template": True},
    }
    run(site, config)

    folder = site.paths("rm/1").export(6)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def score(prompt: str, answer: str) -> float:
        message = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text + answer, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():  # transformers skips <|im_end|>, which is its padding token, too
            return float(model.score(model.model(ids).last_hidden_state)[0, -1, 0])

    margins = [
        score(pair["prompt"], pair["chosen"] + "<|im_end|>")
        - score(pair["prompt"], pair["rejected"] + "<|im_end|>")
        for pair in pairs
    ]
    assert sum(margin > 0 for margin in margins) / len(pairs) == trained["eval/accuracy"]
    assert sum(margins) / len(pairs) == pytest.approx(trained["eval/margin"], rel=0.02)
    ended = []
    for line in results(site, "judged"):
        for completion in line["completions"]:
            end = "<|im_end|>" if completion["finished"] else ""
            ended.append(completion["finished"])
            wanted = score(line["prompt"], completion["text"] + end)
            assert completion["reward"] == pytest.approx(wanted, abs=2e-3)
    assert sorted(ended) == [False, True, True, True]


def test_default_export_keeps_small_updates(site: Site) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lines = [{"prompt": p, "answer": "Certainly! Here is a poem instead."} for p in PROMPTS]
    path = rows(site.folder / "rows.jsonl", lines)
    config = trial("sft", {"name": "sft", "batch_size": len(lines)}, total_steps=6)
    config["actor"]["optimizer"] = {"lr": 1e-6}
    config["dataset"] = {"type": "prompt_answer", "path": path, "chat_template": True}
    run(site, config)
    narrow = site.folder / "narrow"
    said = site.slurmrl("export", "sft/1", "--dtype", "source", "--out", str(narrow)).stderr
    assert "of the training's update survives rounding to bfloat16" in said
    told = events.read_all(site.paths("sft/1"))
    (event,) = [each for each in told if each["kind"] == "export"]
    assert event["kept"] < 0.1
    assert event["warning"]

    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2())

    def loss(folder: Path) -> float:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        total = 0.0
        for line in lines:
            message = [{"role": "user", "content": line["prompt"]}]
            template = tokenizer.apply_chat_template
            prompt = template(message, tokenize=False, add_generation_prompt=True)
            text = prompt + line["answer"] + "<|im_end|>"
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
            labels = ids.clone()
            labels[:, : len(tokenizer(prompt, add_special_tokens=False).input_ids)] = -100
            with torch.no_grad():
                total += float(model(ids, labels=labels).loss)
        return total / len(lines)

    start, exported = loss(smollm2()), loss(site.paths("sft/1").export(6))
    assert exported < start - 0.01
    assert start - loss(narrow) < 0.2 * (start - exported)


def test_row_whose_tool_call_the_template_drops_is_rejected(site: Site) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    asked = {"role": "user", "content": "What is 1 + 2?"}
    said = {"role": "assistant", "content": "3"}
    lines = [{"messages": [asked, said]}, {"messages": [asked, {**said, "tool_calls": [call]}]}]
    path = rows(site.folder / "rows.jsonl", lines)
    config = trial("sft", {"name": "sft", "batch_size": 2}, total_steps=1)
    config["dataset"] = {"type": "messages", "path": path}
    checked = site.slurmrl("data", "check", str(site.write("sft.yaml", config)), code=2)
    assert "rows.jsonl:2: " in checked.stderr
    assert "the tool call 'add' of message 2" in checked.stderr


def sums(path: Path, seed: int, count: int) -> str:
    chosen = random.Random(seed)
    numbers = [(chosen.randint(10, 49), chosen.randint(10, 49)) for _ in range(count)]
    question = "What is {} + {}? Answer with the number only."
    return rows(path, [{"prompt": question.format(a, b), "answer": str(a + b)} for a, b in numbers])


def is_right(completion: str, answer: str) -> bool:
    """Whether the last number of a completion is the answer."""
    return re.findall(r"\d+", completion)[-1:] == [answer]


def learn_sums(site: Site, steps: int, reward: dict[str, Any]) -> list[dict[str, Any]]:
    """Train on sums with GRPO; return greedy completions of 64 held-out ones."""
    train = sums(site.folder / "train.jsonl", 1, 512)
    held_out = sums(site.folder / "held_out.jsonl", 2, 64)
    config = trial("grpo", {"name": "grpo", "batch_size": 8}, total_steps=steps)
    config["actor"] |= {"lora": {"rank": 16}, "optimizer": {"lr": 3e-4}}
    config |= {
        "rollout": {"n": 8, "max_new_tokens": 12},
        "reward": reward,
        "dataset": {"type": "prompt", "path": train, "chat_template": True},
    }
    run(site, config)
    config = trial("held_out", {"name": "evaluate", "batch_size": 16}, reward=config["reward"])
    config["actor"]["path"] = "trial:grpo/1"
    config |= {
        "rollout": {"n": 1, "max_new_tokens": 12, "greedy": True},
        "dataset": {"type": "prompt", "path": held_out, "chat_template": True},
    }
    run(site, config)
    return results(site, "held_out")


def test_math_reward_is_not_earned_by_restating_the_question(site: Site) -> None:
    """For example, "To solve 21 + 33, we can" is not an answer to a question whose result is 54."""
    lines = learn_sums(site, 12, {"name": "math"})
    rewards = [each["reward"] for line in lines for each in line["completions"]]
    right = [is_right(c["text"], line["answer"]) for line in lines for c in line["completions"]]
    assert sum(rewards) / len(rewards) <= sum(right) / len(right) + 0.05


def test_sums_are_learned_with_a_strict_reward(site: Site) -> None:
    (site.folder / "strict.py").write_text(
        "import re\n"
        "def last_number(prompts, completions, rows):\n"
        "    pairs = zip(completions, rows)\n"
        "    return [re.findall(r'\\d+', each)[-1:] == [row['answer']] for each, row in pairs]\n"
    )
    lines = learn_sums(site, 20, {"name": "strict.py:last_number"})
    right = [is_right(c["text"], line["answer"]) for line in lines for c in line["completions"]]
    assert sum(right) / len(right) >= 0.6

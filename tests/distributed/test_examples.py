"""Every configuration in examples/ runs in a short form: small models, few rows, two steps.

New files are included automatically. An example that starts from another trial
(``trial:addition-sft/1``) starts from the short form of the example that makes it, so these
references and their order are tested too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from slurmrl.data.tokenizer import train_bpe
from tests.support.rotation import in_turn, rotating
from tests.support.trials import REPOSITORY, Site

pytestmark = pytest.mark.long

EXAMPLES = REPOSITORY / "examples"
ALL = sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.yaml"))
SERVERS = ("\n  backend: sglang", "\n  backend: vllm")
SERVED = [
    config for config in ALL if any(server in (EXAMPLES / config).read_text() for server in SERVERS)
]
"""Tested in tests/engines, where there are servers."""
ON_GPUS = ["megatron_moe.yaml"]
"""Tested in test_local_megatron.py, which lets megatron-core compute on CPUs."""
CONFIGS = [config for config in ALL if config not in (*SERVED, *ON_GPUS)]
SHARES = 10
"""Number of shares of the examples, which take turns."""
SETTINGS = {
    "total_steps": 2,
    "algorithm.batch_size": 16,
    "evaluation.samples": 8,
    "rollout.max_new_tokens": 6,
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
ROWS = 64
TOKENS = 300
"""Vocabulary of tokenizers that are not part of the repository."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
NOT_HERE = EXAMPLES / "data"
"""Where users put data that is not part of the repository."""


def settings_of(config: str) -> dict[str, Any]:
    values: dict[str, Any] = YAML(typ="safe").load(EXAMPLES / config)
    return values


@dataclass(frozen=True)
class ShortForms:
    """Short forms of examples in one root folder, each run once."""

    site: Site
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Their status, by experiment and trial."""

    def run(self, config: str, trial: str = "1") -> dict[str, Any]:
        """Run the trials from which an example starts, then the example. Return its status at the
        end.
        """
        values = settings_of(config)
        name = f"{values['experiment']}/{trial}"
        if name not in self.ended:
            for source in references(values):
                self.run(maker(source.partition("/")[0]), source.partition("/")[2])
            overrides = [f"{key}={value}" for key, value in self.overrides(config, values)]
            how = ("--scheduler", "local", "--wait", f"trial={trial}")
            self.site.slurmrl("submit", str(EXAMPLES / config), *how, *overrides)
            self.ended[name] = self.site.status(name)
        return self.ended[name]

    def overrides(self, config: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        folder = (EXAMPLES / config).parent
        number = [*CONFIGS, *SERVED].index(config)
        yield "seed", number  # models must differ from their teachers
        evaluation = values.get("evaluation", {})
        if evaluation.get("dataset", {}).get("type") == "prompt" and not evaluation.get("greedy"):
            yield "evaluation.n", 2
        for key, value in leaves(values):
            last = key.rpartition(".")[2]
            if key in SETTINGS:
                yield key, SETTINGS[key]
            elif last == "backend":
                yield key, "fsdp:d1"
            elif last in SIZES and ".architecture." in key and "_config." not in key:
                yield key, SIZES[last]
            elif key.endswith("dataset.path"):
                yield key, self.few_rows(folder / value)
            elif key == "actor.path" and (folder / value).is_relative_to(NOT_HERE):
                yield key, self.model()
            elif last == "tokenizer" and (folder / value).is_relative_to(NOT_HERE):
                yield key, self.tokenizer()
                yield key.replace(".tokenizer", ".architecture.vocab_size"), TOKENS

    def few_rows(self, path: Path) -> Path:
        """Return a copy of a file's first rows. For GSM8K, which is not in the repository, return
        made-up rows of the same form.
        """
        copied = self.site.folder / f"{path.parent.name}-{path.name}"
        if path.is_relative_to(NOT_HERE):
            row = {"question": "What is 1+1?", "answer": "1+1 is 2.\n#### 2"}
            copied.write_text(f"{json.dumps(row)}\n" * ROWS)
        else:
            with path.open() as lines:
                copied.write_text("".join(map(whole_paths(path.parent), islice(lines, ROWS))))
        return copied

    def tokenizer(self) -> Path:
        folder = self.site.folder / "tokenizer"
        train_bpe(["What is 1+1? 1+1 is 2."], TOKENS, folder)
        return folder

    def model(self) -> Path:
        """A small random model with a chat template."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        folder = self.tokenizer()
        settings = folder / "tokenizer_config.json"
        values = json.loads(settings.read_text())
        settings.write_text(json.dumps({**values, "chat_template": TEMPLATE}))
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=TOKENS, max_position_embeddings=256, **SIZES)
        LlamaForCausalLM(config).save_pretrained(folder)
        return folder


def whole_paths(folder: Path) -> Callable[[str], str]:
    """Return a function that makes paths of images in a line absolute."""

    def changed(line: str) -> str:
        row = json.loads(line)
        if "images" not in row:
            return line
        return (
            json.dumps({**row, "images": [str(folder / image) for image in row["images"]]}) + "\n"
        )

    return changed


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def references(values: Mapping[str, Any]) -> list[str]:
    """Yield the trials (EXPERIMENT/TRIAL) from whose models a configuration starts."""
    texts = (value for _, value in leaves(values) if isinstance(value, str))
    found = (text.removeprefix("trial:") for text in texts if text.startswith("trial:"))
    return [text.partition("@")[0] for text in found]


def maker(experiment: str) -> str:
    """The example with this name of an experiment."""
    (config,) = (config for config in CONFIGS if settings_of(config)["experiment"] == experiment)
    return config


@pytest.fixture(scope="module")
def short_forms(tmp_path_factory: pytest.TempPathFactory) -> ShortForms:
    return ShortForms(Site(tmp_path_factory.mktemp("examples")))


@pytest.mark.parametrize(
    "config",
    rotating(*CONFIGS, shares=SHARES),
)
def test_each_example_runs_to_its_end(config: str, short_forms: ShortForms) -> None:
    """The example is evaluated before the first and after the last step.

    The scores of items agree with the metrics.
    """
    values = settings_of(config)
    ended = short_forms.run(config)
    assert ended["state"] == "COMPLETED"
    if "total_steps" not in values:
        return
    lines = short_forms.site.metrics(ended["trial"])
    evaluated = [line["step"] for line in lines if any(name.startswith("eval/") for name in line)]
    assert [line["step"] for line in lines if line["step"]] == [1, 2]
    assert evaluated == ([0, 2] if "evaluation" in values else [])
    folder = short_forms.site.paths(ended["trial"]).evaluations
    files = sorted(folder.iterdir()) if folder.exists() else []
    suites = [f"{suite}." for suite in values.get("evaluation", {}).get("suites") or {}] or [""]
    expected = [f"step-{step:08d}.{suite}json" for step in evaluated for suite in sorted(suites)]
    assert [path.name for path in files] == expected
    for path in files:
        scores = json.loads(path.read_text())
        assert len(scores["scores"]) == scores["items"] > 0
        metrics = next(line for line in lines if line["step"] == scores["step"])
        prefix = "eval/" + path.name.partition(".")[2].removesuffix("json").replace(".", "/")
        for name, estimate in scores["estimates"].items():
            assert metrics[prefix + name] == estimate["value"]
            assert metrics[f"{prefix}{name}/low"] == estimate["low"]


@in_turn(CONFIGS.index("custom/simpo.yaml") % SHARES, SHARES)
def test_custom_loss_is_evaluated_like_built_in_ones(short_forms: ShortForms) -> None:
    """pass@2 with its confidence interval."""
    ended = short_forms.run("custom/simpo.yaml")
    last = short_forms.site.metrics(ended["trial"])[-1]
    rates = [last[f"eval/pass@2{end}"] for end in ("/low", "", "/high")]
    assert rates == sorted(rates)


@in_turn(CONFIGS.index("custom/selective.yaml") % SHARES, SHARES)
def test_custom_role_selects_the_trained_tokens(short_forms: ShortForms) -> None:
    """The role ``guide`` assigns some tokens a higher probability than the actor, and others a
    lower one.
    """
    ended = short_forms.run("custom/selective.yaml")
    assert all(0 < line["selected"] < 1 for line in short_forms.site.metrics(ended["trial"])[1:])

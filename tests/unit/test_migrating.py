"""The pages in docs/migrating translate every setting of public scripts into valid settings."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from ruamel.yaml import YAML

from slurmrl.algorithms.policy.presets import PRESETS
from slurmrl.cli.main import main
from slurmrl.config.load import load, validate
from slurmrl.config.problems import paths, section_at
from slurmrl.config.schema import Config
from slurmrl.config.source import dotted
from slurmrl.plan.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "migrating"
SCRIPTS = YAML(typ="safe").load(Path(__file__).with_name("migrated_scripts.yaml"))
"""By page: the settings of each public script, and the commit that they were read from."""
FILE = re.compile(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")
NO_KEY = ("none", "another way")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
ARCHITECTURES = {
    "Qwen/Qwen3-0.6B": ("qwen3", 1024, 3072, 28, 16, 151936),
    "Qwen/Qwen3-8B": ("qwen3", 4096, 12288, 36, 32, 151936),
    "OpenRLHF/Llama-3-8b-sft-mixture": ("llama", 4096, 14336, 32, 32, 128256),
    "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT": ("qwen3", 1024, 3072, 28, 16, 151936),
}
"""Type and sizes of the models with which the complete configurations start."""


@dataclass(frozen=True)
class Row:
    """A row of a table of settings."""

    page: str
    settings: tuple[str, ...]
    """Full names in the other library, without values."""
    key: str
    """The second cell: keys of slurmrl, ``another way`` or ``none``."""
    notes: str
    algorithm: str


@cache
def rows(page: str) -> tuple[Row, ...]:
    return tuple(_rows(page))


def _rows(page: str) -> Iterator[Row]:
    algorithm, prefix, inside = "grpo", "", False
    for line in (PAGES / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if line.startswith("#"):
            named = re.search(r"`algorithm\.name: (\w+)`", line)
            algorithm, inside = named[1] if named else "grpo", False
        elif len(cells) == 3 and cells[1:] == ["slurmrl", "notes"]:
            header = SPAN.search(cells[0])
            prefix, inside = header[1] if header else "", True
        elif inside and len(cells) == 3 and not set(cells[0]) <= set("-:"):
            names = (re.split(r": | |=", span)[0].lstrip("-+") for span in SPAN.findall(cells[0]))
            full = tuple(prefix + name for name in names if not prefix or name != prefix)
            yield Row(page, full, cells[1], cells[2], algorithm)


@cache
def known(algorithm: str) -> frozenset[str]:
    """Return the dotted keys of a configuration with this algorithm."""
    own = paths(_schema(algorithm), ("algorithm",))
    return frozenset(dotted(key) for key in (*paths(Config), *own))


def _schema(algorithm: str) -> type[BaseModel]:
    schema: type[BaseModel] = ALGORITHMS.load(algorithm)
    return schema


def spans(text: str, algorithm: str) -> Iterator[tuple[str, str]]:
    """Yield the keys of slurmrl in a text, each with its value or an empty string."""
    for span in SPAN.findall(text):
        key, _, value = span.partition(": ")
        top = key.partition(".")[0]
        if re.fullmatch(r"[a-z_]+(\.([a-z_]+|<name>))+", key) and top in known(algorithm):
            yield key, value


def problems_of(key: str, value: str, algorithm: str, folder: Path) -> list[str]:
    """Return the messages of the schema about one value."""
    file = folder / "one.yaml"
    file.write_text(f"algorithm: {{name: {algorithm}, batch_size: 8}}\n")
    source = load(file, [f"{key.replace('<name>', 'own')}={value}"])
    inside = ("algorithm",) if key.startswith("algorithm.") else ()
    schema = _schema(algorithm) if inside else Config
    _, problems = validate(schema, source, inside)
    at = key.replace("<name>", "own")
    return [str(one) for one in (*source.problems, *problems) if one.key.startswith(at)]


@pytest.mark.parametrize("page", SCRIPTS)
def test_migration_page_translates_every_script_setting(page: str) -> None:
    text = (PAGES / page).read_text(encoding="utf-8")
    translated = {name for row in rows(page) for name in row.settings}
    for script, given in SCRIPTS[page].items():
        path = script.split("/", 2)[2]
        assert f"`{path}`" in text, f"{page} does not name {path}"
        assert given["commit"][:8] in text, f"{page} does not name the commit of {path}"
        assert sorted(set(given["settings"].split()) - translated) == [], f"{page}: {path}"
    assert len(SCRIPTS[page]) == 5


@pytest.mark.parametrize("page", SCRIPTS)
def test_migration_row_names_a_key_an_alternative_or_none(page: str) -> None:
    for row in rows(page):
        keys = list(spans(row.key, row.algorithm))
        if row.key in NO_KEY:
            assert row.notes, f"{page}: {row.settings} has no reason"
        else:
            words = SPAN.sub("", row.key).strip(", ")
            assert SPAN.search(row.key), f"{page}: {row.settings}: {row.key}"
            assert not words, f"{page}: {row.settings}: {row.key}"
            single = [span for span in SPAN.findall(row.key) if "." not in span.split(": ")[0]]
            assert {span.split(": ")[0] for span in single} <= known(row.algorithm), row
            assert len(keys) + len(single) == len(SPAN.findall(row.key)), row


@pytest.mark.parametrize("page", [*SCRIPTS, "../migrating.md"])
def test_migration_page_keys_exist_with_valid_values(page: str, tmp_path: Path) -> None:
    others = {name for row in rows(page) for name in row.settings}
    algorithms = {row.algorithm for row in rows(page)} | {"grpo", "sft", "dpo", "distill"}
    anywhere = frozenset[str]().union(*(known(name) for name in algorithms))
    texts = [(row.key, row.algorithm) for row in rows(page)]
    texts += [(row.notes, row.algorithm) for row in rows(page)]
    prose = re.sub(r"```.*?```", "", (PAGES / page).read_text(), flags=re.DOTALL)
    in_tables = "".join(text for text, _ in texts)
    wrong = [
        key
        for key, _ in spans(prose, "grpo")
        if key not in anywhere and key not in others and f"`{key}" not in in_tables
    ]
    for text, algorithm in texts:
        for key, value in spans(text, algorithm):
            if key not in known(algorithm) and key not in others:
                wrong.append(f"{key} ({algorithm})")
            elif value and key not in others:
                wrong += problems_of(key, value, algorithm, tmp_path)
    assert wrong == []


def default(key: str, algorithm: str) -> Any:
    """Return the default of a key, with the preset of the algorithm."""
    *sections, name = key.split(".")
    if key == "rollout.n":
        return PRESETS[algorithm].completions
    if sections[:1] == ["algorithm"]:
        value: Any = _schema(algorithm).model_validate({"name": algorithm, "batch_size": 8})
        for part in (*sections[1:], name):
            value = getattr(value, part)
        return value
    section = section_at(Config, tuple(sections)) or Config
    return section.model_fields[name].default


@pytest.mark.parametrize("page", SCRIPTS)
def test_migration_page_defaults_equal_the_schema(page: str) -> None:
    text = (PAGES / page).read_text(encoding="utf-8")
    table = text.partition("### Other defaults")[2].partition("\n#")[0]
    stated = re.findall(r"^\| `([\w.]+)`(?: \(`(\w+)`\))? \| .* \| `(.+)` \|$", table, re.MULTILINE)
    assert len(stated) == len(re.findall(r"^\| `", table, re.MULTILINE)) > 8
    for key, algorithm, value in stated:
        actual = default(key, algorithm or "grpo")
        actual = list(actual) if isinstance(actual, tuple) else actual
        assert YAML(typ="safe").load(value) == actual, f"{page}: {key}"


def stand_ins(page: str, folder: Path) -> tuple[Path, list[str]]:
    """Write the files of a page, with a local model and data.

    Return the configuration and the overrides that name the local files.
    """
    files = dict(FILE.findall((PAGES / page).read_text(encoding="utf-8")))
    for name, text in files.items():
        (folder / name).write_text(text)
    (config,) = (folder / name for name in files if name.endswith(".yaml"))
    values: dict[str, Any] = YAML(typ="safe").load(config)
    kind, hidden, inner, layers, heads, vocabulary = ARCHITECTURES[values["actor"]["path"]]
    model = folder / "model"
    model.mkdir()
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": vocabulary}
    sizes |= {"head_dim": 128, "max_position_embeddings": 40960}
    (model / "config.json").write_text(json.dumps({"model_type": kind, **sizes}))
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    overrides = [f"actor.path={model}", "cluster.scheduler=slurm", "cluster.gpu_memory=80G"]
    if "python" in values["rollout"]:
        overrides.append(f"rollout.python={sys.executable}")
    for dataset in _datasets(values):
        rows_file = folder / f"{dataset.replace('.', '-')}.jsonl"
        rows_file.write_text(json.dumps(dict.fromkeys(("prompt", "answer"), "1")) + "\n")
        overrides.append(f"{dataset}.path={rows_file}")
    return config, overrides


def _datasets(values: Any, prefix: str = "") -> Iterator[str]:
    """Yield the sections of a configuration that have the path of a dataset."""
    for name, section in values.items():
        if isinstance(section, dict):
            here = f"{prefix}.{name}" if prefix else name
            if "path" in section and here not in ("actor", "ref"):
                yield here
            yield from _datasets(section, here)


@pytest.mark.parametrize("page", SCRIPTS)
def test_complete_configuration_has_a_plan(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``slurmrl plan`` finds no problem, including its estimate of GPU memory."""
    config, overrides = stand_ins(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    code = main(["plan", str(config), *overrides, "--root", str(tmp_path / "runs")])
    out, err = capsys.readouterr()
    assert code == 0, out + err

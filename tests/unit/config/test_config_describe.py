from __future__ import annotations

import subprocess
from pathlib import Path

from pydantic import BaseModel

from slurmrl.config.describe import reference
from slurmrl.config.problems import descriptions, paths, section_of
from slurmrl.config.schema import Config, Section
from slurmrl.plan.algorithms import ALGORITHMS

REPOSITORY = Path(__file__).parents[3]


def schemas() -> dict[str, type[Section]]:
    return {name: ALGORITHMS.load(name) for name in ALGORITHMS}


def fields_without_description(schema: type[BaseModel]) -> list[str]:
    found = []
    for name, field in schema.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            found += fields_without_description(section)
        if not (descriptions(schema)[name] or (section and section.__doc__)):
            found.append(f"{schema.__name__}.{name}")
    return found


def test_every_field_is_described() -> None:
    undescribed = [
        name
        for schema in (Config, *schemas().values())
        for name in fields_without_description(schema)
    ]
    assert undescribed == []


def test_every_key_is_in_the_reference_with_type_and_default() -> None:
    text = reference(schemas())
    for schema in (Config, *schemas().values()):
        for path in paths(schema):
            assert f"| `{path[-1]}` |" in text, path
    assert "| `lr` | number ≥ 0 | `1e-05` | Learning rate after warm-up. |" in text
    assert "| `betas` | list of 2: number ≥ 0, < 1 | `[0.9, 0.95]` |" in text
    assert "| `dtype` | `float32`, `bfloat16` | by device |" in text
    assert "## `dataset`, `evaluation.dataset`" in text
    assert "## `algorithm` with `name:` `ppo`, `grpo`" in text


def test_the_page_in_docs_is_current() -> None:
    command = [str(REPOSITORY / "scripts" / "make-docs"), "--check"]
    subprocess.run(command, check=True, timeout=120)

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, create_model
from ruamel.yaml import YAML

from slurmrl.config.describe import pages
from slurmrl.config.key_facts import facts_of, parts_of
from slurmrl.config.problems import descriptions, keys, section_of
from slurmrl.config.schema import Config, Section
from slurmrl.plan.algorithms import ALGORITHMS

STRICT = ConfigDict(strict=True)
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


def sections(schema: type[BaseModel]) -> set[type[BaseModel]]:
    below = {section_of(field.annotation) for field in schema.model_fields.values()}
    return {schema}.union(*(sections(section) for section in below if section is not None))


def test_reference_has_each_key_of_each_section_once() -> None:
    known = {
        section: {key for key, field in keys(section) if section_of(field.annotation) is None}
        for schema in (Config, *schemas().values())
        for section in sections(schema)
    }
    heads = re.findall(r"^### `(.*)`$", "\n".join(pages(schemas(), "").values()), re.MULTILINE)
    assert len(heads) == sum(map(len, known.values()))
    assert {head.rpartition(".")[2] for head in heads} == set().union(*known.values())


def test_reference_has_type_default_unit_and_presets() -> None:
    found = pages(schemas(), "")
    actor, algorithm = found["configuration/actor.md"], found["configuration/algorithm-ppo.md"]

    def entry(page: str, key: str) -> str:
        return page.partition(f"\n### `{key}`\n")[2].partition("\n#")[0]

    rate = entry(actor, "actor.optimizer.lr")
    assert "- **Type:** number ≥ 0\n- **Default:** `1e-05`\n" in rate
    assert "list of 2 numbers ≥ 0, < 1" in entry(actor, "actor.optimizer.betas")
    assert "- **Default:** bfloat16 on GPUs, float32 on CPUs" in entry(actor, "actor.dtype")
    assert "- **Unit:** seconds" in entry(found["configuration/cluster.md"], "cluster.silence_s")
    coefficient = entry(algorithm, "algorithm.kl.coef")
    assert "- **Default:** `0.1`; `0.04` for `grpo`; `0.0` for `dr_grpo`, `dapo`" in coefficient
    assert "(dataset.md)" in found["configuration/evaluation.md"]


def test_example_of_each_key_is_valid() -> None:
    yaml = YAML(typ="safe", pure=True)
    for schema in (Config, *schemas().values()):
        for section in sections(schema):
            fields = dict(keys(section))
            if own := parts_of(section.__doc__ or "")[2]:
                section.model_validate(yaml.load(own))
            for one in facts_of(section):
                assert one.example or one.section is not None, (section, one.name)
                if not one.example:
                    continue
                field = fields[one.name]
                kind = (
                    Annotated[(field.annotation, *field.metadata)]
                    if field.metadata
                    else field.annotation
                )
                value = yaml.load(one.example)
                if one.named and parts_of(descriptions(section)[one.name])[2] == "":
                    value = {"example": value}  # of the section, and not of the names
                model = create_model("Example", __config__=STRICT, value=(kind, ...))
                model.model_validate({"value": value})


def test_example_on_the_index_page_is_a_valid_configuration() -> None:
    block = re.search(r"```yaml\n(.*?)```", pages(schemas(), "")["configuration.md"], re.DOTALL)
    assert block is not None
    config = Config.model_validate(YAML(typ="safe", pure=True).load(block[1]))
    ALGORITHMS.load(config.algorithm["name"]).model_validate(config.algorithm)


def test_generated_docs_pages_are_current() -> None:
    command = [str(REPOSITORY / "scripts" / "make-docs"), "--check"]
    subprocess.run(command, check=True, timeout=120)

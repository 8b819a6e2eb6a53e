"""The rules of docs/architecture.md that a machine can check: layers, torch-free modules, errors,
names of folders, sizes."""

from __future__ import annotations

import ast
import inspect
import pickle
import statistics
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import slurmrl
from slurmrl import errors

PACKAGE = Path(slurmrl.__file__).parent

ROWS: tuple[dict[str, tuple[str, ...]], ...] = (
    {
        "errors": (),
        "child": (),
        "log": (),
        "run.paths": (),
        "run.keys": (),
        "package": (),
        "version": ("package",),
        "run.worlds": (),
        "backoff": ("errors", "log"),
        "display": (),
        "env": ("errors",),
        "registry": ("errors",),
        "fsio": ("backoff", "errors"),
    },
    {
        "config": ("config.hub", "config.allocation"),
        "config.allocation": (),
        "config.hub": (),
        "name_resolve": (),
        "run.history": (),
        "run.lease": (),
        "run.channel": (),
        "scheduler": ("run.history",),
        "tensors.parallel": (),
        "tensors.parallel.topology": (),
    },
    {
        "plan": ("plan.graph",),
        "plan.graph": (),
        "tensors.layout": (),
        "watch": (),
        "tensors.parallel.gpu": (),
    },
    {
        "data": ("tensors.weights",),
        "tensors.ops": (),
        "tensors.parallel.groups": ("tensors.parallel.device",),
        "tensors.parallel.device": (),
        "tensors.parallel.gpu_memory": (),
        "rewards": ("data",),
        "tensors.checkpoint": (),
        "tensors.transfer": ("tensors.ops",),
        "tensors.weights": ("tensors.checkpoint",),
    },
    {"engines": ("models",), "models": ()},
    {"algorithms": ("rollouts",), "rollouts": ()},
    {"workers": ()},
    {
        "workers.agent": (),
        "workers.master": (),
        "workers.rollout": (),
        "workers.worker": (),
        "workers.supervisor": (),
    },
    {
        "__main__": ("cli",),
        "cli": ("desk", "desk.doctor", "desk.init", "desk.report"),
        "desk.doctor": ("desk",),
        "desk.init": ("desk",),
        "desk.report": ("desk",),
        "desk": (),
    },
)
"""From the bottom up: a part, and the parts of its own row that it may import. A part may import
everything in rows below its own."""

TORCH_FREE = (
    "algorithms.base",
    "algorithms.reward",
    "algorithms.reward.attempts",
    "data",
    "data.meta",
    "data.order",
    "data.records",
    "data.ledger",
    "data.leases",
    "rewards",
    "rewards.*",
    "tensors.checkpoint",
    "tensors.checkpoint.manifest",
    "tensors.checkpoint.export",
    "tensors.transfer",
    "tensors.weights",
    "weights.*",
    "tensors.transfer.regions",
    "tensors.transfer.plan",
    "tensors.transfer.costs",
    "tensors.transfer.costs",
    "engines",
    "engines.*.schema",
    "engines.planned",
    "engines.fsdp.placing",
    "engines.planned",
    "engines.fsdp.placing",
    "engines.megatron.place",
    "engines.megatron.parts",
    "rollouts",
    "rollouts.base",
    "rollouts.completions",
    "rollouts.configured",
    "rollouts.dialogue",
    "rollouts.environments*",
    "rollouts.sample_files",
    "rollouts.sample_group",
    "rollouts.tools*",
    "rollouts.turns",
    "rollouts.verifiers",
    "algorithms",
    "algorithms.schema",
    "algorithms.*.schema",
    "algorithms.*.schema.*",
    "algorithms.scalars",
    "algorithms.kl_control",
    "algorithms.policy.scalars",
    "algorithms.policy.value_norm",
    "workers",
    "workers.messages",
    "workers.process",
    "workers.rollout_messages",
    "workers.rollout",
    "workers.rollout.channel",
    "workers.rollout.session",
    "workers.supervisor*",
    "workers.agent*",
    "workers.master*",
)
"""Beyond the rows below the first one that may import torch, and the command line."""

TORCH_FROM_ROW = 3
COMMAND_LINE_ROW = 8
FORBIDDEN_NAMES = {"utils", "util", "common", "misc", "experimental", "legacy", "helpers"}


class Part(NamedTuple):
    row: int
    name: str


class Import(NamedTuple):
    importer: str
    imported: str
    line: int


@cache
def modules() -> dict[str, Path]:
    """All modules by dotted name without ``slurmrl.``; the package itself is ``""``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text())


def part_of(module: str) -> Part:
    """The longest entry of ROWS that holds a module."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        for row, entries in enumerate(ROWS):
            if name in entries:
                return Part(row, name)
    pytest.fail(f"slurmrl.{module} has no place in the table of layers")


def imports(module: str) -> Iterator[Import]:
    """What a module imports from slurmrl, in functions and under TYPE_CHECKING as well."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in slurmrl.{module}, line {node.lineno}"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("slurmrl."):
                yield Import(module, _module_of(name.removeprefix("slurmrl.")), node.lineno)


def _module_of(name: str) -> str:
    """``errors.ConfigError`` lies in ``errors``; a name of the package itself is in ``""``."""
    return name if name in modules() else name.rpartition(".")[0]


def allowed(importer: Part, imported: Part) -> bool:
    return (
        imported.row < importer.row
        or imported.name == importer.name
        or imported.name in ROWS[importer.row].get(importer.name, ())
    )


def torch_free_modules() -> list[str]:
    free = []
    for module in modules():
        if not module or module.endswith("__main__"):
            continue
        row = part_of(module).row
        listed = any(fnmatch(module, pattern) for pattern in TORCH_FREE)
        if row < TORCH_FROM_ROW or row == COMMAND_LINE_ROW or listed:
            free.append(module)
    return free


def test_imports_point_downwards() -> None:
    wrong = [
        f"{PACKAGE.name}/{modules()[one.importer].relative_to(PACKAGE)}:{one.line} "
        f"imports slurmrl.{one.imported}"
        for module in modules()
        if module
        for one in imports(module)
        if one.imported and not allowed(part_of(module), part_of(one.imported))
    ]
    assert wrong == []


def test_the_layer_check_sees_what_it_forbids() -> None:
    fsio, config, history, channel = map(
        part_of, ("fsio.atomic", "config", "run.history", "run.channel")
    )
    assert allowed(history, fsio)
    assert not allowed(fsio, history)
    assert not allowed(channel, history)
    assert not allowed(config, part_of("plan"))
    assert allowed(part_of("plan.build"), part_of("plan.graph"))
    assert not allowed(part_of("plan.graph"), part_of("plan.build"))
    assert part_of("tensors.parallel.topology").row < part_of("tensors.parallel.gpu").row
    assert "backoff" in {one.imported for one in imports("run.channel.follower")}


def test_the_lowest_row_needs_only_the_standard_library() -> None:
    for module in modules():
        if not module or part_of(module).row > 0:
            continue
        for node in ast.walk(tree(module)):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in names:
                top = name.partition(".")[0]
                assert top == "slurmrl" or top in sys.stdlib_module_names, f"{module}: {name}"


IMPORT_ALL = """
import importlib, sys
from slurmrl.errors import MissingDependencyError
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except MissingDependencyError as error:
        print(f"{name} left out: {error}")
    if "torch" in sys.modules:
        sys.exit(f"importing {name} imports torch")
"""


def test_every_entry_of_the_tables_names_modules() -> None:
    """What matches nothing forbids nothing."""
    parts = {part_of(module) for module in modules() if module}
    named = {Part(row, name) for row, entries in enumerate(ROWS) for name in entries}
    assert named - parts == set()
    for entries in ROWS:
        for name, neighbours in entries.items():
            assert set(neighbours) <= set(entries), name
    matched = [pattern for pattern in TORCH_FREE if any(fnmatch(m, pattern) for m in modules())]
    assert matched == list(TORCH_FREE)


def test_torch_free_modules() -> None:
    free = torch_free_modules()
    assert {"errors", "run.history.log", "config"} <= set(free)
    command = [sys.executable, "-c", IMPORT_ALL, *(f"slurmrl.{module}" for module in free)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr


ERRORS = [
    one for _, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, BaseException)
]


def example(kind: type[Exception]) -> Exception:
    if kind is errors.ConfigError:
        return kind((errors.Problem("a.yaml:3", "actor.backend", "wrong"),))
    if kind is errors.SlotTakenError:
        return kind(3)
    if kind is errors.RefusedError:
        return kind("what happened", 400)
    return kind("what happened")


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_pickle_and_belong_to_the_tree(kind: type[Exception]) -> None:
    error = example(kind)
    error.add_note("a note")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert type(copy) is kind
    assert (copy.args, str(copy), vars(copy)) == (error.args, str(error), vars(error))
    assert isinstance(error, errors.SlurmrlError)
    assert error.exit_code in (1, 2, 3)
    assert str(error)
    standard = set(kind.__mro__) - set(ERRORS) - {Exception, BaseException, object}
    assert standard or kind is errors.SlurmrlError


def test_errors_are_defined_in_one_place() -> None:
    known = {kind.__name__ for kind in ERRORS}
    builtin = {"Exception", "BaseException"}
    for module in modules():
        if module == "errors":
            continue
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                assert not bases & (known | builtin), f"slurmrl.{module}.{node.name}"


def test_no_two_classes_share_a_name() -> None:
    """A name means one thing wherever it is read."""
    owners: dict[str, list[str]] = {}
    for module in modules():
        for node in tree(module).body:
            if isinstance(node, ast.ClassDef):
                owners.setdefault(node.name, []).append(module)
    assert {name: found for name, found in owners.items() if len(found) > 1} == {}


def test_no_catch_all_folder() -> None:
    for module in modules():
        assert not set(module.split(".")) & FORBIDDEN_NAMES, module


def test_sizes() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert {name: count for name, count in lines.items() if count > 500} == {}
    assert statistics.median(lines.values()) < 130
    long = {
        f"{module}.{node.name}": length
        for module in modules()
        for node in ast.walk(tree(module))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > 80
    }
    assert long == {}

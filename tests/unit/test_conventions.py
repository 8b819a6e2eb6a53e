"""The rules of docs/architecture.md that a machine can check: rooms, torch-free modules, errors,
names of folders, sizes.
"""

from __future__ import annotations

import ast
import inspect
import pickle
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from functools import cache
from pathlib import Path, PurePath
from typing import NamedTuple

import pytest

import slurmrl
from slurmrl import errors
from slurmrl.run.reports import Failure

PACKAGE = Path(slurmrl.__file__).parent

ARCHITECTURE = PACKAGE.parent / "docs" / "architecture.md"
BASE = "base"
"""The room of the modules at the top of the package, and of what belongs to them."""
OF_BASE = ("display", "fsio")
MAY_IMPORT_TORCH = ("algorithms", "data", "engines", "models", "rollouts", "tensors", "workers")
MOST_FLOORS = 10
MOST_LINES = 116_745
TORCH_FREE = (
    "algorithms.base",
    "algorithms.summaries",
    "data",
    "data.meta",
    "data.order",
    "data.records",
    "data.ledger",
    "data.leases",
    "rewards",
    "rewards.*",
    "tensors",
    "tensors.bins",
    "tensors.layout*",
    "tensors.pictures",
    "tensors.parallel",
    "tensors.parallel.topology",
    "tensors.parallel.gpu",
    "tensors.checkpoint",
    "tensors.checkpoint.manifest",
    "tensors.checkpoint.export",
    "tensors.transfer",
    "tensors.weights*",
    "tensors.transfer.plan",
    "models.hf_form",
    "engines",
    "engines.planned",
    "engines.megatron",
    "engines.megatron.parts",
    "rollouts",
    "rollouts.base",
    "rollouts.completions",
    "rollouts.environments",
    "rollouts.episodes",
    "rollouts.generation.base",
    "rollouts.policy",
    "rollouts.sample_files",
    "rollouts.tools*",
    "algorithms",
    "algorithms.schema",
    "algorithms.*_schema",
    "algorithms.policy.schema",
    "algorithms.policy.hyperparameters",
    "algorithms.policy.presets",
    "algorithms.scalars",
    "workers",
    "workers.messages",
    "workers.child_process",
    "workers.rollout_messages",
    "workers.rollout",
    "workers.rollout.session",
    "workers.supervisor*",
    "workers.agent*",
    "workers.master*",
)
"""In rooms that may import torch, what must not. No other room does."""

FORBIDDEN_NAMES = {"utils", "util", "common", "misc", "experimental", "legacy", "helpers"}
SHARED_NAMES = {"__init__", "__main__", "base", "engine", "schema"}
"""Names of modules that have the same role in each package: a contract, an engine, settings."""


class Room(NamedTuple):
    """A row of the table in docs/architecture.md."""

    imports: frozenset[str]
    lines: int


class Import(NamedTuple):
    importer: str
    imported: str
    line: int


@cache
def modules() -> dict[str, Path]:
    """Return all modules by dotted name without ``slurmrl.``; the package is ``""``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text())


@cache
def rooms() -> dict[str, Room]:
    """The table of rooms in docs/architecture.md."""
    text = ARCHITECTURE.read_text().partition("| room |")[2].partition("\n\n")[0]
    found = {}
    for line in text.splitlines()[2:]:
        name, _, imported, lines = (cell.strip() for cell in line.strip("|").split("|"))
        known = frozenset(imported.replace("`", "").replace(",", " ").split())
        found[name.strip("`")] = Room(known, int(lines.replace(",", "")))
    return found


def room_of(module: str) -> str:
    top = module.partition(".")[0]
    if module == "__main__":
        return "cli"
    return BASE if top in OF_BASE or (PACKAGE / f"{top}.py").exists() else top


def imports(module: str) -> Iterator[Import]:
    """Return all imports of a module from slurmrl, also under TYPE_CHECKING."""
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
    """Return the module of a dotted name: ``errors`` for ``errors.ConfigError``, ``""`` for a name
    of the package itself.
    """
    return name if name in modules() else name.rpartition(".")[0]


def arrows() -> dict[tuple[str, str], list[str]]:
    """Return the imports of all rooms from other rooms, each with its places."""
    found: dict[tuple[str, str], list[str]] = {}
    for module in filter(None, modules()):
        for one in imports(module):
            rooms_ = (room_of(module), room_of(one.imported) if one.imported else BASE)
            if rooms_[0] != rooms_[1]:
                file = modules()[module].relative_to(PACKAGE.parent)
                found.setdefault(rooms_, []).append(f"{file}:{one.line}")
    return found


def floors(graph: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """Return the number of levels of rooms below each room. Fails for a cycle."""
    found: dict[str, int] = {}

    def floor(name: str, above: tuple[str, ...]) -> int:
        assert name not in above, f"a circle: {' -> '.join((*above, name))}"
        if name not in found:
            below = [floor(other, (*above, name)) for other in graph[name]]
            found[name] = max(below, default=-1) + 1
        return found[name]

    for name in graph:
        floor(name, ())
    return found


def torch_free_modules() -> list[str]:
    free = []
    for module in modules():
        if not module or module.endswith("__main__"):
            continue
        listed = any(fnmatch(module, pattern) for pattern in TORCH_FREE)
        if listed or room_of(module) not in MAY_IMPORT_TORCH:
            free.append(module)
    return free


def test_rooms_import_only_declared_rooms() -> None:
    assert {room_of(module) for module in filter(None, modules())} == set(rooms())
    wrong = [
        f"{place} imports {imported}"
        for (importer, imported), places in arrows().items()
        if imported not in rooms()[importer].imports
        for place in places
    ]
    assert wrong == []
    named = {(name, other) for name, room in rooms().items() for other in room.imports}
    assert named - set(arrows()) == set(), "rooms name others that they do not import"


def test_rooms_have_no_import_cycles_and_few_levels() -> None:
    assert (
        max(floors({name: room.imports for name, room in rooms().items()}).values()) < MOST_FLOORS
    )


def test_room_check_detects_forbidden_imports() -> None:
    assert room_of("run.history.slots") == "run"
    assert room_of("fsio.atomic") == room_of("errors") == BASE
    assert "backoff" in {one.imported for one in imports("run.channel.follower")}
    assert any(place.startswith("slurmrl/desk/") for place in arrows()["desk", "plan"])
    assert ("plan", "desk") not in arrows()
    assert floors({"a": ["b", "c"], "b": ["c"], "c": []}) == {"c": 0, "b": 1, "a": 2}
    with pytest.raises(AssertionError, match="a circle: a -> b -> a"):
        floors({"a": ["b"], "b": ["a"]})


def test_modules_have_no_import_cycles() -> None:
    """Imports under TYPE_CHECKING also count."""
    floors(
        {module: {one.imported for one in imports(module)} - {module, ""} for module in modules()}
    )


def test_classes_and_functions_do_not_share_names_with_modules() -> None:
    """An import of the module would replace the class or function."""
    defined = [
        f"{module}.{node.name}"
        for module in modules()
        for node in tree(module).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    ]
    assert not set(defined) & set(modules())


def test_wheels_have_every_file_of_the_package() -> None:
    lines = (PACKAGE.parent / "setup.cfg").read_text().partition("[options.package_data]")[2]
    patterns = lines.partition("\n\n")[0].split()[2:]

    def files(folder: Path) -> list[str]:
        command = ["git", "ls-files"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.split()

    data = [name for name in files(PACKAGE) if not name.endswith(".py")]
    for link in ("docs", "examples"):
        data += [f"{link}/{name}" for name in files(PACKAGE / link)]
    there = [name for name in data if (PACKAGE / name).is_file()]
    left_out = [name for name in there if not any(PurePath(name).match(one) for one in patterns)]
    assert left_out == []


def test_rooms_keep_their_budgets() -> None:
    lines = dict.fromkeys(rooms(), 0)
    for module, path in modules().items():
        lines[room_of(module) if module else BASE] += len(path.read_text().splitlines())
    over = {name: count for name, count in lines.items() if count > rooms()[name].lines}
    assert over == {}, "make room, or say in the commit why the budget grows"
    assert sum(room.lines for room in rooms().values()) <= MOST_LINES


def test_base_room_imports_only_the_standard_library() -> None:
    for module in modules():
        if not module or room_of(module) != BASE:
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
    """An entry without a match would forbid nothing."""
    assert set(MAY_IMPORT_TORCH) <= set(rooms())
    matched = [pattern for pattern in TORCH_FREE if any(fnmatch(m, pattern) for m in modules())]
    assert matched == list(TORCH_FREE)


def test_declared_modules_import_no_torch() -> None:
    free = torch_free_modules()
    assert {"errors", "run.history.slots", "config"} <= set(free)
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
    if kind is errors.RejectedError:
        return kind("what happened", 400)
    if kind is errors.ReportedError:
        return kind(Failure(reason="what happened"))
    return kind("what happened")


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_can_be_pickled_and_derive_from_the_base_error(kind: type[Exception]) -> None:
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
    """A class name has one meaning in the whole package."""
    owners: dict[str, list[str]] = {}
    for module in modules():
        for node in tree(module).body:
            if isinstance(node, ast.ClassDef):
                owners.setdefault(node.name, []).append(module)
    assert {name: found for name, found in owners.items() if len(found) > 1} == {}


def test_no_module_defines_a_name_twice() -> None:
    """The second definition would replace the first one."""
    twice = {}
    for module in modules():
        names = Counter(
            target.id
            for node in tree(module).body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name) and target.id != "_"
        )
        if again := [name for name, count in names.items() if count > 1]:
            twice[module] = again
    assert twice == {}


def test_no_two_modules_share_a_name() -> None:
    names = Counter(path.stem for path in modules().values())
    assert {name for name, count in names.items() if count > 1} <= SHARED_NAMES


def test_package_has_no_catch_all_directory() -> None:
    for module in modules():
        assert not set(module.split(".")) & FORBIDDEN_NAMES, module


def test_modules_and_functions_keep_their_size_limits() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert {name: count for name, count in lines.items() if count > 500} == {}
    assert statistics.median(lines.values()) < 260
    long = {
        f"{module}.{node.name}": length
        for module in modules()
        for node in ast.walk(tree(module))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > 80
    }
    assert long == {}

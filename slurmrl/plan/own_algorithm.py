"""The user's own code that a configuration names, and the checks of a user's algorithm.

The name of code is ``my_file.py:Name`` or ``package.module:Name``. Commands on the login node
import its module without torch. Ranks and the master import the trial's copy of the module.
"""

from __future__ import annotations

import importlib
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from slurmrl.config.problems import rejected
from slurmrl.config.profiles import expanded
from slurmrl.config.schema import Config
from slurmrl.config.schema.base import OWN_CODE
from slurmrl.config.schema.config import OWN_ROLE, ROLES
from slurmrl.config.source import KeyPath, Source, dotted
from slurmrl.errors import Problem, UsageError
from slurmrl.plan.algorithms import Algorithm
from slurmrl.plan.dataflow import DATASET_KEYS, Call, Measure, Method, RoleUse
from slurmrl.registry import import_own, near, resolve

KIND: Final = "algorithm"
OWN_FILE: Final = re.compile(r"(.+\.py):(\w+)")
FORMS: Final = "my_file.py:Class or package.module:Class of your own"
INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
DOCS: Final = "docs/algorithms/custom.md"


class OwnName(NamedTuple):
    """The name of a user's own code."""

    reference: str
    """Module and class: ``module:Class``."""
    folder: Path | None = None
    """Folder of the file, if the name has a file."""


def is_own(name: object) -> bool:
    """Return whether a value is the ``module:name`` of the user's own code."""
    return isinstance(name, str) and OWN_CODE.fullmatch(name) is not None


def own_name(text: str, folder: Path) -> OwnName | None:
    """Return the name in ``FILE.py:NAME`` or ``MODULE:NAME``; None for another string.

    A relative file starts at ``folder``. Raises UsageError if the file does not exist, or if Python
    cannot import it by its name.
    """
    if OWN_CODE.fullmatch(text) and not text.partition(":")[0].endswith(".py"):
        return OwnName(text)
    match = OWN_FILE.fullmatch(text)
    if match is None:
        return None
    path = folder / expanded(match[1])
    if not path.is_file():
        raise UsageError(f"'{text}' is not allowed: there is no file {path}")
    if not path.stem.isidentifier():
        raise UsageError(
            f"'{text}' is not allowed: '{path.stem}' is not a module name; rename the file to "
            "letters, digits and '_'"
        )
    return OwnName(f"{path.stem}:{match[2]}", path.parent)


def load_on_login_node(reference: str, folders: Sequence[Path]) -> Any:
    """Return the class with a name, without torch; modules in ``folders`` take precedence.

    Raises UsageError with the reason if the class cannot be loaded.
    """
    top = reference.partition(":")[0].partition(".")[0]
    try:
        with without_torch(), warnings.catch_warnings():
            # `wrong_class` rejects fields that shadow other fields, with a clearer message.
            warnings.filterwarnings("ignore", "Field name .* shadows")
            _use_module_of(top, folders)
            return import_own(KIND, reference)
    except (Exception, SystemExit) as error:  # The user's code may raise any error.
        if _is_of_torch(error):
            raise UsageError(
                f"'{reference}' imports torch when it is loaded{_line_of(error, folders)}, but "
                "commands on the login node read its settings without torch. Import torch inside "
                f"the functions that use it ({DOCS})"
            ) from error
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"'{reference}' cannot be loaded: {describe(error, folders)}") from error


@contextmanager
def importable(folders: Sequence[Path]) -> Iterator[None]:
    """Append folders to Python's search path for modules while the context is entered."""
    added = [str(folder) for folder in folders if str(folder) not in sys.path]
    sys.path.extend(added)
    try:
        yield
    finally:
        sys.path[:] = [entry for entry in sys.path if entry not in added]


def describe(error: BaseException, folders: Sequence[Path]) -> str:
    """Return an error and its line, ``NameError: name 'x' is not defined (my_file.py, line 3)``."""
    return f"{type(error).__name__}: {error}{_line_of(error, folders)}"


def _is_of_torch(error: BaseException) -> bool:
    return any(isinstance(each, TorchImportError) for each in (error, error.__cause__))


def _line_of(error: BaseException, folders: Sequence[Path]) -> str:
    """Return the innermost line of the user's own code that raised an error."""
    raised = error.__cause__ or error
    for frame in reversed(traceback.extract_tb(raised.__traceback__)):
        if any(Path(frame.filename).is_relative_to(folder) for folder in folders):
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""


def _use_module_of(top: str, folders: Sequence[Path]) -> None:
    """Replace a loaded module ``top`` by the module of this name in ``folders``, if any."""
    spec = own_module(top, folders)
    if spec is None or spec.loader is None:
        return
    for name in [name for name in sys.modules if name == top or name.startswith(f"{top}.")]:
        del sys.modules[name]
    module = module_from_spec(spec)
    sys.modules[top] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(top, None)
        raise


def own_module(top: str, folders: Sequence[Path]) -> ModuleSpec | None:
    """Return the module with a name in ``folders``; None if there is none.

    Raises UsageError if the module would hide a module of Python, slurmrl or an installed package.
    """
    importlib.invalidate_caches()
    spec = PathFinder.find_spec(top, [str(folder) for folder in folders])
    if spec is None or not spec.has_location:
        return None
    if top == "slurmrl" or top in sys.stdlib_module_names or _is_installed(top, folders):
        raise UsageError(
            f"{spec.origin} is not allowed: this file would hide the existing module {top}; "
            "rename the file"
        )
    return spec


def _is_installed(top: str, folders: Sequence[Path]) -> bool:
    others = [path for path in sys.path if Path(path).absolute() not in folders]
    spec = PathFinder.find_spec(top, others)
    return spec is not None and bool(INSTALLED & set(Path(spec.origin or "").parts))


class TorchImportError(ImportError):
    """An import of torch on the login node."""


class _NoTorch(MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name == "torch":
            raise TorchImportError("torch cannot be imported on the login node", name=name)
        return None


@contextmanager
def without_torch() -> Iterator[None]:
    """Raise TorchImportError for imports of torch, unless the process has imported torch before."""
    finder = _NoTorch()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


SECTIONS: Final = {"name": {"reward", "episode"}, "type": {"dataset"}}
"""Mapping from a setting to the sections in which it may name the user's code."""


def name_modules(source: Source) -> tuple[list[Path], list[Problem]]:
    """Replace the names of files in the values with the names of their modules.

    Return the folders of the files, and the problems found.
    """
    folders: dict[str, Path] = {}
    problems = []
    for section, key, where in list(_names(source.values, ())):
        text = section[key]
        try:
            own = own_name(text, source.folder(where))
            if own is None or own.folder is None:
                continue
            if folders.setdefault(own.reference.partition(":")[0], own.folder) != own.folder:
                raise UsageError(
                    f"'{text}' is not allowed: another setting names a file with the same name in "
                    "another folder; rename one of the two files"
                )
            section[key] = own.reference
        except UsageError as error:
            problems.append(source.problem(where, str(error)))
    return list(folders.values()), problems


def _names(value: Any, where: KeyPath) -> Iterator[tuple[dict[str, Any], str, KeyPath]]:
    """Yield (mapping, key, dotted place of the mapping) for each key that names a file."""
    if not isinstance(value, dict) or "options" in where:
        return
    for key, inner in value.items():
        inside = SECTIONS.get(key, set()).intersection(where)
        if inside and isinstance(inner, str) and OWN_FILE.fullmatch(inner):
            yield value, key, (*where, key)
        yield from _names(inner, (*where, key))


BASE: Final = "slurmrl.algorithms.schema:AlgorithmSchema"
"""Name of a class in a room that ``plan`` must not import."""
RECORDED: Final = {
    "rollout.top_k": "slurmrl.algorithms.schema:supports",
    "rollout.replay_experts": "slurmrl.algorithms.schema:routes",
}
"""Mapping from a setting that enables a record to a function that returns the record's keys."""
NUMBERS: Final = ("batch_size", "minibatches", "optimizer_steps", "epochs", "completions")
ALGORITHM: Final = ("algorithm",)


def wrong_class(schema: Any) -> str:
    """Return why an object cannot be the schema of an algorithm; empty if it can."""
    base: type[BaseModel] = resolve(BASE)
    if not isinstance(schema, type) or not issubclass(schema, base):
        kind = schema.__name__ if isinstance(schema, type) else f"a {type(schema).__name__}"
        return f"{kind} is not a subclass of {BASE.replace(':', '.')}"
    if missing := sorted(getattr(schema, "__abstractmethods__", ())):
        return f"{schema.__name__} does not define {', '.join(f'{name}()' for name in missing)}"
    name: Any = schema.model_fields["name"].annotation
    if get_origin(name) is Literal:
        kept = get_args(name)
        return (
            f"{schema.__name__} allows only the names of its base class ({', '.join(kept)}); add a "
            "field to it: name: str"
        )
    for field in schema.model_fields.keys() - base.model_fields.keys():
        if hasattr(base, field):
            return f"the setting '{field}' has the name of {base.__name__}.{field}; rename it"
    for field in ("dataset_types", "evaluation_types"):
        types = getattr(schema, field, None)
        known = sorted(DATASET_KEYS)
        if not isinstance(types, tuple) or not types or not set(types) <= set(known):
            return (
                f"{schema.__name__}.{field} is {types!r}, must be a tuple of dataset types; "
                f"allowed: {', '.join(known)}"
            )
    return _wrong_default(schema)


def _wrong_default(schema: type[BaseModel]) -> str:
    """Return why a setting's default is invalid. pydantic checks defaults only on demand."""
    strict = {"model_config": ConfigDict(validate_default=True)}
    try:
        return _rejected_default(cast(type[BaseModel], type(schema.__name__, (schema,), strict)))
    except Exception as error:  # noqa: BLE001 - A user's validator may need the missing values.
        if not (message := _rejected_default(_without_validators(schema))):
            return ""
        return f"{message}; and a validator raises {type(error).__name__} on defaults: {error}"


def _without_validators(schema: type[BaseModel]) -> type[BaseModel]:
    """Return a schema with the same settings that checks only their types and limits."""
    fields: dict[str, Any] = {
        name: (field.annotation, field) for name, field in schema.model_fields.items()
    }
    config = ConfigDict(**{**schema.model_config, "validate_default": True})
    made: type[BaseModel] = create_model(schema.__name__, __config__=config, **fields)
    return made


def _rejected_default(model: type[BaseModel]) -> str:
    try:
        model.model_validate({})
    except ValidationError as error:
        wrong = [each for each in error.errors() if each["loc"] and each["type"] != "missing"]
        for details in wrong:
            setting, reason = dotted(details["loc"]), rejected(details)
            return f"the default of {model.__name__}.{setting} is wrong: {reason}"
    return ""


def violations(
    algorithm: Algorithm, config: Config, folders: Sequence[Path]
) -> Iterator[tuple[KeyPath, str]]:
    """Yield key and message of each violation of the interface by code in ``folders``."""
    if not is_own(algorithm.name):
        for role in config.models:
            yield ("models", role), "is not allowed: only a custom algorithm has additional roles"
        return
    try:
        with without_torch():
            uses, calls = tuple(algorithm.roles()), tuple(algorithm.calls(config))
            evaluation: tuple[Call, ...] = ()
            measures: dict[str, Measure] = {}
            for own in config.evaluations.values():
                evaluation += tuple(algorithm.evaluation_calls(own))
                measures |= algorithm.evaluation_measures(own)
            numbers = {name: getattr(algorithm, name) for name in NUMBERS}
            numbers["sequences_per_item()"] = algorithm.sequences_per_item(config)
            list(algorithm.conflicts(config))
            algorithm.refill()
            controller = algorithm.controller()
    except Exception as error:  # noqa: BLE001 - The user's code may raise any error.
        yield ALGORITHM, f"{algorithm.name} failed: {describe(error, folders)}"
        return
    problems = [
        *_wrong_values(uses, [*calls, *evaluation], numbers, controller),
        *_wrong_measures(measures),
        *(_wrong_roles(uses) if all(isinstance(use, RoleUse) for use in uses) else ()),
    ]
    if not problems:
        for call in (*calls, *evaluation):
            wrong = list(_wrong_fields(call))
            problems += wrong or _wrong_call(call, {use.role: use for use in uses}, config)
        problems += _untrained(uses, calls)
        problems += _records(calls, evaluation, one_pass=algorithm.one_pass)
        problems += _unread(algorithm, calls, config)
    for problem in dict.fromkeys(problems):
        yield ALGORITHM, f"{algorithm.name}: {problem}"
    if not problems:
        yield from _unused_models(uses, config)


def _wrong_values(
    uses: Sequence[Any], calls: Sequence[Any], numbers: dict[str, Any], controller: Any
) -> Iterator[str]:
    for use in uses:
        if not isinstance(use, RoleUse):
            yield f"roles() returns {use!r}, must be RoleUse objects"
    for call in calls:
        if not isinstance(call, Call):
            yield f"calls() returns {call!r}, must be Call objects"
    for name, number in numbers.items():
        if type(number) is not int or number < 1:
            yield f"{name} is {number!r}, must be an integer of at least 1"
    if not is_own(controller):
        yield f"controller() returns {controller!r}, must be 'module:Class'"


def _wrong_roles(uses: Sequence[RoleUse]) -> Iterator[str]:
    roles = [use.role for use in uses]
    if "actor" not in roles:
        yield "roles() lacks the actor, which every algorithm uses"
    for role in sorted(role for role, times in Counter(roles).items() if times > 1):
        yield f"roles() has the role '{role}' twice"
    for use in uses:
        taken = use.role in Config.model_fields and use.role not in ROLES
        if use.role not in ROLES and (taken or not OWN_ROLE.fullmatch(use.role)):
            why = "it is a section of the configuration" if taken else "use a-z, 0-9 and '_'"
            yield f"the role '{use.role}' is not allowed: {why}"
        if use.head not in ("lm", "value"):
            yield f"the role '{use.role}' has the head {use.head!r}; allowed: lm, value"


def _wrong_fields(call: Call) -> Iterator[str]:
    what = f"call {call.name!r}"
    if not is_own(call.interface):
        yield f"{what} has the interface {call.interface!r}, must be 'module:Class'"
    if not isinstance(call.method, Method):
        allowed = ", ".join(f"Method.{method.name}" for method in Method)
        yield f"{what} has the method {call.method!r}; allowed: {allowed}"
    for field in ("inputs", "outputs", "metrics"):
        names = getattr(call, field)
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            yield f"{what} has the {field} {names!r}, must be a tuple of names"


def _wrong_call(call: Call, uses: dict[str, RoleUse], config: Config) -> Iterator[str]:
    what = f"call '{call.name}'"
    if call.role is None:
        if call.method is Method.TRAIN_STEP:
            yield f"{what} trains, but has no role"
        return
    if call.role == "reward_model" and call.role not in uses:
        return  # The check of the reward model's folder reports the error.
    if call.role not in uses:
        yield f"{what} uses the role '{call.role}', which roles() lacks; {near(call.role, [*uses])}"
        return
    if call.method is Method.TRAIN_STEP and not uses[call.role].trained:
        yield f"{what} trains {call.role}, but roles() does not declare it as trained"
    if call.method is Method.GENERATE and uses[call.role].head != "lm":
        yield f"{what} generates with {call.role}, whose head is not lm"
    if call.method is Method.GENERATE and call.role != "actor" and config.rollout.backend:
        yield (
            f"{what} generates with {call.role}, but with rollout.backend only the actor "
            "generates; leave out rollout.backend"
        )


def _wrong_measures(measures: dict[Any, Any]) -> Iterator[str]:
    for name, measure in measures.items():
        if not isinstance(name, str) or not isinstance(measure, Measure):
            known = ", ".join(f"Measure.{each.name}" for each in Measure)
            yield (
                f"evaluation_measures() returns {name!r}: {measure!r}, must be the name of a "
                f"metric with one of {known}"
            )


def _untrained(uses: Sequence[RoleUse], calls: Sequence[Call]) -> Iterator[str]:
    trained = {call.role for call in calls if call.method is Method.TRAIN_STEP}
    for use in uses:
        if use.trained and use.role not in trained:
            yield f"roles() declares {use.role} as trained, but no call trains it"


def _records(calls: Sequence[Call], evaluation: Sequence[Call], *, one_pass: bool) -> Iterator[str]:
    recording = [call.name for call in calls if call.method is Method.RECORD]
    if len(recording) > 1:
        yield f"only one call of a step may record results, not {' and '.join(recording)}"
    for call in evaluation:
        if call.method is Method.RECORD:
            yield f"only calls of a step may record results, not '{call.name}' of an evaluation"
    for place, call in enumerate(calls):
        if call.method is Method.FILTER and one_pass:
            yield f"call '{call.name}' filters items, but with one_pass no step can replace them"
        for before in calls[:place] if call.method is Method.FILTER else ():
            if before.method is Method.RECORD:
                yield f"call '{before.name}' records results before '{call.name}' filters items"


def _unread(algorithm: Algorithm, calls: Sequence[Call], config: Config) -> Iterator[str]:
    """Yield messages about training calls that do not read the records of generation."""
    for setting, recorded in RECORDED.items():
        keys = resolve(recorded)(algorithm, config)
        for call in calls:
            trains = call.role == "actor" and call.method is Method.TRAIN_STEP
            if trains and (missing := [key for key in keys if key not in call.inputs]):
                yield (
                    f"replays the records of generation, but with {setting} call '{call.name}' "
                    f"does not read {' and '.join(missing)}"
                )


def _unused_models(uses: Sequence[RoleUse], config: Config) -> Iterator[tuple[KeyPath, str]]:
    own = [use.role for use in uses if use.role not in ROLES]
    for role in config.models:
        if role not in own:
            hint = near(role, own) if own else "the algorithm has no additional roles"
            yield ("models", role), f"is not used by the algorithm; {hint}"

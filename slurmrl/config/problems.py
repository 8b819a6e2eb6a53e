"""Messages for the user about violations of the schema: value, rule and allowed values."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from slurmrl import log
from slurmrl.config.source import KeyPath, Source, dotted
from slurmrl.errors import Problem
from slurmrl.registry import near

RULES = {
    "greater_than": "must be greater than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le}",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be a boolean: true or false",
    "string_type": "must be a string",
    "dict_type": "must be a section (key: value)",
    "model_type": "must be a section (key: value)",
    "tuple_type": "must be a list: [a, b]",
    "list_type": "must be a list: [a, b]",
    "finite_number": "must be a finite number",
    "too_long": "has {actual_length} items; at most {max_length} are allowed",
    "too_short": "has too few items; at least {min_length} must be given",
}

logger = log.get(__name__)

PRECISIONS = ("fp16", "bf16")
"""Flags of other trainers that correspond to ``dtype``."""
OTHER_NAMES = {
    **dict.fromkeys(("num_nodes", "n_nodes", "nnodes", "nodes"), "hosts"),
    **dict.fromkeys(("gpus_per_node", "n_gpus_per_node", "gpus_per_host"), "workers_per_host"),
    "learning_rate": "lr",
    "train_batch_size": "batch_size",
    "model_path": "path",
    **dict.fromkeys(("r", "lora_r", "lora_rank"), "rank"),
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "targets",
    **dict.fromkeys(("epsilon", "adam_epsilon"), "eps"),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), "betas"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "lr_schedule"), "schedule"),
    **dict.fromkeys(("experiment_name", "project_name"), "experiment"),
    **dict.fromkeys(("trial_name", "run_name"), "trial"),
}
"""Mapping from a setting's name in other systems to slurmrl's name in the same section."""
REMOVED: Mapping[KeyPath, tuple[object, str]] = {
    ("*", "optimizer", "alpha"): (0.99, "only rmsprop used it, which is no longer supported"),
    ("*", "optimizer", "rho"): (0.9, "only adadelta used it, which is no longer supported"),
    ("rollout", "server_updates"): (
        "files",
        "servers read new weights from files; remove the key, and set rollout.server_weights to a "
        "folder that servers and trainers see",
    ),
    ("logging", "csv"): (
        False,
        "remove the key; metrics.jsonl has every step: read it with pandas or slurmrl plot",
    ),
}
"""Settings of earlier releases, with their default and advice for the user. A path that begins with
`*` matches at any depth."""
LOGS: Final = frozenset({("logging", "csv")})
"""Removed keys that changed no result: slurmrl ignores them in the configuration of a trial."""
PLACES: Mapping[str, str] = {
    name: place
    for place, names in {
        "actor.optimizer.lr": "lr learning_rate",
        "actor.optimizer.gradient_clip": "max_grad_norm grad_clip clip_grad",
        "actor.max_tokens_per_microbatch": (
            "micro_batch_size gradient_accumulation_steps ppo_micro_batch_size "
            "ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu"
        ),
        "actor.optimizer.warmup_steps": "warmup_ratio lr_warmup_steps_ratio",
        "actor.dtype": "bf16 fp16 precision torch_dtype",
        "actor.path": "model model_path model_name_or_path",
        "algorithm.batch_size": (
            "batch_size train_batch_size per_device_train_batch_size rollout_batch_size"
        ),
        "algorithm.n_minibatches": "n_minibatches mini_batch_size ppo_mini_batch_size",
        "algorithm.clip_ratio": "clip_ratio cliprange clip_range epsilon eps_clip",
        "algorithm.discount": "gamma",
        "algorithm.gae_lambda": "lam",
        "algorithm.kl.coef": "kl_coef kl_ctl beta",
        "rollout.n": "num_generations n_samples_per_prompt group_size n_samples",
        "rollout.max_new_tokens": "max_completion_length max_response_length max_tokens",
        "rollout.stop_strings": "stop stop_words stop_sequences",
        "rollout.temperature": "temp",
        "rollout.greedy": "do_sample",
        "dataset.max_prompt_tokens": "max_prompt_length max_prompt_len",
        "dataset.path": "train_files dataset_name dataset_path data_path dataset.file dataset.name",
        "reward.name": "reward_funcs reward_fn reward_function reward.path reward.file",
        "total_steps": (
            "max_steps num_train_steps total_training_steps "
            "epochs num_epochs num_train_epochs total_epochs max_epochs"
        ),
        "checkpoint.every_steps": "save_steps save_freq save_interval",
        "evaluation.every_steps": "eval_steps test_freq eval_interval",
        "evaluation": "eval validation",
        "logging.every_steps": "logging_steps",
        "cluster.hosts": "num_nodes n_nodes nnodes nodes",
        "cluster.workers_per_host": "gpus_per_node n_gpus_per_node gpus_per_host cluster.gpus",
        "cluster.mem_per_worker": "cluster.memory cluster.mem slurm.mem slurm.memory",
        "cluster.slurm.time": "cluster.walltime cluster.time_limit walltime time_limit",
        "seed": "random_seed",
        "root": "output_dir default_local_dir fileroot",
    }.items()
    for name in names.split()
}
"""Mapping from a wrong place or another system's name of a setting to its place. A name with a
section matches only in that section."""
DIFFERENT: Mapping[str, str] = {
    name: meaning
    for meaning, names in {
        "It is the opposite: `do_sample: true` is `greedy: false`": "do_sample",
        "It counts steps: an epoch has rows / algorithm.batch_size steps": (
            "epochs num_epochs num_train_epochs total_epochs max_epochs"
        ),
        "It counts steps, each of which trains a batch in n_minibatches updates": "max_steps",
        "It counts the prompts (rows) of a whole step, on all GPUs": (
            "per_device_train_batch_size rollout_batch_size"
        ),
        "It is the number of updates in a step: batch size / size of a minibatch": (
            "mini_batch_size ppo_mini_batch_size"
        ),
        "It limits the tokens of a microbatch on a GPU, not the number of microbatches": (
            "micro_batch_size gradient_accumulation_steps ppo_micro_batch_size "
            "ppo_micro_batch_size_per_gpu"
        ),
        "It is a number of steps, not a share of steps": "warmup_ratio lr_warmup_steps_ratio",
        "Rows with a longer prompt are left out, not cut": "max_prompt_length max_prompt_len",
        "It counts GPUs of one host": "cluster.gpus",
        "It is the memory of one worker": "cluster.memory cluster.mem slurm.mem slurm.memory",
    }.items()
    for name in names.split()
}
"""Mapping from a name with another meaning in other systems to an explanation."""
NO_SETTINGS: Final = (
    *("evaluation.batch_size", "actor.dropout", "actor.attn_implementation"),
    *("ref.alpha", "algorithm.tau", "name"),
)
"""Unknown keys for which messages suggest no setting, because its meaning would differ."""
MOST_PLACES: Final = 3
"""Maximum number of suggested keys."""
_SENTENCE: Final = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])")
LIKE: Final = 0.7
"""Minimum similarity (0 to 1) of an unknown key and a suggested key."""
SURE: Final = 0.8
"""Minimum similarity (0 to 1) at which an unknown key counts as a misspelling."""


def problems_from(
    error: ValidationError, source: Source, prefix: KeyPath, schema: type[BaseModel]
) -> list[Problem]:
    """Return one problem for each violation of ``schema`` by the values at ``prefix``."""
    violations = error.errors()
    places = {details["loc"] for details in violations}
    return [
        _problem(details, source, prefix, schema)
        for details in violations
        # One message reports both fp16 and bf16.
        if not (details["loc"][-1:] == ("bf16",) and (*details["loc"][:-1], "fp16") in places)
    ]


def drop_removed(
    values: dict[Any, Any], schema: type[BaseModel], prefix: KeyPath = (), *, resolved: bool = False
) -> None:
    """Remove settings of earlier releases if they have their defaults and thus no effect.

    Also remove the settings in `LOGS` from a ``resolved`` configuration. Skip free-form values.
    """
    for name, value in list(values.items()):
        place = (*prefix, name)
        removed = _removed(place)
        if removed and (value == removed[0] or (resolved and place in LOGS)):
            if value != removed[0]:
                logger.warning("%s is no longer supported: %s", ".".join(place), removed[1])
            del values[name]
        elif isinstance(value, dict) and section_at(schema, place) is not None:
            drop_removed(value, schema, place, resolved=resolved)


def _removed(place: KeyPath) -> tuple[object, str] | None:
    """Return the entry of `REMOVED` that matches a place, or None."""
    for pattern, entry in REMOVED.items():
        rest = pattern[1:]
        anywhere = pattern[0] == "*" and len(place) > len(rest) and place[-len(rest) :] == rest
        if anywhere or place == pattern:
            return entry
    return None


def _problem(
    details: ErrorDetails, source: Source, prefix: KeyPath, schema: type[BaseModel]
) -> Problem:
    location = details["loc"]
    if details["type"] == "missing":
        message = _missing(schema, location)
    elif details["type"] == "extra_forbidden":
        message = unknown_key(schema, location, prefix)
    else:
        message = rejected(details)
    return source.problem((*prefix, *location), message)


def rejected(details: ErrorDetails) -> str:
    """Return the message about a value that breaks a rule."""
    value = details["input"]
    context: Mapping[str, Any] = details.get("ctx", {})
    kind = details["type"]
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        return f"{show(value)} is not allowed; {near(str(value), choices)}"
    if kind == "value_error":
        rule = str(context["error"])
    elif kind in RULES:
        rule = RULES[kind].format(**context)
    else:
        rule = details["msg"][:1].lower() + details["msg"][1:]
    return rule if isinstance(value, dict | list) else f"{show(value)} is not allowed: {rule}"


def show(value: Any) -> str:
    """Return a value in YAML notation, truncated if it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]}…{text[-1]}"


def _missing(schema: type[BaseModel], location: KeyPath) -> str:
    owner = section_at(schema, location[:-1])
    text = descriptions(owner).get(str(location[-1]), "") if owner else "The list is too short."
    return f"is required. {summary(text)}".rstrip()


def unknown_key(schema: type[BaseModel], location: KeyPath, prefix: KeyPath) -> str:
    """Return the message about a key that ``schema`` does not have, with similar names.

    If other systems have a key of this name with a different meaning, the message explains it.
    """
    message, name = _unknown(schema, location, prefix), str(location[-1]).lower()
    written = (dotted((*prefix, *location)[-2:]).lower(), name)
    meaning = next((DIFFERENT[each] for each in written if each in DIFFERENT), "")
    return f"{message} {meaning}" if meaning and message.endswith("?") else message


def _unknown(schema: type[BaseModel], location: KeyPath, prefix: KeyPath) -> str:
    owner = section_at(schema, location[:-1])
    known = sorted(key for key, _ in keys(owner)) if owner else []
    name = str(location[-1])
    whole = (*prefix, *location)
    if removed := _removed(whole):
        return f"is no longer a setting: {removed[1]}"
    if name in PRECISIONS and "dtype" in known:
        return "unknown key; write dtype: bfloat16 (fp16 is not supported) or float32"
    if (ours := OTHER_NAMES.get(name)) in known:
        return f"unknown key; write {ours}"
    if dotted(whole[-2:]) in NO_SETTINGS:
        return f"unknown key; allowed: {', '.join(known)}"
    own, inside = [dotted((*prefix, *path)) for path in paths(schema)], f"{dotted(prefix)}."
    written = (dotted(whole[-2:]), f"{whole[0]}.{name}", name)
    places = (PLACES.get(each.lower(), inside) for each in written)
    place = next((each for each in places if each in own or not each.startswith(inside)), "")
    if (last := place.rpartition(".")[2]) in known:
        return f"unknown key; did you mean {dotted((*whole[:-1], last))}?"
    if not place and difflib.get_close_matches(name, known, n=1, cutoff=SURE):
        return f"unknown key; {near(name, known)}"
    if elsewhere := _elsewhere(schema, location, prefix, place):
        return f"unknown key; did you mean {' or '.join(elsewhere)}?"
    if words := [key for key in known if name in key.split("_")]:
        return f"unknown key; did you mean {' or '.join(words)}?"
    return f"unknown key; {near(name, known, LIKE)}"


def _elsewhere(schema: type[BaseModel], key: KeyPath, prefix: KeyPath, place: str) -> list[str]:
    """Return the places in the schema that have a key of this name.

    Places below the current section come first, then ``place``.
    """
    name, section = str(key[-1]), key[:-1]
    named = (name, place.rpartition(".")[2])
    every = [path for path in paths(schema) if path[-1] in named]
    below = [dotted((*prefix, *path)) for path in every if path[: len(section)] == section]
    if section and below:
        return below[:MOST_PLACES]
    found = [dotted((*prefix, *path)) for path in every if path[-1] == name]
    return [place] if place and place not in found else found[:MOST_PLACES]


def section_at(schema: type[BaseModel], location: KeyPath) -> type[BaseModel] | None:
    """Return the section class at a location in the schema; None for a free-form value."""
    section: type[BaseModel] | None = schema
    named = False
    for part in location:
        if named:  # This part is a name that the user chose.
            named = False
            continue
        field = section.model_fields.get(str(part)) if section else None
        section = section_of(field.annotation) if field else None
        named = field is not None and names_sections(field.annotation)
    return section


def names_sections(annotation: Any) -> bool:
    """Return whether values of a type map names of the user's choice to sections."""
    return get_origin(annotation) is dict and section_of(annotation) is not None


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section class in an annotation such as ``Model | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        section = section_of(argument)
        if section is not None:
            return section
    return None


def types(annotation: Any) -> Iterator[Any]:
    """Yield the types that an annotation allows, without their marks."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from types(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for option in get_args(annotation):
            yield from types(option)
    else:
        yield annotation


def keys(section: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the keys of a section as a file spells them, with their fields."""
    for name, field in section.model_fields.items():
        yield field.alias or name, field


def paths(schema: type[BaseModel], prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the paths of all keys of a schema."""
    for name, field in keys(schema):
        yield (*prefix, name)
        section = section_of(field.annotation)
        if section is not None:
            named = ("<name>",) if names_sections(field.annotation) else ()
            yield from paths(section, (*prefix, name, *named))


def summary(text: str) -> str:
    """Return the first sentence of a description, on one line."""
    return _SENTENCE.split(" ".join(text.partition("\n\n")[0].split()), maxsplit=1)[0]


@cache
def descriptions(section: type[BaseModel]) -> dict[str, str]:
    """Return a mapping from a section's own and inherited fields to their docstrings.

    Parse the source only when a command shows the docstrings. Pydantic could parse the source when
    it makes the classes, but this takes each process longer than compiling this package.
    """
    found: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if issubclass(kind, BaseModel) and kind is not BaseModel:
            found |= dict(_documented(kind))
    return found


def _documented(kind: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Yield the fields that a class itself defines, with their docstrings (empty if missing)."""
    body = _body(kind)
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = inspect.cleandoc(str(following.value.value))
            yield statement.target.id, text


def _body(kind: type[BaseModel]) -> list[ast.stmt]:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    except (OSError, TypeError, KeyError):  # The class has no source file.
        return []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
            return node.body
    return []

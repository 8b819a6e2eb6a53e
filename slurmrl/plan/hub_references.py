"""Settings whose values depend on files: hub references and the use of chat templates.

``hf://org/name@revision`` becomes a folder in the cache of repositories. The rows of a dataset
decide whether its prompts get the chat template.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from slurmrl import log
from slurmrl.config import hub
from slurmrl.config.hub import PREFIX, HubCache, HubKind, HubReference, of_folder, parse
from slurmrl.config.schema import Config, Dataset, Model, role_key
from slurmrl.config.source import KeyPath, Source, read
from slurmrl.env import user_name
from slurmrl.errors import EnvironmentFailure, Problem, UsageError
from slurmrl.fsio import inputs
from slurmrl.registry import resolve
from slurmrl.run.paths import RunPaths

logger = log.get(__name__)

LATER: Final = "is not fetched yet: slurmrl submit fetches it"


def are_in(config: Config) -> bool:
    """Return whether a configuration names a repository of the hub."""
    models = (config.find_model(role) for role in config.roles)
    texts = [text for model in models if model for text in (model.path, model.tokenizer)]
    return any(
        text is not None and text.startswith(PREFIX) for text in (*texts, *config.data_paths())
    )


class HubResolver:
    """Replaces references to repositories by folders, and collects ``problems``.

    With ``planning``, it fetches only tokenizers and architectures of models; with ``data``, also
    datasets. An existing trial keeps its commits unless its configuration names other revisions.
    """

    def __init__(self, config: Config, source: Source, *, planning: bool, data: bool) -> None:
        self.problems: list[Problem] = []
        self._config = config
        self._source = source
        self._cache = HubCache(Path(config.root))
        self._planning = planning
        self._fetches_data = data or not planning
        run = RunPaths.of(Path(config.root), user_name(), config.experiment, config.trial)
        self._before = read(run.config).values if run.config.is_file() else {}
        self._lost: set[str] = set()
        """Folders of models with missing files; each folder is reported once."""

    def resolved(self) -> Config:
        """Return the configuration with folders in place of references."""
        config = self._config.with_datasets(self._dataset)
        models = {
            role: self._model(role_key(role), model)
            for role in config.roles
            if (model := config.find_model(role)) is not None
        }
        return config.with_models(models)

    # -- sections ----------------------------------------------------------------------------

    def _dataset(self, key: KeyPath, dataset: Dataset) -> Dataset:
        update: dict[str, Any] = {"path": self._rows(key, dataset.path, dataset.subset)}
        update["sources"] = {
            name: part.model_copy(
                update={
                    "path": self._rows(
                        (*key, "sources", name), part.path, part.subset or dataset.subset
                    )
                }
            )
            for name, part in dataset.sources.items()
        }
        return dataset.model_copy(update=update)

    def _rows(self, section: KeyPath, path: str, subset: str | None) -> str:
        key = (*section, "path")
        if (fetched := of_folder(Path(path), self._cache.folder, subset)) is not None:
            return self._restored(key, path, fetched, fetch=self._fetches_data) or path
        if not path.startswith(PREFIX):
            local = path and not Path(path).is_relative_to(self._cache.folder)
            if local and subset is not None:
                message = f"'{subset}' is not allowed: {path} is not a dataset of the hub"
                self._report((*section, "subset"), message)
            return path
        return self._folder(key, path, HubKind.DATASET, subset, fetch=self._fetches_data) or path

    def _model(self, key: KeyPath, model: Model) -> Model:
        update = self._restored_model(key, model)
        if model.tokenizer is not None and model.tokenizer.startswith(PREFIX):
            where = (*key, "tokenizer")
            update["tokenizer"] = self._folder(where, model.tokenizer, HubKind.TOKENIZER)
        if model.path is not None and model.path.startswith(PREFIX):
            where = (*key, "path")
            fetch = not self._planning
            update["path"] = self._folder(where, model.path, HubKind.MODEL, fetch=fetch)
            if update["path"] is None and self._planning:
                update |= self._promised(where, model, update)
        return model.model_copy(update=update) if update else model

    def _restored_model(self, key: KeyPath, model: Model) -> dict[str, Any]:
        """Return new values for a section that already names folders of the cache."""
        update: dict[str, Any] = {}
        for name in ("path", "tokenizer"):
            folder = getattr(model, name)
            fetched = of_folder(Path(folder), self._cache.folder) if folder else None
            if fetched is None:
                continue
            if folder not in self._lost:
                fetch = not self._planning
                update[name] = self._restored((*key, name), folder, fetched, fetch=fetch)
            if update.get(name) is None:
                update[name] = None
                self._lost.add(folder)
        return update

    def _promised(self, key: KeyPath, model: Model, update: dict[str, Any]) -> dict[str, Any]:
        """Return the settings that a plan needs for a model that is not fetched yet."""
        assert model.path is not None, "the caller looked"
        small = self._folder(key, model.path, HubKind.TOKENIZER)
        if small is None:
            return {}
        tokenizer = update.get("tokenizer") or model.tokenizer or small
        config = Path(small) / "config.json"
        architecture = json.loads(inputs.read(config)) if config.is_file() else None
        return {"tokenizer": tokenizer, "architecture": architecture}

    # -- folders -----------------------------------------------------------------------------

    def _folder(
        self,
        key: KeyPath,
        text: str,
        kind: HubKind,
        subset: str | None = None,
        *,
        fetch: bool = True,
    ) -> str | None:
        """Return the folder of a repository; report a problem and return None if that fails."""
        try:
            reference = parse(text, kind, subset)
            before = value_at(self._before, key)
            pinned = self._cache.pinned(reference, before if isinstance(before, str) else None)
            folder = self._get(pinned, fetch=fetch)
        except (UsageError, EnvironmentFailure) as error:
            self._report(key, f"{error}{self._no_path(key)}")
            return None
        if folder is None:
            self._report(key, f"{reference} {LATER}")
            return None
        return str(folder)

    def _restored(
        self, key: KeyPath, folder: str, reference: HubReference, *, fetch: bool
    ) -> str | None:
        """Return the folder of a commit that the trial's configuration names.

        Fetch the commit again if its folder has lost files. If that fails, report a problem and
        return None.
        """
        damage = hub.damage(Path(folder))
        if not damage:
            return folder
        problem = f"{folder} {damage}"
        try:
            if self._get(reference, fetch=fetch) is not None:
                logger.warning("%s; fetched again", problem)
                return folder
            self._report(key, f"{problem}; slurmrl resume fetches {reference} again")
        except (UsageError, EnvironmentFailure) as error:
            self._report(key, f"{problem}, and cannot be fetched again: {error}")
        return None

    def _get(self, reference: HubReference, *, fetch: bool) -> Path | None:
        return self._cache.fetch(reference) if fetch else self._cache.newest(reference)

    def _no_path(self, key: KeyPath) -> str:
        """Return a hint for a string that may be meant as a path."""
        text = value_at(self._source.values, key)
        if not isinstance(text, str) or text.startswith(PREFIX):
            return ""
        return f"; there is also no file or folder {self._source.folder(key) / text}"

    def _report(self, key: KeyPath, message: str) -> None:
        self.problems.append(self._source.problem(key, message))


def value_at(values: Any, key: KeyPath) -> Any:
    """Return the value at a key of nested mappings; None without a value."""
    for part in key:
        values = values.get(part) if isinstance(values, dict) else None
    return values


HAS_MESSAGES: Final = "slurmrl.data.records:has_messages"
"""Function that reads a row, in a room that ``plan`` must not import."""


def decided(config: Config, source: Source) -> tuple[Config, list[Problem]]:
    """Return the configuration with `chat_template` for each dataset with a readable first row.

    Also return the problems of datasets in which only some sources have messages.
    """
    has_messages: Callable[[Dataset], bool | None] = resolve(HAS_MESSAGES)
    problems: list[Problem] = []

    def with_decision(key: KeyPath, dataset: Dataset) -> Dataset:
        if dataset.chat_template is not None:
            return dataset
        if dataset.like is not None or dataset.kind == "messages":
            return dataset.model_copy(update={"chat_template": False})
        found = {name: has_messages(part) for name, part in dataset.parts.items()}
        chats = [name for name, answer in found.items() if answer]
        texts = [name for name, answer in found.items() if answer is False]
        if chats and texts:
            message = (
                f"is required: source '{chats[0]}' has messages and '{texts[0]}' has strings; true "
                "makes each string a message of the user"
            )
            problems.append(source.problem((*key, "chat_template"), message))
        if not chats and not texts:
            return dataset
        return dataset.model_copy(update={"chat_template": bool(chats)})

    return config.with_datasets(with_decision), problems

"""Prepare a dataset once per trial.

Find the tokenized rows in the run directory, or make them from the usable rows of the source
(`TokenReader`). Torch-free.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, suppress
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from slurmrl import log
from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.chat import template_file
from slurmrl.data.encoder import RowTokens
from slurmrl.data.image_files import base_of
from slurmrl.data.image_sources import Sources, images_of
from slurmrl.data.prepared import VERSION, PreparedRows, PreparedWriter, read_manifest
from slurmrl.data.records import MOST_PROBLEMS, NumberedRow, RecordReader, RowChecks, id_of
from slurmrl.data.rows import CHUNK_ROWS, IMAGE_ROWS, RowTokenizer
from slurmrl.data.sources import open_source
from slurmrl.data.types import own_convert, own_source, type_of_rows
from slurmrl.errors import ConfigError, CorruptFileError, EnvironmentFailure, Problem, UsageError
from slurmrl.fsio import atomic, inputs
from slurmrl.fsio.calls import REAL, SystemCalls, cause, discard
from slurmrl.tensors.pictures import MANIFEST

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = log.get(__name__)

FULL: Final = (errno.ENOSPC, errno.EDQUOT)
SMALL_VOCABULARY: Final = 1 << 16
_NAME: Final = re.compile(r"([0-9a-f]{32})\.(\d{1,9})")
_OF_TOKENIZERS: Final = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".bpe", ".spm", ".vocab")
_OF_MODELS: Final = ("generation_config.json", "model.safetensors.index.json")
"""Files that no tokenizer reads, so editing them does not change the rows."""


def prepare(
    folder: Path,
    incarnation: int,
    config: DatasetConfig,
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress,
    *,
    calls: SystemCalls = REAL,
) -> Path:
    """Return the directory in ``folder`` with the prepared rows.

    Only one process of an incarnation calls this function. Processes of older incarnations may
    still run the function, but write to other directories.

    :raises ConfigError: rows or settings that cannot be used; each problem names its line.
    :raises UsageError: the disk is full, which another start could not change.
    :raises EnvironmentFailure: a file cannot be read or written.
    """
    wanted = recipe(config, tokenizer)
    atomic.make_private_directory(folder, calls=calls)
    for directory in _made(folder, wanted, calls):
        if _is_current(directory, config, progress, calls):
            return directory
    directory = folder / f"{wanted}.{incarnation}"
    _remove_unfinished(folder, incarnation, calls)
    try:
        _make(directory, wanted, config, tokenizer, progress, calls)
    except EnvironmentFailure as error:
        _remove(directory, calls)
        if cause(error) in FULL:
            parts = "a copy of its prompts" + (" and its pixels" if config.media_keys else "")
            message = f"{error}; the tokens of {config.path} and {parts} must fit"
            raise UsageError(f"{message} there: free space, then slurmrl resume") from error
        raise
    except BaseException:
        _remove(directory, calls)
        raise
    return directory


def find(
    folder: Path,
    config: DatasetConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    calls: SystemCalls = REAL,
) -> Path:
    """Return the newest directory that `prepare` has finished; do not read the dataset's files.

    Raises EnvironmentFailure if the directory cannot be read or does not exist.
    """
    for directory in _made(folder, recipe(config, tokenizer), calls):
        with suppress(CorruptFileError):
            if read_manifest(directory, calls=calls) is not None:
                return directory
    raise EnvironmentFailure(
        f"{folder} has no rows of {config.path} for the present tokenizer, chat template and code "
        "of the dataset: put the old files, and versions of tokenizers and transformers, back"
    )


def sweep(
    folder: Path, incarnation: int, used: Collection[Path], *, calls: SystemCalls = REAL
) -> None:
    """Remove files that this incarnation does not use.

    Such files are unfinished data, and prepared data of other settings or of a changed file. Files
    of newer incarnations stay. Raises EnvironmentFailure.
    """
    for name in atomic.list_names(folder, calls=calls):
        match = _NAME.fullmatch(name)
        if match and int(match[2]) <= incarnation and folder / name not in used:
            _remove(folder / name, calls)


def _remove_unfinished(folder: Path, incarnation: int, calls: SystemCalls) -> None:
    """Remove unfinished data of older incarnations: their pictures may fill the disk."""
    for name in atomic.list_names(folder, calls=calls):
        match = _NAME.fullmatch(name)
        if match and int(match[2]) < incarnation:
            with suppress(FileNotFoundError):
                if MANIFEST not in atomic.list_names(folder / name, calls=calls):
                    _remove(folder / name, calls)


def recipe(config: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a fingerprint of everything that determines the rows except the file's content."""
    parts = [
        VERSION,
        config.path,
        config.rules(),
        (template_file(config) or "").encode().hex(),
        own_source(config).hex(),
        _tokenizer_fingerprint(Path(tokenizer.name_or_path)),
        type(tokenizer).__name__,
        *(metadata.version(library) for library in ("tokenizers", "transformers")),
    ]
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _tokenizer_fingerprint(folder: Path) -> str:
    digest = blake2b(digest_size=16)
    for name in sorted(inputs.list_names(folder)):
        path = folder / name
        if name.endswith(_OF_TOKENIZERS) and name not in _OF_MODELS and not path.is_dir():
            content = inputs.read(path)
            digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _made(folder: Path, wanted: str, calls: SystemCalls) -> list[Path]:
    """Return the prepared directories with the fingerprint ``wanted``, newest first."""
    names = (_NAME.fullmatch(name) for name in atomic.list_names(folder, calls=calls))
    numbers = [int(name[2]) for name in names if name is not None and name[1] == wanted]
    return [folder / f"{wanted}.{number}" for number in sorted(numbers, reverse=True)]


def _is_current(
    directory: Path, config: DatasetConfig, progress: Progress, calls: SystemCalls
) -> bool:
    """Return whether a directory is finished and undamaged, and was made from the current files.

    The content is compared only if the files' sizes or times have changed.
    """
    try:
        if read_manifest(directory, calls=calls) is None:
            return False
        with closing(PreparedRows(directory, calls=calls)) as prepared:
            manifest = prepared.manifest
        images = images_of(directory, calls=calls) if manifest.pictures else None
    except CorruptFileError as error:
        logger.warning("%s", error)
        return False
    path = Path(config.path)
    sources = Sources(open_source(path, config.split).files, base_of(config), images)
    if manifest.source_state and manifest.source_state == sources.state():
        return True
    return manifest.source == sources.fingerprint(
        lambda share: progress(f"comparing {path.name}, {share:.0%}")
    )


def _make(
    directory: Path,
    wanted: str,
    config: DatasetConfig,
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress,
    calls: SystemCalls,
) -> None:
    _remove(directory, calls)  # an earlier attempt may have left files
    reader = TokenReader(config, tokenizer, progress, directory)
    small = max(tokenizer.get_vocab().values()) < SMALL_VOCABULARY
    began = time.monotonic()
    pictures = bool(config.media_keys)
    made = PreparedWriter(directory, 2 if small else 4, pictures=pictures, calls=calls)
    with closing(made) as writer:
        for record, row in reader:
            name = id_of(record.row, config.id_key, record.number)
            stored = reader.kind.stored(record.row, record.raw)
            difficulty = reader.kind.difficulty(record.row)
            writer.add(row, name, record.number, stored, difficulty)
        reader.finish()
        source = reader.records.source
        content, state = source.fingerprint(), source.state
        if pictures:
            images = reader.tokens.images
            images.write(directory, calls=calls)
            content, state = images.fingerprint(content), images.state(state)
        writer.publish(wanted, content, state, reader.tokens.left_out)
    seconds = time.monotonic() - began
    logger.info("tokenized %d rows of %s in %.1f s", reader.records.rows, config.path, seconds)


def _remove(directory: Path, calls: SystemCalls) -> None:
    """Remove a directory, first its manifest, without which the other files do not count."""
    discard(directory / MANIFEST, calls)
    shutil.rmtree(directory, ignore_errors=True)


Progress = Callable[[str], None]
"""Function that receives the current activity: ``tokenizing rows.jsonl, 34% (340000 rows)``."""

CHUNK_BYTES: Final = 16 << 20


class TokenReader:
    """Reads, checks and tokenizes the rows of a source; keeps only 8 bytes of each row in memory.

    Iterate over the reader to the end, then call `finish`. Raises as `RecordReader` does.
    """

    def __init__(
        self,
        config: DatasetConfig,
        tokenizer: PreTrainedTokenizerBase,
        progress: Progress,
        directory: Path | None = None,
    ) -> None:
        """``directory`` receives the pictures of rows with images; None writes no pictures."""
        self.kind = type_of_rows(config)
        self.records = RecordReader(
            Path(config.path), config.id_key, config.split, convert=own_convert(self.kind)
        )
        self._checks = RowChecks(self.kind, self.records.where)
        self.tokens = RowTokenizer(self.kind, tokenizer, self.records.where, directory)
        self._most_rows = IMAGE_ROWS if config.media_keys else CHUNK_ROWS
        self._progress = progress

    def __iter__(self) -> Iterator[tuple[NumberedRow, RowTokens]]:
        """Yield the rows within the length limits.

        After an invalid row, no more rows are yielded, but all are read to find their problems.
        """
        name = self.records.source.path.name
        for chunk in self._chunks():
            done = f"{self.records.share:.0%} ({self.records.rows} rows)"
            self._progress(f"tokenizing {name}, {done}")
            for record in chunk:
                self._checks.add(record.number, record.row)
            if self._checks.fillable:
                made = self.tokens.tokens([(record.number, record.row) for record in chunk])
                for record, row in zip(chunk, made, strict=True):
                    if row is not None:
                        yield record, row

    def finish(self) -> None:
        """Raise ConfigError if rows or settings cannot be used; each problem names its line."""
        problems: list[Problem] = []
        for part in (self.records, self._checks):
            try:
                part.finish()
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(tuple(problems[:MOST_PROBLEMS]))
        self.tokens.finish()

    def _chunks(self) -> Iterator[list[NumberedRow]]:
        chunk: list[NumberedRow] = []
        size = 0
        for record in self.records:
            chunk.append(record)
            size += len(record.raw)
            if len(chunk) >= self._most_rows or size >= CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk

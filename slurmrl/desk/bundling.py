"""Make a bundle of a configuration: find its files, write the archive, download wheels.

`slurmrl.desk.unpacking` describes the format.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution, distributions
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

from ruamel.yaml import YAML

import slurmrl
from slurmrl.config.load import load, paths_in
from slurmrl.config.profiles import expanded
from slurmrl.config.schema import Config
from slurmrl.config.schema.roles import TRIAL_PREFIX
from slurmrl.config.source import KeyPath, Source, dotted, value_at
from slurmrl.desk import copying, trial_code, trials
from slurmrl.desk.trial_code import OwnCode
from slurmrl.desk.unpacking import CONFIG, INPUTS, MANIFEST, WHEELS, BundleManifest, Member, is_safe
from slurmrl.errors import ConfigError, EnvironmentFailure, UsageError
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.calls import REAL, discard, explain, temporary_beside
from slurmrl.plan.settings import Settings, load_settings

OF_CLUSTER: Final[Mapping[KeyPath, str]] = {
    ("rollout", "python"): sys.executable,
    ("rollout", "server_keys"): "",
    ("rollout", "server_weights"): "",
}
"""Mapping from keys of files that only the cluster has to the values that checks use instead."""
LEFT_ALONE = (("cluster", "variables_file"),)
"""Keys of files with secrets, which a bundle does not contain."""
HEADER = "# Made by slurmrl bundle. Relative paths are files of the bundle.\n"
PACKAGE: Final = "slurmrl"
PLATFORMS: Final = ("_2_28", "_2_27", "_2_17", "2014", "_2_12", "_2_5", "1")
"""Versions of manylinux whose wheels pip may download."""
NOT_BUILT: Final = (".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "tests")
INDEX: Final = "https://download.pytorch.org/whl"
OMITTED: Final = "none"
_EXTRA: Final = re.compile(r"""extra == ["'](\w+)["']""")
TABLES: Final = (".parquet", ".arrow")
IMAGES: Final = (
    "a bundle does not hold the files that rows name: put rows and images into one folder, or "
    "write a Parquet file with a column of images"
)
CUDA: Final = "cuda"
"""Name of PyPI's build of torch."""


@dataclass(frozen=True)
class Made:
    file: Path
    files: int
    notes: tuple[str, ...]


def make_bundle(
    config: Path,
    overrides: Sequence[str],
    *,
    root: str | None,
    output: Path | None,
    packages: tuple[str, str] | None,
) -> Made:
    """Check a configuration like `submit`, and write the bundle.

    ``packages``: the version of Python and the build of torch for which to add wheels; None adds no
    wheels. Raises ConfigError, UsageError, EnvironmentFailure.
    """
    source = load(config, overrides)
    elsewhere = _elsewhere(source)
    stand_ins = [f"{dotted(key)}={OF_CLUSTER[key]}" for key in elsewhere]
    stand_ins += ["root=."] if source.writes("root") else []  # The path may need cluster variables.
    settings = load_settings(config, [*overrides, *stand_ins], root=trials.chosen_root(root))
    code = trial_code.find_own_code(settings)
    contents = collect_contents(settings, code, elsewhere)
    extras = extras_of(settings.config, contents.files)
    file = output or Path(f"{settings.config.experiment}-{settings.config.trial}.tar")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"--output {file}: there is no folder {file.parent}")
    with tempfile.TemporaryDirectory(prefix="slurmrl-wheels-") as made:
        found: list[Path] = []
        if packages is not None:
            python, torch = packages
            folder = Path(made) / "wheels"
            found = gather_wheels(folder, python=python, torch=torch, extras=extras)
        manifest = pack(contents, found, file.absolute())
    notes = list(contents.notes)
    if extras:
        notes.append(f"on the cluster, install slurmrl[{','.join(extras)}] in place of slurmrl")
    return Made(file, len(manifest.files), tuple(notes))


def _elsewhere(source: Source) -> dict[KeyPath, str]:
    """Return the absolute path for each key in `OF_CLUSTER` that the configuration sets."""
    found = {}
    for key in OF_CLUSTER:
        text = value_at(source.values, key)
        if isinstance(text, str) and text:
            found[key] = os.path.abspath(source.folder(key) / expanded(text))
    return found


@dataclass(frozen=True)
class Contents:
    config: bytes
    files: Mapping[str, Path]
    """Files by their names in the bundle, in ascending order."""
    notes: tuple[str, ...]
    """Messages about settings and files that the bundle lacks."""


def collect_contents(
    settings: Settings, code: OwnCode, elsewhere: Mapping[KeyPath, str] | None = None
) -> Contents:
    """Find the files that a configuration names.

    ``elsewhere`` has the paths of files that only the cluster has. Raises ConfigError for files
    that a bundle cannot contain.
    """
    config, source = settings.config, settings.source
    values = _without_profile(source)
    files, notes, problems = _Files(), [*code.notes], []
    left = dict(elsewhere or {})
    for path in code.paths:
        files.add(path.name, path)
    if config.code:
        values["code"] = [Path(path).name for path in config.code]
    for key, text in paths_in(config):
        written = value_at(values, key)
        if key[0] == "code" or not isinstance(written, str) or not written:
            continue  # The path is a default or empty.
        if written.startswith(TRIAL_PREFIX):
            problems.append(source.problem(key, _of_trial(written)))
        elif key in LEFT_ALONE:
            left[key] = text
        else:
            name = files.add(f"{INPUTS}/{dotted(key)}/{Path(text).name}", Path(text))
            value_at(values, key[:-1])[key[-1]] = name
    for key, dataset in config.datasets().items():
        paths = [Path(part.path) for part in dataset.parts.values()]
        texts = [each for each in paths if each.is_file() and each.suffix not in TABLES]
        if texts:
            media = (f"{medium}s_key" for medium in dataset.media_keys)
            problems += [source.problem((*key, name), IMAGES) for name in media]
    if problems:
        raise ConfigError(tuple(problems))
    for key, text in left.items():
        notes.append(f"{dotted(key)}: {text} is not in the bundle; the cluster must have it")
        value_at(values, key[:-1])[key[-1]] = text
    for key in config.datasets():
        _forget_subsets(value_at(values, key))
    if source.of_profile():
        notes.append(f"{source.profile} is not in the bundle: the cluster's own profile applies")
    if values.pop("root", None) is not None:
        notes.append("root is not in the bundle: give --root or SLURMRL_ROOT on the cluster")
    return Contents(_text(values), dict(sorted(files.found.items())), tuple(notes))


class _Files:
    """The files of a bundle by their names."""

    def __init__(self) -> None:
        self.found: dict[str, Path] = {}
        self._names: dict[Path, str] = {}

    def add(self, name: str, source: Path) -> str:
        """Add a file, or all files of a folder; return its name in the bundle.

        A source that two settings name, such as the model of two roles, is added once. Raises
        UsageError.
        """
        if source in self._names:
            return self._names[source]
        if name in (CONFIG, MANIFEST, INPUTS, WHEELS):
            raise UsageError(f"{source}: the bundle already has a file {name}; rename this file")
        new = {str(PurePosixPath(name) / part): path for part, path in copying.files(source)}
        if not new:
            raise UsageError(f"{source}: the folder has no files")
        if unsafe := [path for named, path in new.items() if not is_safe(named)]:
            raise UsageError(f"{str(unsafe[0])!r}: a bundle cannot hold a file of this name")
        if taken := new.keys() & self.found.keys():
            raise UsageError(f"{source} and {self.found[taken.pop()]} have the same name")
        self.found |= new
        self._names[source] = name
        return name


def _of_trial(text: str) -> str:
    name = text.removeprefix(TRIAL_PREFIX).partition("@")[0]
    return (
        f"'{text}' is a trial of this machine, which a bundle cannot contain; export it with "
        f"slurmrl export {name} and name the folder"
    )


def _without_profile(source: Source) -> dict[str, Any]:
    """Return the values without the site profile's values, which concern only this cluster."""
    values = copy.deepcopy(source.values)
    for key in source.of_profile():
        del value_at(values, key[:-1])[key[-1]]
        for section in (key[:length] for length in range(len(key) - 1, 0, -1)):
            if not value_at(values, section) and source.is_of_profile(section):
                del value_at(values, section[:-1])[section[-1]]
    return values


def _forget_subsets(dataset: Any) -> None:
    """Remove the setting ``subset`` of a dataset. The fetched files contain only the subset."""
    if isinstance(dataset, dict):
        dataset.pop("subset", None)
        for part in (dataset.get("sources") or {}).values():
            part.pop("subset", None)


def _text(values: dict[str, Any]) -> bytes:
    stream = io.StringIO()
    yaml = YAML(pure=True)
    yaml.width = 100
    yaml.dump(values, stream)
    return (HEADER + stream.getvalue()).encode()


def pack(contents: Contents, wheels: Iterable[Path], output: Path) -> BundleManifest:
    """Write a bundle; the file appears once it is complete.

    Raises EnvironmentFailure, UsageError.
    """
    named = dict(contents.files) | {f"{WHEELS}/{wheel.name}": wheel for wheel in wheels}
    temporary = temporary_beside(output)
    try:
        with temporary.open("xb") as file:
            os.fchmod(file.fileno(), 0o600)
            with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
                members = [_add(archive, CONFIG, io.BytesIO(contents.config), len(contents.config))]
                members += [_add_file(archive, name, path) for name, path in named.items()]
                manifest = BundleManifest(slurmrl.__version__, tuple(members))
                text = json.dumps({**documents.to_json(manifest), "format": manifest.format})
                _add(archive, MANIFEST, io.BytesIO(text.encode()), len(text))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(output)
        atomic.sync_directory(output.parent)
    except OSError as error:
        raise explain(error, "write", output) from error
    finally:
        discard(temporary, REAL)
    return manifest


def _add_file(archive: tarfile.TarFile, name: str, path: Path) -> Member:
    try:
        with path.open("rb") as file:
            return _add(archive, name, file, os.fstat(file.fileno()).st_size, path)
    except OSError as error:
        if error.filename is None:  # Writing the archive failed.
            raise
        raise explain(error, "read", path) from error


def _add(
    archive: tarfile.TarFile, name: str, file: IO[bytes], size: int, path: Path | None = None
) -> Member:
    """Write a member without the owner, the time and the mode of its file.

    Raises UsageError if the file becomes shorter or longer during the copy.
    """
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    read = _Digest(file)
    try:
        archive.addfile(info, read)
    except OSError as error:
        if "unexpected end of data" not in str(error):
            raise
        raise UsageError(f"{path} became shorter while it was read; try again") from error
    if file.read(1):
        raise UsageError(f"{path} became longer while it was read; try again")
    return Member(name, size, read.sha256.hexdigest())


class _Digest(io.RawIOBase):
    """A file whose `read` also updates a checksum."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.sha256.update(data)
        return data


def gather_wheels(folder: Path, *, python: str, torch: str, extras: Sequence[str]) -> list[Path]:
    """Fill a new folder with wheels of slurmrl and its requirements, for Linux on x86-64.

    The wheels have the versions that are installed here. ``extras`` are slurmrl's extras to
    include, which need not be installed here. Raises EnvironmentFailure with the output of pip.
    """
    source = Path(slurmrl.__file__).parents[1]
    if not (source / "setup.cfg").exists():
        raise EnvironmentFailure(
            f"{source} has no source code of slurmrl to build its wheel from: run slurmrl bundle "
            f"in a checkout (scripts/setup), or add --no-wheels and copy the wheel yourself"
        )
    folder.mkdir()
    constraints = folder.with_name("constraints.txt")
    constraints.write_text("".join(f"{line}\n" for line in installed(torch)))
    wanted = requirements(torch, extras)
    _pip(download_command(folder, constraints, wanted, python=python, torch=torch))
    copied = folder.with_name("source")  # A build writes into its sources.
    shutil.copytree(source, copied, ignore=shutil.ignore_patterns(*NOT_BUILT))
    _pip(["wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(copied)])
    if torch == OMITTED:
        for wheel in folder.glob("torch-*.whl"):
            wheel.unlink()
    return sorted(folder.glob("*.whl"))


def requirements(torch: str, extras: Sequence[str] = ()) -> list[str]:
    """Return the requirements of slurmrl and of some extras; omit torch if it is `OMITTED`."""
    needed = []
    for line in distribution(PACKAGE).requires or ():
        extra = _EXTRA.search(line)
        if extra is None:
            needed.append(line)
        elif extra[1] in extras:
            needed.append(line.partition(";")[0].strip())
    return [line for line in needed if torch != OMITTED or _name(line) != "torch"]


def extras_of(config: Config, files: Iterable[str]) -> list[str]:
    """Return the extras of slurmrl that a configuration and its files need."""
    logging, tasks = config.logging, config.evaluation and config.evaluation.tasks
    models = (config.find_model(role) for role in config.roles)
    layouts = [model.backend for model in models if model is not None]
    layouts += [tasks.backend] if tasks else []
    needed = {
        "data": any(name.endswith(TABLES) for name in files),
        "images": any(section.images_key for section in config.datasets().values()),
        "videos": any(section.videos_key for section in config.datasets().values()),
        "megatron": any(layout.startswith("megatron:") for layout in layouts),
        "mlflow": logging.mlflow is not None,
        "tensorboard": logging.tensorboard,
        "wandb": logging.wandb is not None,
    }
    return [extra for extra, wanted in needed.items() if wanted]


def installed(torch: str) -> list[str]:
    """Return the versions of this environment as constraints of pip.

    ``torch`` is the build of torch that replaces the installed build.
    """
    found = {
        _name(one.metadata["Name"]): one.version.partition("+")[0]
        for one in distributions()
        if one.metadata["Name"]
    }
    found.pop(PACKAGE, None)
    build = f"+{torch}" if torch not in (CUDA, OMITTED) else ""
    return [
        f"{name}=={version}{build if name == 'torch' else ''}"
        for name, version in sorted(found.items())
        if not name.startswith(("nvidia-", "triton"))  # Builds of torch require different ones.
    ]


def download_command(
    folder: Path, constraints: Path, wanted: Sequence[str], *, python: str, torch: str
) -> list[str]:
    index = [] if torch in (CUDA, OMITTED) else ["--extra-index-url", f"{INDEX}/{torch}"]
    return [
        "download",
        "--only-binary=:all:",
        "--implementation=cp",
        f"--python-version={python}",
        *(f"--platform=manylinux{tag}_x86_64" for tag in PLATFORMS),
        *index,
        "-c",
        str(constraints),
        "-d",
        str(folder),
        *wanted,
    ]


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", found[0] if found else requirement).lower()


def _pip(arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "pip", arguments[0], "-q", "--disable-pip-version-check"]
    done = subprocess.run([*command, *arguments[1:]], stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise EnvironmentFailure(
            f"pip {arguments[0]} failed; --no-wheels makes a bundle without packages:\n"
            f"{done.stderr.strip()}"
        )

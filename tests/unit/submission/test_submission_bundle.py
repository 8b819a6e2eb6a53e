from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmrl.cli.main import main
from slurmrl.config.load import load, load_resolved, parse
from slurmrl.desk import bundling, unpacking
from slurmrl.desk.bundling import collect_contents, make_bundle
from slurmrl.desk.trial_code import OwnCode
from slurmrl.desk.unpacking import BUNDLES, is_safe, unpack
from slurmrl.env import user_name
from slurmrl.errors import ConfigError, EnvironmentFailure, OwnershipError, UsageError
from slurmrl.fsio import calls
from slurmrl.fsio.inputs import is_archive
from slurmrl.plan.settings import load_settings
from slurmrl.run.paths import RunPaths
from tests.fake_runs import FakeScheduler, write_config

WHOLE = "bundle.tar"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Make a bundle with a model's tokenizer, a dataset and code, and remove its source folder."""
    source = tmp_path / "source"
    source.mkdir()
    config = write_config(source)
    (source / "own.py").write_text("import beside\n")
    (source / "beside.py").write_text("")
    (source / "secrets").write_text("TOKEN=secret\n")
    with config.open("a") as file:
        file.write("code: [own.py]\nroot: ./there\ncluster: {variables_file: secrets}\n")
    made = make_bundle(config, ["trial=7"], root=None, output=tmp_path / WHOLE, packages=None)
    assert [note.partition(" ")[0] for note in made.notes] == ["cluster.variables_file:", "root"]
    shutil.rmtree(source)
    return made.file


def test_bundle_contains_everything_that_the_configuration_names(
    tmp_path: Path, bundle: Path
) -> None:
    assert bundle.stat().st_mode & 0o777 == 0o600
    assert b"secret\n" not in bundle.read_bytes()
    file = unpack(bundle, tmp_path / "runs")
    config = parse(load(file))
    folder = file.parent
    assert (config.trial, config.cluster.variables_file) == ("7", str(tmp_path / "source/secrets"))
    assert config.code == (str(folder / "own.py"),)
    assert (folder / "beside.py").exists()
    assert config.dataset.path == str(folder / "input-files/dataset.path/data.jsonl")
    assert config.actor.tokenizer == str(folder / "input-files/actor.tokenizer/tokenizer")
    for path in [config.dataset.path, f"{config.actor.tokenizer}/tokenizer.json"]:
        assert os.stat(path).st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_equal_inputs_give_equal_bundles_that_unpack_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path)
    first, second = (
        make_bundle(config, [], root=None, output=tmp_path / name, packages=None).file
        for name in ("a.tar", "b.tar")
    )
    assert first.read_bytes() == second.read_bytes()
    unpacked = unpack(first, tmp_path / "runs")
    monkeypatch.setattr(unpacking, "_extract", None)  # not again
    assert unpack(second, tmp_path / "runs") == unpacked
    (unpacked.parent / "input-files/dataset.path/data.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match=r"is damaged: input-files/dataset.path/data.jsonl .*rem"):
        unpack(first, tmp_path / "runs")


def test_reference_to_a_local_trial_is_rejected(tmp_path: Path) -> None:
    """If the reference cannot be resolved, this is the reported error."""
    config = write_config(tmp_path)
    with pytest.raises(ConfigError, match="trial:other/1"):
        make_bundle(
            config,
            ["actor.path=trial:other/1", "actor.architecture="],
            root=str(tmp_path),
            output=tmp_path / WHOLE,
            packages=None,
        )
    assert not (tmp_path / WHOLE).exists()


def test_bundle_excludes_the_site_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle contains settings of the configuration itself.

    The cluster's profile gives the others.
    """
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("SLURMRL_PROFILE", raising=False)
    profile = tmp_path / "config/slurmrl/default.yaml"
    profile.parent.mkdir(parents=True)
    slurm = "slurm: {partition: here, account: us}"
    profile.write_text(
        f"root: /here\ncluster: {{interface: eth0, variables_file: secrets, {slurm}}}\n"
    )
    profile.chmod(0o600)
    config = write_config(tmp_path)
    with config.open("a") as file:
        file.write("cluster: {slurm: {account: them}}\n")
    file = tmp_path / WHOLE
    made = make_bundle(config, [], root=None, output=file, packages=None)
    assert made.notes == (f"{profile} is not in the bundle: the cluster's own profile applies",)
    values = load(unpack(file, tmp_path / "runs")).values
    assert values["cluster"] == {"slurm": {"account": "them"}}
    assert "root" not in values
    config = write_config(tmp_path)
    make_bundle(config, [], root=None, output=file, packages=None)
    assert "cluster" not in load(unpack(file, tmp_path / "runs")).values


@pytest.mark.parametrize(
    "rollout",
    [
        {"backend": "sglang:d1", "gpus": "0", "python": "/cluster/bin/python"},
        {"backend": "vllm", "servers": ["http://n:1"], "server_keys": "/cluster/keys"},
        {"backend": "sglang", "servers": ["http://n:1"], "server_weights": "/cluster/weights"},
    ],
)
def test_server_paths_of_the_cluster_are_not_checked_locally(
    tmp_path: Path, rollout: dict[str, Any]
) -> None:
    config = write_config(tmp_path)
    changes = [f"rollout={json.dumps({**rollout, 'n': 4})}", "algorithm.name=grpo"]
    changes += ["reward={name: exact_match}", "dataset.type=prompt"]
    made = make_bundle(config, changes, root=None, output=tmp_path / WHOLE, packages=None)
    key, text = list(rollout.items())[-1]
    assert made.notes == (f"rollout.{key}: {text} is not in the bundle; the cluster must have it",)
    values = load(unpack(made.file, tmp_path / "runs")).values
    assert values["rollout"] == {**rollout, "n": 4}


@pytest.mark.parametrize("key", ["server_keys", "server_weights"])
def test_empty_paths_of_server_files_are_rejected(tmp_path: Path, key: str) -> None:
    config, changes = write_config(tmp_path), [f"rollout.{key}=''"]
    with pytest.raises(ConfigError, match=f"rollout.{key}: '' is not allowed: must not be empty"):
        make_bundle(config, changes, root=None, output=tmp_path / WHOLE, packages=None)


def test_bundled_subset_files_get_no_subset_setting(tmp_path: Path) -> None:
    """Also covers suites of an evaluation. The downloaded files contain only the subset."""
    config = write_config(tmp_path)
    dataset = "{dataset: {type: prompt_answer, path: data.jsonl}}"
    with config.open("a") as file:
        file.write(f"evaluation: {{every_steps: 1, suites: {{a: {dataset}, b: {dataset}}}}}\n")
    settings = load_settings(config)
    suites = settings.source.values["evaluation"]["suites"]
    for section in (settings.source.values, *suites.values()):
        section["dataset"]["subset"] = "main"
    assert b"subset" not in collect_contents(settings, OwnCode()).config


def test_rows_with_unbundled_images_are_rejected(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    rows = '{"prompt": "How many?", "images": ["a.png"], "answer": "2"}\n'
    (tmp_path / "data.jsonl").write_text(rows)
    changes = ["dataset.images_key=images", "dataset.chat_template=true"]
    values = {"model_type": "qwen3_vl"}
    changes += [f"actor.architecture={json.dumps(values)}", "actor.implementation=hf"]
    settings = load_settings(config, changes)
    with pytest.raises(ConfigError, match="put rows and images into one folder, or write a Parq"):
        collect_contents(settings, OwnCode())


@pytest.mark.parametrize("kept", [300, 511, 2048, 6000])
def test_truncated_bundle_is_rejected(tmp_path: Path, bundle: Path, kept: int) -> None:
    bundle.write_bytes(bundle.read_bytes()[:kept])
    assert is_archive(bundle)
    with pytest.raises(UsageError, match=r"damaged or incomplete.*copy it again"):
        unpack(bundle, tmp_path / "runs")
    assert left(tmp_path) == []


def test_flipped_bit_in_a_bundle_is_detected(tmp_path: Path, bundle: Path) -> None:
    data = bundle.read_bytes()
    at = data.index(b'"prompt": "a"')
    bundle.write_bytes(data[:at] + b"\x00" + data[at + 1 :])
    with pytest.raises(UsageError, match=r"data.jsonl has another checksum; copy it again"):
        unpack(bundle, tmp_path / "runs")
    assert left(tmp_path) == []


def left(folder: Path) -> list[Path]:
    """Return the remaining unpacked bundles."""
    return list((folder / "runs").glob(f"*/{BUNDLES}/*"))


def member(name: str, data: bytes = b"x", **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


@pytest.mark.parametrize(
    ("hostile", "reason"),
    [
        (member("../escape"), "is not allowed as a name"),
        (member("/etc/escape"), "is not allowed as a name"),
        (member("a/../../escape"), "is not allowed as a name"),
        (member("a//b"), "is not allowed as a name"),
        (member("a\nb"), "is not allowed as a name"),
        (member("link", b"", type=tarfile.SYMTYPE, linkname="/etc"), "not a regular file"),
        (member("link", b"", type=tarfile.LNKTYPE, linkname="config.yaml"), "not a regular file"),
        (member("device", b"", type=tarfile.CHRTYPE), "not a regular file"),
        (member("folder", b"", type=tarfile.DIRTYPE), "not a regular file"),
        (member("config.yaml"), "twice"),
        (member("config.yaml/below"), "is both a file and a folder"),
        (member("unnamed"), "unnamed differs from bundle.json"),
    ],
)
def test_hostile_archive_writes_nothing(
    tmp_path: Path, bundle: Path, hostile: tuple[tarfile.TarInfo, bytes], reason: str
) -> None:
    with tarfile.open(bundle, "a") as archive:
        archive.addfile(hostile[0], io.BytesIO(hostile[1]))
    with pytest.raises(UsageError, match=reason):
        unpack(bundle, tmp_path / "runs")
    assert left(tmp_path) == []
    assert not (tmp_path / "escape").exists()


def test_bundle_contents_are_checked_against_the_manifest(tmp_path: Path, bundle: Path) -> None:
    def rewritten(change: Callable[[dict[str, Any]], object]) -> Path:
        path = tmp_path / "changed.tar"
        with tarfile.open(bundle) as old, tarfile.open(path, "w") as new:
            for info in old:
                file = old.extractfile(info)
                assert file is not None
                data = file.read()
                if info.name == "bundle.json":
                    values = json.loads(data)
                    change(values)
                    data = json.dumps(values).encode()
                    info.size = len(data)
                new.addfile(info, io.BytesIO(data))
        return path

    for change, reason in (
        (lambda values: values.update(format=9), "has format 9, but this slurmrl reads format 1"),
        (lambda values: values.update(files=3), "copy it again"),
        (lambda values: values["files"].pop(), "differs from bundle.json"),
        (lambda values: values["files"][0].update(bytes=1 << 60), "differs from bundle.json"),
        (lambda values: values["files"][0].update(sha256="0" * 64), "has another checksum"),
    ):
        with pytest.raises(UsageError, match=reason):
            unpack(rewritten(change), tmp_path / "runs")
    assert left(tmp_path) == []


def test_full_disk_is_reported_before_unpacking(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "free_bytes", lambda directory: 1 << 20)
    with pytest.raises(EnvironmentFailure, match="nothing was unpacked"):
        unpack(bundle, tmp_path / "runs")


def killed_at(place: int, bundle: Path, root: Path) -> None:
    """Unpack until this many files are written."""
    written, count = unpacking.write_new_parts, iter(range(1, 100))

    def write(*arguments: Any) -> None:
        written(*arguments)
        if next(count) == place:
            os.kill(os.getpid(), signal.SIGKILL)

    unpacking.write_new_parts = write  # type: ignore[assignment]
    unpack(bundle, root)


def test_killed_unpacking_leaves_no_usable_directory(tmp_path: Path, bundle: Path) -> None:
    """The process is killed at each file in turn. The next one unpacks everything and removes the
    remains.
    """
    for place in range(1, 4):
        pid = os.fork()
        if pid == 0:
            try:
                killed_at(place, bundle, tmp_path / "runs")
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert len(left(tmp_path)) == 3
    assert all(path.name.startswith(".part-") for path in left(tmp_path))
    folder = unpack(bundle, tmp_path / "runs").parent
    assert left(tmp_path) == [folder]


@pytest.mark.parametrize("place", [1, 3])
def test_concurrent_unpacking_uses_the_first_finished_directory(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """The faster process takes the partial folder of the slower one for the remains of a killed
    process.
    """
    written, count = unpacking.write_new_parts, iter(range(1, 100))

    def write(*arguments: Any) -> None:
        if next(count) == place:
            monkeypatch.setattr(unpacking, "write_new_parts", written)
            faster.append(unpack(bundle, tmp_path / "runs"))
        written(*arguments)

    faster: list[Path] = []
    monkeypatch.setattr(unpacking, "write_new_parts", write)
    config = unpack(bundle, tmp_path / "runs")
    assert [config] == faster
    assert left(tmp_path) == [config.parent]


def test_directory_writable_by_others_is_not_used(tmp_path: Path, bundle: Path) -> None:
    """If all users share a root, another user could have created the directory first."""
    folder = unpack(bundle, tmp_path / "runs").parent
    folder.chmod(0o777)
    with pytest.raises(OwnershipError, match="has mode 0777"):
        unpack(bundle, tmp_path / "runs")


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        *((name, True) for name in ("a/b.txt", "ü.txt", "...")),
        *((name, False) for name in ("", ".", "a/.", "..", "a\\b", "a\u202eb")),
        *((name, False) for name in ("x" * 256, "a/" * 600 + "b")),
    ],
)
def test_unsafe_member_names_are_detected(name: str, safe: bool) -> None:
    assert is_safe(name) == safe


def test_configuration_file_is_not_mistaken_for_a_bundle(tmp_path: Path) -> None:
    assert not is_archive(write_config(tmp_path))
    assert not is_archive(tmp_path / "missing.tar")
    assert not is_archive(tmp_path)
    os.mkfifo(tmp_path / "fifo.tar")
    assert not is_archive(tmp_path / "fifo.tar"), "and nobody waits for a writer"


# -- the command line ------------------------------------------------------------------------


def test_submit_accepts_a_bundle_without_its_sources(
    tmp_path: Path,
    bundle: Path,
    scheduler: FakeScheduler,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The jobs read the unpacked files. Another submission of the same bundle is the same trial."""
    elsewhere = tmp_path / "cluster"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (tmp_path / "source").mkdir()
    (tmp_path / "source/secrets").write_text("TOKEN=other\n")
    (tmp_path / "source/secrets").chmod(0o600)
    moved = bundle.rename(elsewhere / "moved.tar")
    assert main(["submit", str(moved), "--detach", "--no-check"]) == 0, capsys.readouterr().err
    paths = RunPaths.of(elsewhere / "runs", user_name(), "add", "7")
    (unpacked,) = (elsewhere / "runs").glob(f"*/{BUNDLES}/*")
    config = load_resolved(paths.config)
    assert Path(config.dataset.path).is_relative_to(unpacked)
    assert config.root == str(elsewhere / "runs")
    assert {path.name for path in paths.code.iterdir()} >= {"own.py", "beside.py"}
    capsys.readouterr()
    assert main(["submit", str(moved), "--detach", "--no-check"]) == 0
    assert "add/7 submitted" in capsys.readouterr().out
    assert list((elsewhere / "runs").glob(f"*/{BUNDLES}/*")) == [unpacked]


def test_bundle_command_prints_the_created_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bundle", str(write_config(tmp_path)), "--no-wheels"]) == 0
    assert re.fullmatch(
        r"add-1\.tar: 4 files, 0\.\d MB\non the cluster: slurmrl submit add-1.tar\n",
        capsys.readouterr().out,
    )
    assert main(["bundle", "sft.yaml", "--no-wheels", "--output", "no/x.tar"]) == 2
    assert "there is no folder no" in capsys.readouterr().err
    assert main(["bundle", "sft.yaml", "--torch", "rocm"]) == 2
    assert "or a version of CUDA" in capsys.readouterr().err


# -- wheels ----------------------------------------------------------------------------------


def test_wheels_are_requested_for_the_target_python_and_build(tmp_path: Path) -> None:
    command = bundling.download_command(
        tmp_path, tmp_path / "c.txt", ["click"], python="3.12", torch="cu126"
    )
    assert "--python-version=3.12" in command
    assert "https://download.pytorch.org/whl/cu126" in command
    assert "--extra-index-url" not in bundling.download_command(
        tmp_path, tmp_path / "c.txt", [], python="3.12", torch="cuda"
    )
    assert any(line.startswith("torch>") for line in bundling.requirements("cuda"))
    assert not any(line.startswith("torch") for line in bundling.requirements("none"))
    versions = {line.partition("==")[0]: line for line in bundling.installed("cu126")}
    assert versions["torch"].endswith("+cu126")
    assert "+" not in "".join(bundling.installed("cuda"))
    assert "slurmrl" not in versions


def test_bundle_includes_extras_needed_by_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extras need not be installed where the bundle is made."""
    for package in ("megatron", "tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)  # cannot be imported
    file, output = str(write_config(tmp_path)), str(tmp_path / "x.tar")
    settings = ["actor.backend=megatron:d1", "logging.tensorboard=true"]
    assert main(["bundle", file, *settings, "--no-wheels", "--output", output]) == 0
    assert "install slurmrl[megatron,tensorboard] in place of" in capsys.readouterr().err
    wanted = bundling.requirements("cuda", ["megatron"])
    assert [line for line in wanted if line.startswith("megatron")] == ["megatron-core==0.16.1"]
    assert not any(line.startswith("tensorboard") for line in wanted)
    config = load_settings(Path(file), [], root=tmp_path).config
    assert bundling.extras_of(config, ["data/a.jsonl"]) == []
    assert bundling.extras_of(config, ["data/a.parquet"]) == ["data"]


def test_wheels_are_rejected_without_the_slurmrl_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurmrl.__file__", str(tmp_path / "site-packages/slurmrl/__init__.py"))
    with pytest.raises(EnvironmentFailure, match=r"no source code of slurmrl .*--no-wheels"):
        bundling.gather_wheels(tmp_path / "wheels", python="3.12", torch="none", extras=[])

"""Builds of the operators: keys, one build for many processes, publication, fallback to torch."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import copy_context
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from slurmrl.errors import EnvironmentFailure, OwnershipError, UsageError
from slurmrl.run.hang import COMPILING, RankProgress, describe
from slurmrl.tensors.ops.native import libraries, loading
from slurmrl.tensors.ops.native.libraries import Half, Recipe, Toolchain
from slurmrl.tensors.ops.scan import packed_gae
from slurmrl.workers.worker.__main__ import new_activity
from tests.support.installs import pip
from tests.support.trials import wait_until

FORK = get_context("fork")
BUILDERS = 32
WAIT_S = 120.0
ROOT = Path(__file__).parents[3]
CACHE = libraries.cache_folder()
"""The user's own cache, so that the tests share one build."""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return tmp_path / "host"


@pytest.fixture(scope="module")
def made() -> Recipe:
    return libraries.make(Half.CPU, libraries.find_toolchain())


@pytest.fixture
def forget() -> Iterator[None]:
    """Remove loaded libraries and earlier warnings."""
    for function in (loading.load, loading._ready, loading._ready_or_warn):
        function.cache_clear()
    yield
    for function in (loading.load, loading._ready, loading._ready_or_warn):
        function.cache_clear()


@pytest.mark.parametrize("half", list(Half))
def test_cpu_and_cuda_operators_compile_and_load(half: Half) -> None:
    """The toolchain is required, not optional: scripts/test provides it."""
    operators = loading.load(half)
    names = {"gae", "scan", "copy"}
    assert all(hasattr(operators, name) for name in names)


def test_cuda_flags_cover_known_and_later_architectures() -> None:
    flags = libraries.find_toolchain().architecture_flags()
    for number in ("80", "90"):
        assert f"-gencode=arch=compute_{number},code=sm_{number}" in flags
    newest = flags[-2].rpartition("_")[2]
    assert flags[-1] == f"-gencode=arch=compute_{newest},code=compute_{newest}"


def test_operator_library_links_no_cuda_library() -> None:
    path = libraries.library(
        libraries.make(Half.CUDA, libraries.find_toolchain()),
        libraries.cache_folder(),
        libraries.host_folder(),
    )
    said = subprocess.run(["ldd", str(path)], capture_output=True, text=True, check=True).stdout
    assert "cuda" not in said.replace(str(path), "")


@pytest.mark.parametrize(
    "changes",
    [
        {"cxx_flags": ("-O2",)},
        {"versions": ("another compiler",)},
        {"nvcc_flags": ("-gencode=arch=compute_70,code=sm_70",)},
        {"half": Half.CUDA},
    ],
)
def test_cache_key_depends_on_the_build_inputs(made: Recipe, changes: Any) -> None:
    assert dataclasses.replace(made, **changes).key != made.key


def test_cache_key_depends_only_on_the_sources(
    made: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = made.key
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert libraries.make(Half.CPU, libraries.find_toolchain()).key == key
    changed = libraries.inputs(Half.CPU) | {"cpu/numbers.h": b"// changed\n"}
    monkeypatch.setattr(libraries, "inputs", lambda half: changed)
    assert libraries.make(Half.CPU, libraries.find_toolchain()).key != key


def start(function: Callable[[], None]) -> BaseProcess:
    process = FORK.Process(target=function)
    process.start()
    return process


def note(log: Path, line: str) -> None:
    with log.open("a") as file:
        file.write(line + "\n")


def lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def test_concurrent_builds_on_one_host_survive_a_killed_builder(
    made: Recipe, cache: Path, host: Path, tmp_path: Path
) -> None:
    """Exactly one other process builds the library."""
    began, done, go = tmp_path / "began", tmp_path / "done", tmp_path / "go"
    content = os.urandom(1 << 20)

    def compile_slowly(found: Recipe, folder: Path) -> Path:
        note(began, str(os.getpid()))
        (folder / "half.so").write_bytes(content[:1000])
        wait_until("leave to go on", go.exists, WAIT_S)
        (folder / "whole.so").write_bytes(content)
        return folder / "whole.so"

    def want() -> None:
        path = libraries.library(made, cache, host, run=compile_slowly)
        assert path.read_bytes() == content
        note(done, str(os.getpid()))

    processes = [start(want) for _ in range(BUILDERS)]
    wait_until("the first builder", lambda: len(lines(began)) == 1, WAIT_S)
    os.kill(int(lines(began)[0]), signal.SIGKILL)
    wait_until("the second builder", lambda: len(lines(began)) == 2, WAIT_S)
    go.touch()
    for process in processes:
        process.join(WAIT_S)
    killed = [process.pid for process in processes if process.exitcode == -signal.SIGKILL]
    assert killed == [int(lines(began)[0])]
    assert [process.exitcode for process in processes].count(0) == BUILDERS - 1
    assert len(lines(began)) == 2
    assert len(lines(done)) == BUILDERS - 1
    assert [path.name for path in cache.iterdir()] == [f"{made.key}.so"]
    assert [path.name for path in host.iterdir()] == [f"{made.key}.lock"]


def test_hosts_sharing_a_cache_use_the_first_library(
    made: Recipe, cache: Path, tmp_path: Path
) -> None:
    """Each host has its own lock, so both build; the first to publish wins."""
    both_build = threading.Barrier(2)
    results: list[bytes] = []

    def on(host: str) -> None:
        def compile_there(found: Recipe, folder: Path) -> Path:
            both_build.wait(WAIT_S)
            (folder / "it.so").write_bytes(host.encode() * 1000)
            return folder / "it.so"

        path = libraries.library(made, cache, tmp_path / host, run=compile_there)
        results.append(path.read_bytes())

    threads = [threading.Thread(target=on, args=(host,)) for host in ("node-1", "node-2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(results) == 2
    assert results[0] == results[1]
    assert [path.name for path in cache.iterdir()] == [f"{made.key}.so"]


def test_waiting_processes_do_not_repeat_a_failed_build(
    made: Recipe, cache: Path, host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, asked, go = tmp_path / "began", tmp_path / "asked", tmp_path / "go"

    class NotingLock(FileLock):
        def acquire(self, *args: Any, **named: Any) -> Any:
            note(asked, "x")
            return super().acquire(*args, **named)

    def fail(found: Recipe, folder: Path) -> Path:
        note(began, "x")
        wait_until("leave to go on", go.exists, WAIT_S)
        raise EnvironmentFailure("no space in the compiler")

    def want() -> None:
        with pytest.raises(EnvironmentFailure, match="no space in the compiler"):
            libraries.library(made, cache, host, run=fail)

    monkeypatch.setattr(libraries, "FileLock", NotingLock)
    processes = [start(want) for _ in range(4)]
    wait_until("all to ask for the lock", lambda: len(lines(asked)) == 4, WAIT_S)
    time.sleep(0.1)  # file times are coarser than the clock
    go.touch()
    for process in processes:
        process.join(WAIT_S)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(lines(began)) == 1
    with pytest.raises(EnvironmentFailure, match="no space"):
        libraries.library(made, cache, host, run=fail)
    assert len(lines(began)) == 2, "who comes later tries again"


def test_library_writable_by_others_is_not_loaded(made: Recipe, cache: Path, host: Path) -> None:
    cache.mkdir(mode=0o700)
    cache.chmod(0o777)
    with pytest.raises(OwnershipError, match="has mode 0777"):
        libraries.library(made, cache, host)


def test_output_of_a_failed_compiler_is_quoted(made: Recipe, cache: Path, host: Path) -> None:
    broken = dataclasses.replace(made, cxx_flags=("--no-such-flag",))
    with pytest.raises(EnvironmentFailure, match="no-such-flag"):
        libraries.library(broken, cache, host)
    assert list(cache.iterdir()) == []
    assert not list(host.glob("*.build.*"))


def test_message_about_missing_compilers_names_packages_to_install() -> None:
    with pytest.raises(EnvironmentFailure, match=r"this host has no C\+\+ compiler: install one"):
        libraries.make(Half.CPU, Toolchain(cxx="", nvcc=""))
    with pytest.raises(EnvironmentFailure, match="this host has no nvcc: install the CUDA toolkit"):
        libraries.make(Half.CUDA, Toolchain(cxx=libraries.find_toolchain().cxx, nvcc=""))


@pytest.fixture
def bare_host(forget: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Remove the C++ compiler, and return the empty cache."""
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    monkeypatch.setenv("SLURMRL_OPS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.usefixtures("bare_host")
def test_torch_fallback_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLURMRL_OPS", "auto")
    monkeypatch.setattr(loading, "SMALL_ELEMENTS", 8)
    steps = 8
    packed = (
        torch.ones(steps),
        torch.zeros(steps + 1),
        torch.tensor([0, steps]),
        torch.tensor([False]),
    )
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            advantages, _ = packed_gae(*packed, 0.5, 0.5)
    assert float(advantages[-1]) == 1.0
    assert len(caplog.records) == 1
    assert "pure torch" in caplog.text
    assert "python -m slurmrl.tensors.ops.native" in caplog.text
    assert "this host has no C++ compiler" in caplog.text


def test_small_batches_do_not_trigger_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(device: torch.device) -> Any:
        raise AssertionError("a library was asked for")

    monkeypatch.setenv("SLURMRL_OPS", "auto")
    monkeypatch.setattr(loading, "_ready", reject)
    few = loading.SMALL_ELEMENTS - 1
    assert loading.operators(torch.device("cpu"), few) is None
    monkeypatch.setenv("SLURMRL_OPS", "torch")
    assert loading.operators(torch.device("cpu"), 2 * few) is None
    assert loading.operators(torch.device("meta"), 2 * few) is None


@pytest.mark.usefixtures("bare_host")
def test_native_choice_without_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMRL_OPS", "native")
    with pytest.raises(EnvironmentFailure, match=r"this host has no C\+\+ compiler"):
        loading.operators(torch.device("cpu"), 1)


ADD_UP = """
import torch
from slurmrl.tensors.ops.scan import discounted_sums
print(discounted_sums(torch.ones(3), torch.tensor([0, 3]), 1.0).tolist())
"""


def test_host_without_compilers_uses_the_library_of_another_host(
    bare_host: Path, made: Recipe, tmp_path: Path
) -> None:
    """The test runs in a separate process, because a library can be loaded only once."""
    bare_host.mkdir(mode=0o700)
    whole = libraries.library(made, CACHE, libraries.host_folder())
    shutil.copy(whole, bare_host / f"{libraries.stem(Half.CPU)}-0000.so")
    newer = bare_host / f"{libraries.stem(Half.CPU)}-1111.so"
    newer.write_text("made for another C library, say")
    os.utime(newer, (time.time() + 60, time.time() + 60))
    (bare_host / "slurmrl_cpu-of-other-sources-0000.so").touch()
    assert libraries.ready_made(Half.CPU, bare_host)[0] == newer
    program = tmp_path / "add_up.py"
    program.write_text(ADD_UP)
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        env={**os.environ, "SLURMRL_OPS": "native", "PYTHONPATH": str(ROOT)},
        timeout=500,
    )
    assert (done.returncode, done.stdout) == (0, "[3.0, 2.0, 1.0]\n"), done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_library_is_probed_before_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old driver or an unsupported GPU is reported at loading, not in a trial."""
    monkeypatch.setenv("SLURMRL_OPS", "auto")
    with pytest.raises(RuntimeError, match="this device does not run the kernels: "):
        loading.load(Half.CUDA).probe()
    with pytest.raises(EnvironmentFailure, match="cuda:0"):
        loading._ready(torch.device("cuda", 0))


def test_unknown_operator_choice_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMRL_OPS", "cuda")
    with pytest.raises(UsageError, match="one of auto, torch, native is allowed"):
        loading.operators(torch.device("cpu"), 1)


def test_build_command_prints_the_library_path(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "build-ops"
    done = subprocess.run([script, "cpu"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    half, _, path = done.stdout.strip().partition(": ")
    assert half == "cpu"
    assert Path(path).is_file()
    environ = {**os.environ, "CXX": "no-such-compiler"}
    done = subprocess.run([script], capture_output=True, text=True, env=environ, timeout=600)
    assert done.returncode == 3
    assert done.stderr.count("this host has no C++ compiler") == 2


PROGRAM_TIMEOUT_S = 1400.0
"""To compile, and to run. Half a minute each on an idle machine."""
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def run_program(folder: Path, sources: list[str], flags: list[str], made: Recipe) -> str:
    """Build and run a C++ program, which must succeed, and return its output. It is built from
    sources in ``folder`` with sanitizers, and cached until the sources, flags or compiler change.
    """
    common = ["-std=c++20", "-Wall", "-Wextra", "-Werror", *SANITIZE]
    command = [libraries.find_toolchain().cxx, *common, *flags, *sources, "-o", "{}/program"]
    versions = " ".join(made.versions)
    built = subprocess.run(
        [ROOT / "scripts" / "cached", "sanitized", "--of", ".", "--with", versions, "--", *command],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=PROGRAM_TIMEOUT_S,
    )
    assert built.returncode == 0, built.stderr
    program = f"{built.stdout.strip()}/program"
    done = subprocess.run([program], capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(2 * PROGRAM_TIMEOUT_S)
def test_cpu_loops_pass_sanitizers(made: Recipe) -> None:
    sources = ["tests/cpu_loops.cpp", "cpu/scan.cpp", "cpu/intervals.cpp", "cpu/products.cpp"]
    flags = ["-O1", "-ffp-contract=off", "-pthread"]
    said = run_program(ROOT / "cuda", sources, flags, made)
    assert said == "all loops as expected\n"


def without_launch_syntax(source: Path) -> str:
    """Translate the launches ``kernel<<<grid>>>(arguments)`` of a .cu file into C++."""
    text, launches = re.subn(
        r"(\w+)<<<(.*?)>>>\(",
        r"emulated::Grid(\2).run([](auto... given) { \1(given...); }, ",
        source.read_text(),
        flags=re.DOTALL,
    )
    assert launches == 1
    source.with_suffix(".cpp").write_text(text)
    return f"gpu/{source.stem}.cpp"


@pytest.mark.long
@pytest.mark.timeout(2 * PROGRAM_TIMEOUT_S)
def test_cuda_kernels_run_on_a_cpu_under_sanitizers(made: Recipe, tmp_path: Path) -> None:
    """The GPU kernels, run thread by thread in fibers, give right numbers, stay within their
    tensors and wait correctly between blocks.
    """
    tree = tmp_path / "cuda"
    shutil.copytree(ROOT / "cuda", tree)
    kernels = [without_launch_syntax(tree / "gpu" / name) for name in ("scan.cu", "intervals.cu")]
    flags = ["-Wno-unknown-pragmas", "-include", "cuda_runtime_api.h", "-pthread"]
    flags += ["-I", "tests/emulated"]
    said = run_program(tree, [*kernels, "tests/kernels.cpp"], flags, made)
    assert said == "all kernels as expected\n"


def test_operators_build_from_the_wheel(tmp_path: Path) -> None:
    """The wheel contains the sources. Its library has the same key as the library of this tree."""
    installed = tmp_path / "installed"
    pip("wheel", tmp_path, "-w", str(tmp_path))
    (wheel,) = tmp_path.glob("slurmrl-*.whl")
    shutil.unpack_archive(wheel, installed, "zip")
    carried = {path.name for path in (installed / "slurmrl" / "cuda").rglob("*") if path.is_file()}
    assert carried == {Path(name).name for half in Half for name in libraries.inputs(half)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "slurmrl.tensors.ops.native", "cpu", "cuda"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        timeout=600,
    )
    found = libraries.find_toolchain()
    wanted = [f"{half}: {CACHE / libraries.make(half, found).key}.so" for half in Half]
    assert done.stdout.splitlines() == wanted, done.stderr


def test_log_announces_a_build_and_the_command_to_do_it_earlier(
    made: Recipe, cache: Path, host: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_at_once(_: Recipe, folder: Path) -> Path:
        library = folder / "built.so"
        library.write_bytes(b"x")
        return library

    with caplog.at_level(logging.INFO, logger="slurmrl"):
        libraries.library(made, cache, host, run=compile_at_once)
        libraries.library(made, cache, host, run=compile_at_once)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("compiling the operators of slurmrl into")
    assert "python -m slurmrl.tensors.ops.native" in first
    assert second.startswith("compiled the operators in")


def test_rank_status_shows_compilation_or_a_wait_for_it(
    cache: Path, host: Path, made: Recipe
) -> None:
    """The status returns to the previous activity afterwards, even if the build fails."""
    alone = copy_context()
    activity = alone.run(new_activity)
    activity.begin("actor_gen", 3)
    activity.phase("forward", 2, 8)
    before, shown = activity.current()[0], []

    def compile_there(recipe: Recipe, folder: Path) -> Path:
        shown.append(activity.current()[0].phase)
        if len(shown) == 1:
            raise EnvironmentFailure("no compiler")
        path = folder / "library.so"
        path.write_bytes(b"built")
        return path

    build = partial(alone.run, libraries.library, made, cache, host, run=compile_there)
    with pytest.raises(EnvironmentFailure):
        build()
    assert activity.current()[0] == before
    build()
    assert shown == [COMPILING, COMPILING]
    assert activity.current()[0] == before
    progress = RankProgress(rank=0, call="actor_gen", step=3, phase=COMPILING, since_s=70.0)
    assert describe(progress) == f"has been in actor_gen for 70 s ({COMPILING})"

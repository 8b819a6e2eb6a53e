"""The process that runs programs. The process reads one JSON request per line and writes one reply.

This source (see `slurmrl.rewards.code.LOADER`) may run in a container's Python and imports nothing
of slurmrl. If the kernel allows it, the process has its own namespaces: no network, a read-only
file system with one small private folder, and a process table whose processes all die with its
first process. Otherwise the sandbox reports the missing protections. Each program runs in a forked
child with resource limits and without capabilities, and never sees the expected results.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import io
import json
import os
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from multiprocessing import context
from typing import Any, NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
NEW_MOUNTS, NEW_USER, NEW_PIDS, NEW_NET, NEW_IPC = 0x20000, 0x10000000, 0x20000000, 1 << 30, 1 << 27
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
CAPABILITY_VERSION = 0x20080522
PRIVATE_FOLDERS = ("/tmp", "/var/tmp", "/mnt", "/media", "/srv")
"""Possible mount points for the private folder. The first working mount point is used."""
SHARED_MEMORY = "/dev/shm"  # multiprocessing creates its semaphores here
VARIABLES = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
RESULT_FD, MOST_OPEN_FILES, WATCH_S = 3, 256, 0.02
MOST_CPUS = 4  # Programs see this number, so that their pools do not exceed the allowed processes.
NAMED: tuple[str, ...] = ("abc", "dataclasses", "decimal", "enum", "fractions", "statistics")
NAMED += ("random", "string", "copy", "datetime", "typing", "collections", "heapq", "bisect")
NAMED += ("itertools", "functools", "math")
MODULES = {*NAMED, "io", "json", "operator", "os", "re", "sys", "time"}
"""Modules that programs have without an import. Programs also have all names of `NAMED` modules."""
EQUALITY: dict[str, Any] = {"__name__": "equality"}
"""Names that ``settings["equality"]``, the source of `code_equality`, defines."""
LAST_BYTES = 2000
"""Number of bytes at the end of standard error in which to look for the reason of a failure."""


class Sandbox:
    """Runs programs, one after the other."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self.network = self.files = self.process_table = False
        """Whether the program's network, files and processes are isolated."""
        if settings["namespaces"]:
            self._enter_namespaces()
        self._kept: dict[str, list[tuple[str, int]]] = {}
        """The folders of this interpreter below each mount point, with their descriptors."""
        self._memory_folders = self._find_memory_folders()
        self._root = os.getuid() == 0
        self._own_proc = self.process_table and self._mount("proc", "/proc", "proc")
        if not self.process_table:
            LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
        with suppress(OSError):
            _write("/proc/self/oom_score_adj", "1000")

    def protections(self) -> dict[str, bool]:
        """Return the active protections. Only a process table limits the processes of root."""
        counted = self._own_proc or not self._root
        return {"network": self.network, "files": self.files, "processes": counted}

    # -- isolation ---------------------------------------------------------------------------

    def _enter_namespaces(self) -> None:
        """Enter namespaces. Only process 1 of a new process table returns; its parent waits."""
        wanted = NEW_MOUNTS | NEW_PIDS | NEW_NET | NEW_IPC
        if _works_in_child(lambda: _enter_own_users(wanted)):
            _enter_own_users(wanted)
        elif LIBC.unshare(wanted) != 0:
            return
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # Linux reset this with the credentials.
        child = os.fork()
        if child:
            os.close(0)
            os.close(1)
            _, status = os.waitpid(child, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0x7F)
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        self.process_table = self.network = True

    def _find_memory_folders(self) -> list[str]:
        """Make the file system read-only, if possible, and return mount points for memory.

        Small file systems in memory can be mounted there. The first mount point is for the private
        folder. The result is empty if no file system can be mounted.
        """
        if not self.process_table or LIBC.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) != 0:
            return []
        attributes = (ctypes.c_uint64 * 4)(READ_ONLY, 0, 0, 0)
        call = (MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, ctypes.sizeof(attributes))
        self.files = LIBC.syscall(*call) == 0
        private = next((place for place in PRIVATE_FOLDERS if self._can_be_memory(place)), "")
        shared = [SHARED_MEMORY] if private and self._can_be_memory(SHARED_MEMORY) else []
        return [private, *shared] if private else []

    def _can_be_memory(self, place: str) -> bool:
        place = os.path.realpath(place)
        ours = _below(place, _folders_of_interpreter())
        if not os.path.isdir(place) or place in ours:
            return False
        self._kept[place] = [(path, os.open(path, os.O_PATH)) for path in ours]
        if not self._mount_memory(place):
            return False
        LIBC.umount2(place.encode(), MNT_DETACH)
        return True

    def _mount_memory(self, place: str) -> bool:
        """Mount a file system that has only this interpreter's folders, read-only."""
        place = os.path.realpath(place)
        options = f"size={self._settings['files_bytes']},mode=700"
        if not self._mount("tmpfs", place, "tmpfs", options):
            return False
        for path, folder in self._kept[place]:
            os.makedirs(path)
            os.fchdir(folder)  # the tmpfs hides the original `path`
            if LIBC.mount(b".", path.encode(), None, MS_BIND | MS_REC, None) != 0:
                LIBC.umount2(place.encode(), MNT_DETACH)
                return False
        os.chdir("/")
        return True

    def _mount(self, source: str, target: str, kind: str, options: str = "") -> bool:
        flags = MS_NOSUID | MS_NODEV | (MS_NOEXEC if kind == "proc" else 0)
        words = (word.encode() for word in (source, target, kind))
        return bool(LIBC.mount(*words, flags, options.encode()) == 0)

    # -- programs ----------------------------------------------------------------------------

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run the cases of a request until one fails, or all if ``all`` is true."""
        deadline = time.monotonic() + request["timeout_s"]
        results: list[dict[str, Any]] = []
        for case in request["cases"]:
            left_s = min(request["test_timeout_s"], deadline - time.monotonic())
            result = self._run(request, case, left_s) if left_s > 0 else {"failed": "time limit"}
            results.append(result)
            if "failed" in result and not request["all"]:
                break
        return {"results": results}

    def _run(
        self, request: dict[str, Any], case: dict[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        files = {each: os.memfd_create(each) for each in ("input", "output", "errors", "result")}
        os.pwrite(files["input"], case["stdin"].encode(errors="replace"), 0)
        nonce = os.urandom(16)
        try:
            with self._private_folder() as place:
                child = os.fork()
                if child == 0:
                    self._be_program(request, case, files, place, nonce, timeout_s)
                failed = self._watch(child, timeout_s)
                self._kill_all(child)
            return _result(failed, case, files, nonce)
        finally:
            for descriptor in files.values():
                os.close(descriptor)

    @contextmanager
    def _private_folder(self) -> Iterator[str]:
        """Yield an empty folder, and remove it with all files that the program has put there.

        In memory, each program gets a separate mount, so it finds no files of earlier programs.
        """
        mounted: list[str] = []
        try:
            for place in self._memory_folders:
                if not self._mount_memory(place):
                    raise OSError(ctypes.get_errno(), f"no file system in memory at {place}")
                mounted.append(place)
            folder = tempfile.mkdtemp(prefix="slurmrl-code-", dir=next(iter(mounted), None))
            try:
                yield folder
            finally:
                if not mounted:
                    with suppress(RecursionError):  # the folders are too deep for rmtree
                        shutil.rmtree(folder, ignore_errors=True)
        finally:
            for place in mounted:
                LIBC.umount2(place.encode(), MNT_DETACH)

    def _watch(self, child: int, timeout_s: float) -> str:
        """Wait for the program; return why it failed, or "" if it succeeded."""
        pidfd = os.pidfd_open(child)
        deadline = time.monotonic() + timeout_s
        step_s = WATCH_S if self._root and self._own_proc else timeout_s
        try:
            while not select.select([pidfd], [], [], min(step_s, _left(deadline)))[0]:
                if not _left(deadline):
                    return "time limit"
                running = sum(map(str.isdigit, os.listdir("/proc"))) if self._own_proc else 0
                if running > self._settings["most_processes"]:
                    return "too many processes"
        finally:
            os.close(pidfd)
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # No reaping: keep the pid.
        if ended is None or ended.si_code != os.CLD_EXITED:
            return f"signal {ended.si_status if ended else 0}"
        return f"exit code {ended.si_status}" if ended.si_status else ""

    def _kill_all(self, child: int) -> None:
        """Kill and reap the program and every process that it started."""
        is_init = self.process_table and os.getpid() == 1
        if not is_init:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            while True:
                for pid in (-1,) if is_init else _children():  # -1 means all other processes
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                while os.waitpid(-1, 0 if is_init else os.WNOHANG)[0]:
                    pass
                time.sleep(0.001)

    def _be_program(
        self,
        request: dict[str, Any],
        case: dict[str, Any],
        files: dict[str, int],
        place: str,
        nonce: bytes,
        timeout_s: float,
    ) -> NoReturn:
        """Become the program in a forked child."""
        code = 1
        try:
            os.setsid()
            result = os.dup(files["result"])
            for number, name in enumerate(("input", "output", "errors")):
                os.dup2(files[name], number)
            os.dup2(result, RESULT_FD)
            os.closerange(RESULT_FD + 1, os.sysconf("SC_OPEN_MAX"))
            os.chdir(place)
            os.environ.clear()
            os.environ.update({**VARIABLES, "HOME": place, "TMPDIR": place})
            cpus = min(os.cpu_count() or 1, MOST_CPUS)
            vars(os).update(dict.fromkeys(("cpu_count", "process_cpu_count"), lambda: cpus))
            tempfile.tempdir = None
            self._limit(timeout_s)
            code = _execute(request["program"], case, place, nonce)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:  # noqa: BLE001 - the program may raise anything
            traceback.print_exc(file=sys.__stderr__)
        finally:
            with suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code & 0xFF)

    def _limit(self, timeout_s: float) -> None:
        settings = self._settings
        seconds = int(timeout_s) + 2
        processes = settings["most_processes"]
        if not self.process_table:  # The limit counts all processes of the user.
            processes += _threads_of_user()
        limits = {
            resource.RLIMIT_CPU: seconds,
            resource.RLIMIT_AS: settings["memory_bytes"],
            resource.RLIMIT_FSIZE: settings["files_bytes"],
            resource.RLIMIT_NPROC: processes,
            resource.RLIMIT_NOFILE: MOST_OPEN_FILES,
            resource.RLIMIT_CORE: 0,
        }
        for number, limit in limits.items():
            _, hard = resource.getrlimit(number)
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(number, (limit, limit))
        LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
        LIBC.capset(header, (ctypes.c_uint32 * 6)())
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@cache
def preamble() -> dict[str, Any]:
    """Return the names that programs have without imports, as in public test harnesses."""
    modules = {name: import_module(name) for name in MODULES}
    names: dict[str, Any] = {}
    for module in (modules[name] for name in NAMED):
        public = getattr(module, "__all__", [name for name in dir(module) if name[0] != "_"])
        names.update({name: getattr(module, name) for name in public})
    return {name: value for name, value in names.items() if not hasattr(builtins, name)} | modules


def _execute(program: str, case: dict[str, Any], place: str, nonce: bytes) -> int:
    """Run the program in this process; return its exit code."""
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1, closefd=False)
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    sys.argv = ["main.py"]
    sys.path.insert(0, place)
    kind, given = case["kind"], preamble().items()
    module = types.ModuleType("__main__" if kind == "script" else "program")
    sys.modules[module.__name__] = module
    space = module.__dict__
    tested = re.findall(r"\w+", case["function"] + " " + case["check"]) if kind != "script" else ()
    space.update({name: x for name, x in given if name in MODULES or name not in tested})
    if kind == "script":
        try:
            _execute_text(program, "main.py", space)
        finally:  # as at the exit of an interpreter, even after sys.exit()
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            _flush(space)
        return 0
    names = dict(vars(builtins))
    _execute_text(program, "main.py", space)
    vars(builtins).update(names)  # The program may have replaced names.
    if kind == "check":
        _run_tests(case["check"], module)
        answer = None
    else:
        function = space.get(name := case["function"]) or getattr(space["Solution"](), name)
        answer = function(*case["arguments"])
    # Scalars and arrays of numpy have tolist().
    os.write(RESULT_FD, nonce + json.dumps(answer, default=lambda x: x.tolist()).encode())
    return 0


def _flush(space: dict[str, Any]) -> None:
    """Flush the program's files, as the interpreter does when it exits."""
    for file in (sys.stdout, sys.__stdout__, *space.values()):
        with suppress(ValueError):  # the file is closed, or its buffer was detached
            if isinstance(file, io.IOBase):
                file.flush()


def _run_tests(code: str, module: types.ModuleType) -> None:
    """Run test code after the program, as main module. Tests of ``unittest`` must pass."""
    module.__name__ = "__main__"
    sys.modules.update(__main__=module, solution=module)
    if "unittest" in code:
        for name in [name for name in sys.modules if name.partition(".")[0] == "unittest"]:
            del sys.modules[name]  # the program may have changed the module
        _check_unittest()
    tests = EQUALITY["with_plain_operands"](code, module.__dict__)
    _execute_text(tests, "tests.py", module.__dict__)


def _check_unittest() -> None:
    import unittest

    run, main = unittest.TextTestRunner.run, unittest.TestProgram.runTests

    def checked(runner: Any, tests: Any) -> Any:
        if (result := run(runner, tests)).wasSuccessful() and result.testsRun > len(result.skipped):
            return result
        raise AssertionError(f"tests failed: {result}")

    def returning(program: Any) -> None:
        program.exit = False  # do not exit: the process still reports the result
        main(program)

    unittest.TextTestRunner.run = checked  # type: ignore
    unittest.TestProgram.runTests = returning  # type: ignore


def _execute_text(text: Any, name: str, space: dict[str, Any]) -> None:
    exec(compile(text, name, "exec", dont_inherit=True), space)  # do not inherit our __future__


def _result(
    failed: str, case: dict[str, Any], files: dict[str, int], nonce: bytes
) -> dict[str, Any]:
    """Return ``{"output": TEXT}`` or ``{"value": JSON}``, or ``{"failed": WHY}`` on failure."""
    if failed:
        end = max(os.fstat(files["errors"]).st_size - LAST_BYTES, 0)
        words = os.pread(files["errors"], LAST_BYTES, end).decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(words) if line.strip()), "")
        return {"failed": f"{failed}: {last[:200]}" if last else failed}
    wanted = "output" if case["kind"] == "script" else "result"
    data = os.pread(files[wanted], case["most_bytes"] + 1, 0)
    if len(data) > case["most_bytes"]:
        return {"failed": "more output than expected"}
    if wanted == "output":
        return {"output": data.decode(errors="replace")}
    if not data.startswith(nonce):
        return {"failed": "the program ended before its tests"}
    try:
        return {"value": json.loads(data[len(nonce) :])}
    except ValueError:
        return {"failed": "its result is not JSON"}


def _folders_of_interpreter() -> set[str]:
    """Return the folders from which this interpreter imports, with and without links resolved."""
    paths = filter(os.path.isdir, (sys.prefix, sys.base_prefix, *sys.path))
    return {each(path) for path in paths for each in (os.path.abspath, os.path.realpath)}


def _below(place: str, paths: Iterable[str]) -> list[str]:
    """Return the paths at or below a place, without paths below another of these paths."""
    found = [place]
    for path in sorted(paths):
        if [each for each in found if f"{path}/".startswith(f"{each}/")] == [place]:
            found.append(path)
    return found[1:]


def _enter_own_users(others: int) -> None:
    """Enter the namespaces ``others`` and a user namespace that has only this user."""
    user, group = os.getuid(), os.getgid()
    if LIBC.unshare(NEW_USER | others) != 0:
        raise OSError(ctypes.get_errno(), "no new namespaces")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")


def _works_in_child(change: Callable[[], None]) -> bool:
    """Try a permanent change in a child. Root in Apptainer cannot set users of its namespace."""
    child = os.fork()
    if not child:
        try:
            change()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _children() -> list[int]:
    """Return the children of this process, including orphans of children, which it adopts."""
    with suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]
    return []


def _threads_of_user() -> int:
    count = 0
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def main(settings: dict[str, Any]) -> None:
    """Answer until the input ends."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    preamble()  # Import modules once for all programs.
    exec(compile(settings["equality"], "code_equality.py", "exec"), EQUALITY)
    methods = vars(context)["_concrete_contexts"]  # a spawned process could not import the program
    methods.update(dict.fromkeys(methods, methods["fork"]))
    vars(vars(context)["_default_context"]).update(_default_context=methods["fork"])
    sandbox = Sandbox(settings)
    _send(replies, {"ready": True, "protections": sandbox.protections()})
    with open(requests, "rb") as lines:
        for line in lines:
            _send(replies, sandbox.answer(json.loads(line)))


def _send(replies: int, message: dict[str, Any]) -> None:
    with open(replies, "wb", closefd=False) as file:
        file.write(json.dumps(message).encode() + b"\n")

"""The typed table of the environment variables that slurmrl reads, and the user's name.

``scripts/make-docs`` writes the table into docs/configuration/environment.md.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from slurmrl.errors import UsageError

T = TypeVar("T")


class Variable(NamedTuple, Generic[T]):
    name: str
    parse: Callable[[str], T]
    default: T
    set_by: str
    doc: str
    """One line of Markdown for the reference."""

    def get(self, environ: Mapping[str, str] | None = None) -> T:
        """Return the variable's value, or its default when it is unset or empty.

        Raises UsageError for a value that does not parse.
        """
        text = (os.environ if environ is None else environ).get(self.name, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise UsageError(f"environment variable {self.name}={text!r}: {error}") from error

    @contextmanager
    def given(self, text: str) -> Iterator[None]:
        """Set the variable to ``text`` in this process and its children during the context."""
        before = os.environ.get(self.name)
        os.environ[self.name] = text
        try:
            yield
        finally:
            if before is None:
                del os.environ[self.name]
            else:
                os.environ[self.name] = before


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"one of {', '.join(allowed)} is allowed")
        return text

    return parse


USER, SITE, SLURM, SLURMRL = "user", "the site", "Slurm", "slurmrl"
"""Sources of the value of a variable."""

ROOT: Variable[str] = Variable(
    "SLURMRL_ROOT", str, "", USER, "Directory of all runs for commands without `--root`."
)
OPS: Variable[str] = Variable(
    "SLURMRL_OPS",
    _one_of("auto", "torch", "native"),
    "auto",
    USER,
    "Use of compiled operators. `auto` uses available operators that are faster. `torch` uses no "
    "compiled operators. `native` requires them, and fails if they are not available.",
)
OPS_CACHE: Variable[str] = Variable(
    "SLURMRL_OPS_CACHE",
    str,
    "",
    USER,
    "Directory of the compiled operators; hosts may share it. Default: `slurmrl/ops` in "
    "`XDG_CACHE_HOME`.",
)
TRITON_INTERPRET: Variable[bool] = Variable(
    "TRITON_INTERPRET",
    lambda text: text == "1",
    False,
    USER,
    "With `1`, Triton's interpreter runs the fused operators, on CPUs too, for debugging.",
)
SERVER_KEY: Variable[str] = Variable(
    "SLURMRL_SERVER_KEY",
    str,
    "",
    USER,
    "API key of `rollout.servers`, used if `rollout.server_keys` names no file. Jobs do not "
    "inherit the key from your shell: set the key in `cluster.slurm.setup`.",
)
SERVER_ADMIN_KEY: Variable[str] = Variable(
    "SLURMRL_SERVER_ADMIN_KEY",
    str,
    "",
    USER,
    "Admin key of `rollout.servers` (`--admin-api-key` of SGLang). Set this key like the API key.",
)
PROFILE: Variable[str] = Variable(
    "SLURMRL_PROFILE",
    str,
    "",
    USER,
    "Site profile for commands without `--profile`. `a100` names the file `slurmrl/a100.yaml` in "
    "`XDG_CONFIG_HOME`; `none` selects no profile. Default: `default`, or the only profile.",
)
XDG_CONFIG_HOME: Variable[str] = Variable(
    "XDG_CONFIG_HOME",
    str,
    "",
    USER,
    "The user's configuration directory, which contains the profiles. Default: `~/.config`.",
)
XDG_CACHE_HOME: Variable[str] = Variable(
    "XDG_CACHE_HOME", str, "", USER, "The user's cache directory. Default: `~/.cache`."
)
CXX: Variable[str] = Variable(
    "CXX", str, "c++", USER, "C++ compiler that builds the compiled operators."
)
CUDA_HOME: Variable[str] = Variable(
    "CUDA_HOME", str, "", USER, "CUDA toolkit whose nvcc builds the compiled operators."
)
SCRATCH: Variable[str] = Variable(
    "SCRATCH",
    str,
    "",
    SITE,
    "Your directory for large files. `slurmrl init site` proposes it as the place of run "
    "directories.",
)
LOADED_MODULES: Variable[str] = Variable(
    "LOADEDMODULES",
    str,
    "",
    SITE,
    "Loaded environment modules, which `slurmrl init site` proposes for the jobs.",
)
LINK: Variable[int] = Variable(
    "SLURM_ARRAY_TASK_ID", int, 0, SLURM, "Index of this link in its chain (or local chain)."
)
JOB_ID: Variable[str] = Variable("SLURM_JOB_ID", str, "", SLURM, "Id of this job.")
ARRAY_JOB_ID: Variable[str] = Variable(
    "SLURM_ARRAY_JOB_ID", str, "", SLURM, "Id of the job array of this job."
)
RESTART_COUNT: Variable[int] = Variable(
    "SLURM_RESTART_COUNT", int, 0, SLURM, "Number of times that Slurm has requeued this job."
)
SLURM_END_TIME: Variable[float | None] = Variable(
    "SLURM_JOB_END_TIME",
    float,
    None,
    SLURM,
    "End of this job by its time limit, in seconds since the epoch (newer versions of Slurm).",
)
NODE_LIST: Variable[str] = Variable("SLURM_JOB_NODELIST", str, "", SLURM, "Hosts of this job.")
NODE_ID: Variable[int] = Variable(
    "SLURM_NODEID", int, 0, SLURM, "Index of this host among the hosts of the job."
)
NODE_NAME: Variable[str] = Variable(
    "SLURMD_NODENAME", str, "", SLURM, "Slurm's name of this host. Default: the host name."
)
VISIBLE_DEVICES: Variable[str] = Variable(
    "CUDA_VISIBLE_DEVICES",
    str,
    "",
    SLURM,
    "GPUs that the scheduler assigned: indices, UUIDs or MIG ids.",
)
SLURM_CONF: Variable[str] = Variable(
    "SLURM_CONF", str, "", SITE, "Slurm's configuration file, if it is not in its usual place."
)
ROUND: Variable[int] = Variable(
    "SLURMRL_ROUND", int, 0, SLURMRL, "Number of agent restarts since this job started."
)
JOB_END: Variable[float | None] = Variable(
    "SLURMRL_JOB_END",
    float,
    None,
    SLURMRL,
    "End of this job by the clock of its first host, in seconds since the epoch.",
)
COMPLETE: Variable[str] = Variable(
    "_SLURMRL_COMPLETE",
    str,
    "",
    SLURMRL,
    "Completion request from the shell. The script of `slurmrl completion` sets it.",
)

VARIABLES: tuple[Variable[Any], ...] = tuple(
    value for value in tuple(vars().values()) if isinstance(value, Variable)
)


def cache_folder(name: str) -> Path:
    """Return the folder of the cache ``name`` of this user."""
    home = os.path.expanduser("~")
    return Path(XDG_CACHE_HOME.get() or f"{home}/.cache").absolute() / "slurmrl" / name


def reference() -> str:
    """Return the Markdown of the reference of environment variables, without a page title."""
    lines = ["An empty variable counts as unset.", ""]
    for one in VARIABLES:
        meaning, _, default = one.doc.partition(" Default: ")
        lines += [f"## `{one.name}`", "", f"- **Set by:** {one.set_by}"]
        lines += [f"- **Default:** {default.removesuffix('.') or _shown(one.default)}"]
        lines += ["", meaning, ""]
    return "\n".join(lines)


def _shown(default: object) -> str:
    return "none" if default in ("", None) else f"`{default}`"


def user_name() -> str:
    """Return the current user's account name, or the numeric id if the account has no name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())

"""Layout strings of earlier systems and their current spelling.

Only the setting ``allocation_mode`` accepts these strings. Examples:

    ReaL 2024     d2m2p2   actor_gen:d4m2p1,*:d2m2p2   pipe_model   pipe_data   heuristic
                  manual as  actor:node[01-02]:d4m2p2,ref:node01:0,1:d1m2p1
    AReaL 0.3     sglang.d2t2p1+d1t4p1   vllm.d2m1p1+actor_train:d2m1p1,*:d1m1p2   d4p2+sglang:d2
                  sglang.d4|d2t2   sglang.d2+d2+eval   d2p2t4e2c4   attn:d4|ffn:d2e2

A mesh of ReaL's ``manual`` mode is ``node[01-02,05]``, ``NODE01:0,1`` or ``node01,node03``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from slurmrl.config.allocation.allocation import AXIS_OF, BACKENDS, Allocation
from slurmrl.config.allocation.parser import Scanner, format_gpus, single
from slurmrl.errors import AllocationError

WORDS: Final = ("pipe_model", "pipe_data", "heuristic", "search", "manual")
ROLES: Final = ("actor", "critic", "ref", "rollout")
OTHERS: Final = "*"
_SERVER: Final = re.compile(r"(sglang|vllm|mock)\s*[.:]")
_CALL: Final = re.compile(r"\*|[A-Za-z]+(_[A-Za-z]+)*")
_MESH_AHEAD: Final = re.compile(r"[A-Za-z][A-Za-z_-]*(\[|[0-9]+\s*[:,])")
_DIMENSIONS_ONLY: Final = re.compile(r"([dmtpce]\s*[0-9]+\s*)+(?![\w\[])")


@dataclass(frozen=True)
class Placed:
    """The layout of a role, and the value of its key ``gpus`` (empty for the default)."""

    allocation: Allocation
    gpus: str = ""

    @property
    def backend(self) -> str:
        """The current spelling of the layout."""
        return str(replace(self.allocation, name=""))


@dataclass(frozen=True)
class HostShape:
    """The hosts and GPUs per host over which words such as ``pipe_model`` spread a model."""

    hosts: int
    gpus_per_host: int


def parse_legacy(text: str, shape: HostShape, *, trains: bool = True) -> dict[str, Placed]:
    """Return a mapping from roles to their layouts in a legacy string.

    If the trial ``trains``, the string must have a layout of the actor. Roles without a layout
    have the actor's layout.

    Raises AllocationError, which points at a character.
    """
    word = text.strip()
    if word in WORDS:
        return _word(word, text, shape)
    reader = _Reader(text, shape, trains)
    reader.read()
    return reader.placed()


def _word(word: str, text: str, shape: HostShape) -> dict[str, Placed]:
    hosts, gpus = shape.hosts, shape.gpus_per_host
    spread = {
        "pipe_model": {"tp": gpus, "pp": hosts},
        "pipe_data": {"dp": gpus, "pp": hosts},
        "heuristic": {"dp": hosts, "tp": gpus},
    }
    if word == "manual":
        Scanner(text).fail(
            "write the layout of each role: <role>:<mesh>:<dimensions>, for example "
            "actor:node[01-02]:d4m2p2,ref:node01:0,1:d1m2p1"
        )
    if word == "search":
        Scanner(text).fail(
            "the command slurmrl search finds layouts before a submission; "
            f"allowed here: {', '.join(spread)}"
        )
    return {"actor": Placed(_trained(spread[word]))}


@dataclass(frozen=True)
class _Part:
    start: int
    allocation: Allocation
    mesh: Mesh | None = None


class _Reader:
    def __init__(self, text: str, shape: HostShape, trains: bool) -> None:
        self._scanner = Scanner(text)
        self._trains = trains
        self._shape = shape
        self._parts: dict[str, _Part] = {}
        self._generates_on_actor = False

    def read(self) -> None:
        self._item()
        while self._scanner.character in ("+", "|"):
            self._generates_on_actor |= self._scanner.character == "|"
            self._scanner.position += 1
            self._item()
        if self._scanner.character:
            self._scanner.fail("expected '+', '|' or the end")
        self._check()

    def placed(self) -> dict[str, Placed]:
        meshes = [part.mesh for part in self._parts.values() if part.mesh]
        hosts = sorted({host for each in meshes for host in each.hosts})
        roles = {role: self._placed(part, hosts) for role, part in self._parts.items()}
        if self._generates_on_actor:
            size = self._parts["rollout"].allocation.world_size
            roles["rollout"] = replace(roles["rollout"], gpus=format_gpus(range(size)))
        others = roles.pop(OTHERS, None)
        if others is not None:
            named = ("critic", "ref") if "actor" in roles else ("actor",)
            roles = {**dict.fromkeys(named, others), **roles}
        if {"rollout", "actor"} <= roles.keys() and _same_layout(roles["rollout"], roles["actor"]):
            del roles["rollout"]
        return roles

    def _placed(self, part: _Part, hosts: list[str]) -> Placed:
        gpus = ""
        if part.mesh is not None:
            gpus = format_gpus(part.mesh.numbers(hosts, self._shape.gpus_per_host))
        return Placed(part.allocation, gpus)

    def _check(self) -> None:
        scanner, parts = self._scanner, self._parts
        if self._trains and "actor" not in parts and OTHERS not in parts:
            scanner.fail("no part trains the actor: add dimensions such as +d2t2")
        if not parts:
            scanner.fail("expected dimensions before or after eval, such as sglang.d4+eval", 0)
        if self._generates_on_actor:
            joined = parts.get("rollout"), parts.get("actor") or parts.get(OTHERS)
            first, second = (part.allocation.world_size if part else 0 for part in joined)
            if not first or not second:
                scanner.fail("'|' must join generation and the actor, such as sglang.d4|d2t2", 0)
            if first != second:
                scanner.fail(f"parts joined by '|' need {first} and {second} ranks", 0)
        for part in parts.values():
            self._check_mesh(part)

    def _check_mesh(self, part: _Part) -> None:
        if part.mesh is None:
            return
        size = len(part.mesh.gpus) or len(part.mesh.hosts) * self._shape.gpus_per_host
        if size != part.allocation.world_size:
            self._scanner.fail(
                f"the mesh has {size} GPUs, the dimensions need {part.allocation.world_size}",
                part.start,
            )

    def _item(self) -> None:
        scanner = self._scanner
        scanner.skip_blanks()
        start = scanner.position
        if scanner.take_if("eval"):
            return  # slurmrl evaluates with the layout that generates for training.
        if match := _SERVER.match(scanner.text, start):
            self._server(match)
        elif scanner.comes("attn") or scanner.comes("(") or self._only_dimensions():
            self._add("actor", _Part(start, self._dimensions()), start)
        else:
            self._keyed()

    def _only_dimensions(self) -> bool:
        return bool(_DIMENSIONS_ONLY.match(self._scanner.text, self._scanner.position))

    def _server(self, match: re.Match[str]) -> None:
        start = match.start()
        if match[1] == "mock":
            self._scanner.fail("unknown engine 'mock'; allowed: sglang, vllm", start)
        self._scanner.position = match.end()
        self._add("rollout", _Part(start, _unsplit(self._as(match[1]))), start)

    def _as(self, backend: str) -> Allocation:
        """Read dimensions as a layout of an engine."""
        return _shifted(self._scanner, f"{backend}:")

    def _dimensions(self) -> Allocation:
        """Read dimensions without an engine: layouts with p or e get megatron, others fsdp."""
        start = self._scanner.position
        if self._scanner.comes("attn") or self._scanner.comes("("):
            return self._as("megatron")
        general = self._as("megatron")
        if general.sizes["pp"] == general.sizes["ep"] == 1:
            self._scanner.position = start
            return self._as("fsdp")
        return general

    def _keyed(self) -> None:
        scanner = self._scanner
        while True:
            scanner.skip_blanks()
            start = scanner.position
            call = scanner.take(_CALL)
            if not call:
                scanner.fail(f"expected dimensions, a call or '*'; or one of {', '.join(WORDS)}")
            role = self._role(call, start)
            scanner.expect(":", f"':' and dimensions, for example {call}:d2m1p1")
            place = None
            scanner.skip_blanks()
            if _MESH_AHEAD.match(scanner.text, scanner.position) and not self._only_dimensions():
                place = mesh(scanner, self._shape.gpus_per_host)
                scanner.expect(":", "':' and dimensions after the mesh")
            allocation = self._dimensions()
            if role == "rollout":
                allocation = _generating(allocation)
            self._add(role, _Part(start, allocation, place), start)
            if not scanner.take_if(","):
                return

    def _role(self, call: str, start: int) -> str:
        role, _, verb = call.partition("_")
        if role == "actor" and verb == "gen":
            return "rollout"
        if call == OTHERS or (role in ROLES and verb in ("", "train", "inf")):
            return role
        return self._scanner.fail(
            f"unknown call '{call}'; allowed: *, actor_gen, and <role>_train, <role>_inf or "
            f"<role> for {', '.join(ROLES[:3])}",
            start,
        )

    def _add(self, role: str, part: _Part, start: int) -> None:
        known = self._parts.setdefault(role, part)
        if (known.allocation, known.mesh) != (part.allocation, part.mesh):
            self._scanner.fail(
                f"{'*' if role == OTHERS else role} has two layouts, '{known.allocation}' and "
                f"'{part.allocation}'; only one is allowed",
                start,
            )


def _shifted(scanner: Scanner, prefix: str) -> Allocation:
    """Read ``prefix`` and the dimensions; positions in errors do not count the prefix."""
    start = scanner.position
    end = _end_of_dimensions(scanner.text, start)
    inner = Scanner(prefix + _renamed(scanner.text[start:end]))
    try:
        allocation = single(inner)
    except AllocationError as error:
        position = start + max((error.position or 0) - len(prefix), 0)
        scanner.fail(error.reason, min(position, end))
    scanner.position = end
    return allocation


def _renamed(text: str) -> str:
    return re.sub(r"m(?=\s*[0-9])", "t", text)


def _end_of_dimensions(text: str, start: int) -> int:
    """Return the end of the dimensions at ``start``, which include a ``|`` between two halves."""
    halves = "attn" in text[start:].replace("(", "").lstrip()[:4]
    position = start
    while position < len(text):
        character = text[position]
        if character in "+,":
            break
        if character == "|":
            if not halves:
                break
            halves = False
        position += 1
    return position


def _trained(sizes: Mapping[str, int]) -> Allocation:
    full = dict.fromkeys(AXIS_OF.values(), 1) | dict(sizes)
    return Allocation("megatron" if full["pp"] > 1 or full["ep"] > 1 else "fsdp", sizes=full)


def _generating(allocation: Allocation) -> Allocation:
    """Return the layout on the engine ``native`` if that engine supports it, else unchanged."""
    if allocation.sizes["pp"] == allocation.sizes["cp"] == allocation.sizes["ep"] == 1:
        return Allocation("native", sizes=allocation.sizes)
    return allocation


def _unsplit(server: Allocation) -> Allocation:
    """Return a server's layout with tensor-parallel ranks in place of pipeline stages."""
    tp = server.sizes["tp"] * server.sizes["pp"]
    return replace(server, sizes={**server.sizes, "tp": tp, "pp": 1})


def _same_layout(rollout: Placed, actor: Placed) -> bool:
    """Return whether generation uses the actor's training layout."""
    if rollout.gpus != actor.gpus or BACKENDS[rollout.allocation.backend].serves:
        return False
    first, second = rollout.allocation, actor.allocation
    return (first.sizes, first.experts) == (second.sizes, second.experts)


def spelled(placed: Mapping[str, Placed]) -> Iterator[str]:
    """Yield the current settings of all roles, such as ``actor.backend: fsdp:d2``."""
    for role, place in placed.items():
        yield f"{role}.backend: {place.backend}"
        if place.gpus:
            yield f"{role}.gpus: {place.gpus}"


_PREFIX: Final = re.compile(r"[A-Za-z][A-Za-z_-]*")
_DIGITS: Final = re.compile(r"[0-9]+")
_GPUS: Final = re.compile(r"[0-9]+(\s*,\s*[0-9]+)*")


@dataclass(frozen=True)
class Mesh:
    """A set of GPUs: ``gpus`` of a single host, or all GPUs of ``hosts`` if ``gpus`` is empty."""

    hosts: tuple[str, ...]
    gpus: tuple[int, ...] = ()

    def numbers(self, hosts: Sequence[str], gpus_per_host: int) -> tuple[int, ...]:
        """Return the numbers of these GPUs in a trial. A trial numbers GPUs host by host."""
        own = self.gpus or tuple(range(gpus_per_host))
        starts = sorted(hosts.index(host) * gpus_per_host for host in self.hosts)
        return tuple(start + gpu for start in starts for gpu in own)


def mesh(scanner: Scanner, gpus_per_host: int) -> Mesh:
    """Parse a mesh, which may list 1, 2, 4, … consecutive GPUs of a single host."""
    scanner.skip_blanks()
    start = scanner.position
    hosts = _hosts(scanner)
    while scanner.take_if(","):
        hosts += _hosts(scanner)
    if len(set(hosts)) < len(hosts):
        scanner.fail("a host is listed twice", start)
    gpus: tuple[int, ...] = ()
    if scanner.character == ":" and _digit_follows(scanner):
        gpus = _gpus(scanner, hosts, gpus_per_host)
    return Mesh(tuple(hosts), gpus)


def _digit_follows(scanner: Scanner) -> bool:
    rest = scanner.text[scanner.position + 1 :].lstrip()
    return rest[:1].isdigit()


def _hosts(scanner: Scanner) -> list[str]:
    prefix = scanner.take(_PREFIX)
    if not prefix:
        scanner.fail("expected a host such as node01 or node[01-04,07]")
    if not scanner.take_if("["):
        return [f"{prefix}{_digits(scanner)}"]
    hosts = _range(scanner, prefix)
    while scanner.take_if(","):
        hosts += _range(scanner, prefix)
    scanner.expect("]", "',' or ']' after the numbers of hosts")
    return hosts


def _range(scanner: Scanner, prefix: str) -> list[str]:
    scanner.skip_blanks()
    start = scanner.position
    first = _digits(scanner)
    last = _digits(scanner) if scanner.take_if("-") else first
    if int(last) < int(first) or len(last) != len(first):
        scanner.fail(f"the range {first}-{last} must ascend, with equally many digits", start)
    return [f"{prefix}{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]


def _digits(scanner: Scanner) -> str:
    digits = scanner.take(_DIGITS)
    if not digits or len(digits) > 6:
        scanner.fail("expected the number of a host, such as 01")
    return digits


def _gpus(scanner: Scanner, hosts: list[str], gpus_per_host: int) -> tuple[int, ...]:
    scanner.take_if(":")
    scanner.skip_blanks()
    start = scanner.position
    numbers = tuple(map(int, scanner.take(_GPUS).split(",")))
    if len(hosts) > 1:
        scanner.fail("GPUs can be listed for a single host only; several hosts use all GPUs", start)
    neighbors = tuple(range(numbers[0], numbers[0] + len(numbers)))
    if numbers != neighbors or len(numbers) & (len(numbers) - 1):
        scanner.fail("list consecutive GPUs; their number must be a power of two", start)
    if numbers[-1] >= gpus_per_host:
        scanner.fail(f"a host has GPUs 0 to {gpus_per_host - 1}", start)
    return numbers

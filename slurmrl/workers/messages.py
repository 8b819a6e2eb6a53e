"""The messages between master, agents and workers, grouped by channel.

A message is a JSON object with a ``type``. `MessageSet` makes and checks messages. Readers ignore
unknown fields and reject unknown types, because the processes of an incarnation run the same code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Generic, TypeAlias, TypeVar

from slurmrl.config.schema import WHOLE
from slurmrl.data.ledger import StoredGroup
from slurmrl.fsio import documents
from slurmrl.fsio.calls import corrupt
from slurmrl.fsio.documents import COUNT, FILE_NAME, SECONDS, SIZE, FieldType, shown
from slurmrl.run.channel.message_log import Message
from slurmrl.run.channel.wakeups import WakeupAddress
from slurmrl.run.hang import RankProgress
from slurmrl.run.reports import Failure, Identity, Warned
from slurmrl.tensors.checkpoint.tensors import SavedFile
from slurmrl.tensors.weights.format import VERSION

REMEDY = "the processes of an incarnation must run the same version of slurmrl"
_NUMBERS = (int, float)
MEASURE = FieldType("a number", lambda value: isinstance(value, _NUMBERS))
"""Any number, including NaN and infinity, because a loss may have these values."""


def _are_items(value: Any) -> bool:
    """Return whether a value is a list of [epoch, index].

    This check is fast, because each worker checks thousands of items in each step.
    """
    pairs = isinstance(value, list) and all(type(item) is list for item in value)
    return pairs and all(len(item) == 2 and type(item[0]) is type(item[1]) is int for item in value)


ITEMS = FieldType("a list, each item [epoch, index]", _are_items)


# -- messages from the master to agents and workers, in the control log ----------------------


@dataclass(frozen=True, kw_only=True)
class Order:
    """A message that the master posts. All ranks execute these messages in the same order."""

    seq: Annotated[int, SIZE] = 0
    """Number of the message. `WorkerChannel.post` sets it."""


@dataclass(frozen=True, kw_only=True)
class LoadBatch(Order):
    step: int
    items: Annotated[tuple[tuple[int, int], ...], ITEMS]
    """Items as (epoch, index)."""
    evaluation: bool = False
    """Whether the items are for an evaluation."""
    suite: str = WHOLE
    """Suite of an evaluation."""
    candidates: bool = False
    """Whether these items only go through the calls up to the filter. The last `LoadBatch` of the
    step names the accepted items, which keep the results of these calls."""
    samples: tuple[StoredGroup, ...] = ()
    """File position of each item's samples, if rollout tasks made the completions."""


@dataclass(frozen=True, kw_only=True)
class RunCall(Order):
    """Execute one call of the dataflow graph."""

    step: int
    name: str
    scalars: Mapping[str, Annotated[float, MEASURE]]
    evaluation: bool = False
    suite: str = WHOLE
    part: str = ""
    """Prefix of the names of part files in which the ranks record the call's results."""


@dataclass(frozen=True, kw_only=True)
class Save(Order):
    """Write this rank's part of a checkpoint."""

    step: int
    directory: Annotated[str, FILE_NAME]
    """Name of the checkpoint's directory in ``checkpoints/``."""
    asynchronous: bool = False


@dataclass(frozen=True, kw_only=True)
class WriteVersion(Order):
    """Write this rank's part of a weight version, with the current weights."""

    step: int
    version: Annotated[str, VERSION]
    base: Annotated[str, VERSION] | None = None
    """Base version of the deltas: the version of the previous `WriteVersion`. None for a full
    version."""


@dataclass(frozen=True, kw_only=True)
class Exit(Order):
    """End the incarnation normally."""


@dataclass(frozen=True, kw_only=True)
class Over(Order):
    """End the incarnation because of a failure. This message has no number."""

    stacks: str = ""
    """Reason for which agents collect the stacks of their processes before they kill the processes.
    Empty if agents collect no stacks."""


@dataclass(frozen=True, kw_only=True)
class CollectStacks(Order):
    """Collect the stacks that a user requested."""

    number: Annotated[int, COUNT]
    """Number of the request, from 1."""
    ranks: tuple[Annotated[int, COUNT], ...] | None = None
    """Ranks whose stacks are wanted; None for all ranks and the master."""


@dataclass(frozen=True, kw_only=True)
class WakeMaster(Order):
    """Send wake-ups for new messages to this address of the master. This message has no number."""

    wakeups: WakeupAddress


# -- messages from workers to the master, through the agent's log ----------------------------


@dataclass(frozen=True, kw_only=True)
class Preparing:
    """A worker is tokenizing a dataset, so the start takes longer."""

    rank: Annotated[int, COUNT]


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Size of the dataset of an evaluation."""

    suite: str = WHOLE
    size: Annotated[int, SIZE]
    left_out: Annotated[int, SIZE] = 0
    """Number of rows that were dropped as too long."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A worker has loaded its models and data. All ranks report the same data and tokens."""

    rank: Annotated[int, COUNT]
    size: Annotated[int, SIZE]
    fingerprint: str
    left_out: Annotated[int, SIZE] = 0
    """Number of rows that were dropped as too long."""
    held_out: tuple[HeldOut, ...] = ()
    """The datasets of `Config.evaluations`."""
    stop_tokens: tuple[tuple[int, str], ...] = ()
    """Ids and strings of the tokens that end a completion."""
    directories: tuple[str, ...] = ()
    """Names of the directories of the prepared rows, one for each source."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """A worker has executed an order."""

    rank: Annotated[int, COUNT]
    seq: Annotated[int, SIZE]
    """The number of the order."""
    seconds: Annotated[float, SECONDS]
    began: Annotated[float, SECONDS] = 0.0
    """Start of the call by the host's clock, in seconds since 1970."""
    peak_bytes: Annotated[int, SIZE] = 0
    """Maximum memory used so far: by tensors on the GPU, or by the process without a GPU."""
    tokens: Annotated[int, SIZE] = 0
    stats: Mapping[str, tuple[Annotated[float, MEASURE], Annotated[float, MEASURE]]] = field(
        default_factory=dict
    )
    """(sum, count) of each metric."""
    texts: tuple[Mapping[str, Any], ...] = ()
    """Rows of the samples table."""
    notes: tuple[Mapping[str, Any], ...] = ()
    """Additional fields of rows in `texts`, which ``id`` and ``index`` identify."""
    dropped: Mapping[str, tuple[Annotated[int, SIZE], ...]] = field(default_factory=dict)
    """Batch positions of the items that a filter drops, by reason."""
    scored: bool = False
    """Whether the rank has written evaluation scores of its items to its part file."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A worker has written its files of a `Save` or a `WriteVersion` to disk.

    The `Done` of an asynchronous `Save` or a `WriteVersion` arrives earlier.
    """

    rank: Annotated[int, COUNT]
    seq: Annotated[int, SIZE]
    """The number of the order."""
    files: tuple[SavedFile, ...] = ()
    """Files of a checkpoint. Empty for a weight version, whose parts have an index on disk."""
    error: str = ""
    """Reason why the worker could not write the files; empty after a success."""


Answer: TypeAlias = Preparing | Ready | Done | Saved


# -- messages from agents to the master, in the agent's log ----------------------------------


@dataclass(frozen=True, kw_only=True)
class Hello:
    agent: Identity
    wakeups: WakeupAddress | None = None
    """The agent's address for wake-ups."""


@dataclass(frozen=True, kw_only=True)
class Stacked:
    """An agent has written the stacks of its processes."""

    group: str
    task: Annotated[int, COUNT]
    number: Annotated[int, COUNT]
    """Number of the user's request; 0 after a hang."""
    file: str
    """Path of the stacks, relative to the run directory."""
    ranks: tuple[RankProgress, ...]
    """Activity of the ranks on the agent's host."""


FromAgent: TypeAlias = Answer | Hello | Warned | Failure | Stacked


# -- messages within a host, through pipes ---------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Start:
    """Join the process group and load the models: the agent's first message to a worker."""

    world_size: Annotated[int, COUNT]
    interface: str | None = None
    """Network interface for traffic between ranks, if the user's environment names none."""
    base: Annotated[str, FILE_NAME] | None = None
    """Directory name of the commit to load; None for the initial weights."""
    incarnation: Annotated[int, COUNT] = 0
    exclusive: bool = False
    """Whether the scheduler gives each GPU to only one job."""
    submission: Annotated[int, COUNT] = 0
    """Number of the submission whose code and settings this worker uses."""


@dataclass(frozen=True, kw_only=True)
class StartRollout(Start):
    """`Start` for the worker of a rollout task.

    The worker outlives incarnations, so the message does not name an incarnation or a commit.
    """

    agent: Identity
    """The attempt whose requests the worker handles."""


@dataclass(frozen=True, kw_only=True)
class Serve:
    """From now on, handle the requests of a new incarnation."""

    incarnation: Annotated[int, COUNT]


@dataclass(frozen=True, kw_only=True)
class Retire:
    """Take no more requests, finish as many items as possible, return the other items and exit.

    The agent kills a worker that needs more than ``within_s`` seconds.
    """

    reason: str
    within_s: Annotated[float, SECONDS]


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """A sign of life of a worker or the master."""

    doing: RankProgress | None = None
    """Activity of the worker; None for the master."""


@dataclass(frozen=True, kw_only=True)
class Fork:
    """Fork the worker of a rank. The message carries descriptors of a pipe and a stacks file."""

    rank: Annotated[int, COUNT]
    environment: Mapping[str, str]
    """Variables that differ from rank to rank."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Kill the worker of a rank."""

    rank: Annotated[int, COUNT]


@dataclass(frozen=True, kw_only=True)
class WriteStacks:
    """Signal the worker of a rank to write its stacks."""

    rank: Annotated[int, COUNT]


@dataclass(frozen=True, kw_only=True)
class WorkerEnded:
    rank: Annotated[int, COUNT]
    code: int
    """Exit code, negative for a signal."""


@dataclass(frozen=True)
class ImportFailed:
    """The fork server exits, because it cannot import the modules that its workers need."""

    reason: str


# -- messages as JSON ------------------------------------------------------------------------

M = TypeVar("M", bound=documents.Dataclass)


class MessageSet(Generic[M]):
    """The messages that a channel may carry."""

    def __init__(self, channel: str, kinds: Mapping[str, type[M]]) -> None:
        self._channel = channel
        self._kinds = kinds
        self._types = {kind: name for name, kind in kinds.items()}

    def type_of(self, message: M) -> str:
        return self._types[type(message)]

    def to_json(self, message: M) -> Message:
        return {"type": self.type_of(message), **documents.to_json(message)}

    def from_json(self, values: Message) -> M:
        """Parse a message. Raises CorruptFileError."""
        name = values.get("type")
        kind = self._kinds.get(name) if isinstance(name, str) else None
        if kind is None:
            known = ", ".join(self._kinds)
            problem = f"has {shown(name)} in 'type', expected one of {known}"
            raise corrupt(self._channel, problem, REMEDY)
        return documents.from_json(kind, values, self._channel, remedy=REMEDY)


_WORK: Final[Mapping[str, type[Order]]] = {
    "load": LoadBatch,
    "call": RunCall,
    "save": Save,
    "version": WriteVersion,
    "exit": Exit,
}
_ANSWERS: Final[Mapping[str, type[Answer]]] = {
    "preparing": Preparing,
    "ready": Ready,
    "done": Done,
    "saved": Saved,
}

CONTROL_LOG: Final = MessageSet[Order](
    "the control log", {**_WORK, "over": Over, "stacks": CollectStacks, "wakeups": WakeMaster}
)
AGENT_LOG: Final = MessageSet[FromAgent](
    "the log of an agent",
    {**_ANSWERS, "hello": Hello, "warning": Warned, "failed": Failure, "stacked": Stacked},
)
TO_WORKER: Final = MessageSet[Start | Order]("the pipe to a worker", {"start": Start, **_WORK})
TO_ROLLOUT_WORKER: Final = MessageSet[StartRollout | Serve | Retire](
    "the pipe to a rollout task's worker", {"start": StartRollout, "serve": Serve, "retire": Retire}
)
FROM_WORKER: Final = MessageSet[Answer | Failure | Pulse](
    "the pipe from a worker", {**_ANSWERS, "error": Failure, "pulse": Pulse}
)
TO_FORK_SERVER: Final = MessageSet[Fork | Kill | WriteStacks](
    "the pipe to a fork server", {"fork": Fork, "kill": Kill, "stacks": WriteStacks}
)
FROM_FORK_SERVER: Final = MessageSet[WorkerEnded | ImportFailed](
    "the pipe from a fork server", {"ended": WorkerEnded, "import_failed": ImportFailed}
)

"""One incarnation on one host: fork workers, start the master, form the world, relay messages.

Every wait calls `turn`, which also renews the lease, receives the children's messages and detects
children that have ended or hang. Therefore the agent misses no event on its host while it waits.

The master acts only when it has the answers of all ranks. To save file operations, the agent holds
answers back until all workers of its host have answered. The agent then sends all answers in one
write.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from slurmrl import log
from slurmrl.backoff import Backoff, retry
from slurmrl.errors import (
    CorruptFileError,
    EnvironmentFailure,
    NameExistsError,
    SlurmrlError,
    StaleIncarnationError,
    WaitTimeoutError,
)
from slurmrl.fsio import documents
from slurmrl.run import keys
from slurmrl.run.channel import wakeups
from slurmrl.run.channel.follower import Follower
from slurmrl.run.channel.message_log import LogReader, LogWriter
from slurmrl.run.history.state import TrialState
from slurmrl.run.reports import HANGS, MASTER, Cause, Failure
from slurmrl.workers.agent.agent_host import Host
from slurmrl.workers.agent.loss_detection import Symptoms
from slurmrl.workers.agent.witness import Witness
from slurmrl.workers.failure import COLLECT_S, publish, publish_hang
from slurmrl.workers.messages import (
    AGENT_LOG,
    CONTROL_LOG,
    Answer,
    CollectStacks,
    Done,
    Exit,
    FromAgent,
    Hello,
    Order,
    Over,
    Preparing,
    Ready,
    Start,
    WakeMaster,
)

logger = log.get(__name__)
T = TypeVar("T")

FORM_TIMEOUT_S = 600.0
"""Maximum wait for the incarnation to begin."""
LATE_BEGIN_S = 30.0
"""Maximum wait for the incarnation to begin after this host has failed."""
EXIT_TIMEOUT_S = 60.0
"""Maximum wait for processes to exit after ``exit``."""
MASTER_GRACE_S = 3.0
"""Seconds that a master may take to post ``over`` to the other hosts."""
OVER_S = 5.0
"""Seconds for which a host with a hung rank keeps its ranks. In this time, the master requests the
stacks of other hosts. If the ranks were killed earlier, other ranks would fail first."""
LOOK_S = 0.1
"""Interval of polls in short waits."""
EXPLAIN_S = COLLECT_S + MASTER_GRACE_S
"""Seconds that a master may take to collect the stacks of all hosts and publish the explanation."""
HOLD_S = 1.0
"""Maximum time for which an answer waits for the answers of slower workers. Then the agent sends
the answers so far. `slurmrl status` and messages about deadlines show these answers."""


class Incarnation:
    """The next incarnation on ``host``, whose number is greater than ``after``."""

    def __init__(self, host: Host, after: int) -> None:
        self.host = host
        self.after = after
        self.number = 0
        """Number of the incarnation; 0 until it has begun."""
        self.replies: Replies | None = None
        self._passed_on: int | None = None
        """Number of the last order that was forwarded to the workers."""
        self._nonce = uuid.uuid4().hex
        self._symptoms = Symptoms(
            host.identity.host,
            host.children,
            host.oom,
            host.cluster.silence_s,
            output=host.outputs[0].newest_after_now(),
        )
        self._master_log: Follower | None = None
        self._witness = Witness(host)
        self._explained = False
        """Whether this agent has reported stacks to the master, which then explains the hang."""

    def run(self) -> None:
        """Serve the incarnation until the master posts ``exit``.

        Raises StaleIncarnationError if the incarnation ended because of other hosts, and
        TrialEndedError. Raises other SlurmrlErrors for failures on this host (see `fail`).
        """
        self._start()
        state = self.wait("the master to begin", self._begun, FORM_TIMEOUT_S)
        self._join(state.incarnation)
        self._form(state)
        self._relay()

    # -- forming -----------------------------------------------------------------------------

    def _start(self) -> None:
        host = self.host
        devices = host.devices()
        if host.leads:
            with self.retry("open a log", lambda: host.open_log(MASTER)) as output:
                host.children.start_master(host.submission, output)
        with self.retry("open a log", lambda: host.open_log(host.group.name)) as output:
            host.children.start_workers(devices, output)

    def _begun(self) -> TrialState | None:
        return self.host.begun(self.after)

    def _join(self, number: int) -> None:
        """Join incarnation ``number``. From now on, a newer incarnation ends this incarnation."""
        self.number = self.host.serving = number
        logger.info("this host joins incarnation %d", number)
        gpus = {"gpus": self.host.devices()} if self.host.group.gpus_per_worker else {}
        self.host.events.write("join", incarnation=number, **gpus)
        self.retry("make a log", self._open_replies)

    def _open_replies(self) -> None:
        host, paths, identity = self.host, self.host.paths, self.host.identity
        path = paths.agent_log(self.number, identity.group, identity.task)
        writer = LogWriter(path, nonce=self._nonce)
        socket = wakeups.open_wakeups(paths.control, host.cluster.interface, host.group.hosts)
        self.replies = Replies(writer, host.group.workers_per_host, socket)
        self.send(Hello(agent=identity, wakeups=None if socket is None else socket.address))

    def _form(self, state: TrialState) -> None:
        """Send each worker the network interface and the commit to load."""
        host = self.host
        own = wakeups.fabric_address(host.cluster.interface, host.group.hosts_of_job)
        start = Start(
            world_size=host.group.world_size,
            interface=wakeups.interface_of(own),
            base=state.base,
            incarnation=self.number,
            exclusive=host.deals_gpus,
            submission=host.submission,
        )
        for slot in host.children.slots:
            slot.send(start)

    # -- relaying ----------------------------------------------------------------------------

    def _relay(self) -> None:
        """Relay the master's messages to the workers until ``exit``.

        Relay no message while this host's lease may have expired.
        """
        host, replies = self.host, self.replies
        assert replies is not None
        master = self._master_log = Follower(
            [LogReader(host.paths.master_log(self.number))],
            host.paths.control,
            longest_poll_s=host.intervals.poll_s,
            wakeups=replies.socket,
        )
        host.children.wake_on(master)
        waiting: deque[Order] = deque()
        while True:
            for order in map(CONTROL_LOG.from_json, master.read_due()):
                match order:
                    case Over():
                        if order.stacks:
                            self._send_stacks(order.stacks)
                        raise StaleIncarnationError(f"the master ended incarnation {self.number}")
                    case CollectStacks():
                        self._answer(order)
                    case WakeMaster():
                        replies.wake_at(order.wakeups)
                        master.listen_for(order.wakeups.source, 0)
                    case _:
                        waiting.append(order)
            while waiting and host.lease_guard.may_start():
                order = waiting.popleft()
                host.children.broadcast(order)
                self._passed_on = order.seq
                if isinstance(order, Exit):
                    self._let_exit()
                    return
            self._turn_until_news(master, may_stop=bool(waiting))

    def _turn_until_news(self, master: Follower, *, may_stop: bool) -> None:
        """Call `turn` until the master's log must be read again; with ``may_stop``, only once."""
        while True:
            self.turn(min(master.pause_s(), self.host.intervals.beat_s))
            if may_stop or master.woken or master.pause_s() <= 0:
                return

    def _answer(self, request: CollectStacks) -> None:
        """Collect the stacks that a user requested. The ranks continue."""
        why = f"requested (request {request.number})"
        if request.ranks is None or set(request.ranks) & set(self.host.children.ranks):
            self.send(
                self._witness.take(self.number, request.number, why, self.turn, request.ranks)
            )

    def _let_exit(self) -> None:
        """Wait until all processes have exited. Kill slow processes, because all work is done."""
        self._symptoms.told_to_exit = True
        try:
            ended = self.host.children.all_ended
            self.wait("its processes to exit", lambda: ended() or None, EXIT_TIMEOUT_S)
        except WaitTimeoutError as error:
            logger.warning("%s; this agent kills them", error)

    # -- one turn of the loop ----------------------------------------------------------------

    def wait(self, what: str, poll: Callable[[], T | None], timeout_s: float) -> T:
        """Call ``poll`` until it returns a value. Raises WaitTimeoutError after ``timeout_s``.

        Time during which the directory does not answer does not count towards ``timeout_s``.
        """
        host = self.host
        backoff = Backoff(last_s=min(host.intervals.poll_s, host.intervals.beat_s))
        waited_s = 0.0
        while (value := self.retry(f"wait for {what}", poll)) is None:
            if waited_s > timeout_s:
                raise WaitTimeoutError(
                    f"{host.identity.label} on {host.identity.host} waited {timeout_s:.0f} s "
                    f"for {what}"
                )
            began = time.monotonic()
            self.turn(backoff.next_s())
            waited_s += time.monotonic() - began
        return value

    def retry(self, what: str, action: Callable[[], T]) -> T:
        """Run an action on the shared directory. Retry while the directory does not answer."""
        return retry(what, action, self.turn)

    def turn(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` for an event of a child; renew the lease when due."""
        self.host.presence.check()
        self.host.lease_guard.turn()
        self.host.leader.look()
        for output in self.host.outputs:
            output.look()
        held_s = self.replies.answers.wait_s() if self.replies is not None else math.inf
        news = self.host.children.turn(min(timeout_s, self._symptoms.longest_turn_s, held_s))
        self._send_warning()
        if self.replies is not None:
            answers = self.replies.answers.take(news.received)
            self.replies.send(*answers)
            done = any(isinstance(a, Done) and a.seq == self._passed_on for a in answers)
            if done and self._master_log is not None:  # The master will soon post the next step.
                self._master_log.expect_news()
        self._symptoms.evaluate(news)

    def _send_warning(self) -> None:
        """Report a warning to the master and in the name store, if the incarnation has begun."""
        if self.replies is None or (warned := self.host.warnings.take()) is None:
            return
        known = documents.to_json(warned)
        self.send(warned)
        self.host.events.write("warned", **known)
        # Another agent may have published its warning first.
        with contextlib.suppress(NameExistsError, EnvironmentFailure):
            self.host.names.add(keys.warned(self.number), json.dumps(known))

    def send(self, *news: FromAgent) -> None:
        """Send messages to the master, if the incarnation has begun."""
        if self.replies is not None:
            self.replies.send(*news)

    # -- end of the incarnation --------------------------------------------------------------

    def fail(self, error: SlurmrlError) -> Failure:
        """Publish a failure of this host, if it is the first, and send it to the master.

        The master then ends the incarnation on the other hosts, too.
        """
        host, failure = self.host, self.host.describe(error)
        if failure.cause != Cause.LOST_HOST:  # The lost host may be the master's: do not wait.
            self._await_begin()
        self._send_warning()
        if self.number == 0 or publish(host.names, self.number, failure):
            host.write_failure(self.number, failure)
        self._send_failure(failure)
        if failure.cause in HANGS and self.number:
            self._explain(failure)
        return failure

    def _send_failure(self, failure: Failure) -> None:
        held = self.replies.answers.release() if self.replies is not None else []
        self.send(*held, failure)

    def _explain(self, failure: Failure) -> None:
        """After a hang, save the stacks of all hosts, or only of this host if the master hangs."""
        if failure.cause == Cause.HUNG and failure.rank is None:  # The master hangs.
            taken = self._witness.take(self.number, 0, failure.reason, self.host.idle)
            publish_hang(self.host.names, self.host.events, self.number, taken.ranks, [taken.file])
            return
        deadline = time.monotonic() + OVER_S
        while self._master_log is not None and time.monotonic() < deadline:
            orders = map(CONTROL_LOG.from_json, self._master_log.read())
            if any(isinstance(order, Over) for order in orders):
                break
            self.host.idle(LOOK_S)
        self._send_stacks(failure.reason)

    def _send_stacks(self, why: str) -> None:
        self.send(self._witness.take(self.number, 0, why, self.host.idle))
        self._explained = True

    def _await_begin(self) -> None:
        """Wait until the master has begun this incarnation, even though this host has failed.

        Only failures of incarnations in the history count towards the limit on restarts.
        """
        children = self.host.children
        backoff = Backoff()
        deadline = time.monotonic() + LATE_BEGIN_S
        try:
            while self.number == 0 and time.monotonic() < deadline:
                gone = self.host.leads and not children.master_runs
                if (state := self._begun()) is not None:
                    self.number = state.incarnation
                    self._open_replies()
                elif gone:
                    return
                children.turn(backoff.next_s())
        except (SlurmrlError, FileExistsError) as error:
            logger.info("%s", error)

    def close(self) -> None:
        """End the processes of the incarnation on this host.

        If there are other hosts, the master gets time to post ``over``.
        """
        host = self.host
        host.serving = 0
        deadline = time.monotonic() + EXPLAIN_S
        while self._explained and host.children.master_runs and time.monotonic() < deadline:
            self.send()  # Retry messages whose write failed.
            host.idle(LOOK_S)
        alone = len(host.plan.groups) == 1 and host.group.hosts == 1
        host.children.end(grace_s=0.0 if alone else MASTER_GRACE_S, meanwhile=host.renew_lease)
        if self._master_log is not None:
            host.children.sleep_on(self._master_log)
            self._master_log.close()
        if self.replies is not None:
            self.replies.close()


class Answers:
    """Holds answers back until all ``workers`` have answered the same message."""

    def __init__(self, workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._workers = workers
        self._clock = clock
        self._held: list[Answer] = []
        self._given: Counter[tuple[type[Answer], int]] = Counter()
        """Number of workers that have answered, by type of answer and number of the message."""
        self._until = math.inf

    def take(self, received: Sequence[Answer]) -> list[Answer]:
        """Add answers; return all held answers if it is time to send them."""
        if received and not self._held:
            self._until = self._clock() + HOLD_S
        self._held += received
        complete = [self._completes(answer) for answer in received]
        return self.release() if any(complete) or self.wait_s() <= 0 else []

    def release(self) -> list[Answer]:
        """Return and forget the held answers."""
        held, self._held, self._until = self._held, [], math.inf
        return held

    def wait_s(self) -> float:
        """Return the seconds after which `take` returns the held answers, complete or not."""
        return max(self._until - self._clock(), 0.0)

    def _completes(self, answer: Answer) -> bool:
        if isinstance(answer, Preparing):
            return True
        given = type(answer), 0 if isinstance(answer, Ready) else answer.seq
        self._given[given] += 1
        if self._given[given] < self._workers:
            return False
        del self._given[given]
        return True


class Replies:
    """Writer of the agent's log in one incarnation. Each write also sends the master a wake-up."""

    def __init__(
        self, writer: LogWriter, workers: int, socket: wakeups.WakeupSocket | None = None
    ) -> None:
        self.answers = Answers(workers)
        self.socket = socket
        self._writer = writer
        self._unsent = False
        """Whether the writer has messages that the directory has not accepted yet."""
        self._master: wakeups.WakeupAddress | None = None

    def send(self, *news: FromAgent) -> None:
        """Send messages, after earlier messages that the directory has not accepted."""
        if not (news or self._unsent):
            return
        self._unsent = True
        try:
            self._writer.append(*map(AGENT_LOG.to_json, news))
        except (EnvironmentFailure, CorruptFileError) as error:  # The master reports damage itself.
            logger.warning("cannot send to the master, will retry: %s", error)
            return
        self._unsent = False
        if self.socket is not None and self._master is not None:
            self.socket.wake([self._master])

    def wake_at(self, address: wakeups.WakeupAddress) -> None:
        """Send the master wake-ups at this address from now on."""
        self._master = address

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()

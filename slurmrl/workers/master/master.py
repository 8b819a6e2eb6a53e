"""The master's loop: begin an incarnation, run steps, commit, and end.

begin ── restore ── wait for ranks ──► step ──► evaluate? ──► record ──► commit? ──┐
                                        ▲                                          │
                                        └──────────────────────────────────────────┘
                                                    until finished or warned
"""

from __future__ import annotations

import json
import time
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from slurmrl import log
from slurmrl.backoff import READ_S, Backoff, retry
from slurmrl.config.schema import Config
from slurmrl.data.chat import template_file
from slurmrl.errors import CheckpointError, EnvironmentFailure
from slurmrl.fsio import documents
from slurmrl.name_resolve.store import NameStore
from slurmrl.plan.dataflow import OWN_PACKAGE, Method
from slurmrl.plan.model import Plan
from slurmrl.registry import near
from slurmrl.run.channel.wakeups import open_wakeups
from slurmrl.run.events import EventWriter
from slurmrl.run.history.slots import Kind
from slurmrl.run.history.state import IncarnationWriter, TrialState
from slurmrl.run.paths import RunPaths
from slurmrl.run.samples import KeptSampleWriter
from slurmrl.watch.sinks import MetricsRecorder
from slurmrl.workers.master import publish
from slurmrl.workers.master.committer import Committer, Outcome
from slurmrl.workers.master.exporting import export_actor
from slurmrl.workers.master.progress import Progress
from slurmrl.workers.master.publish import StatusPublisher, Timeline
from slurmrl.workers.master.results import EvaluationScores, Results, UnscoredSteps
from slurmrl.workers.master.rollout_tasks import RolloutTasks
from slurmrl.workers.master.steps import StepRunner
from slurmrl.workers.master.version_publisher import Publication, VersionPublisher
from slurmrl.workers.master.worker_channel import AgentRegistry, StackRequests, WorkerChannel
from slurmrl.workers.messages import Exit, Ready
from slurmrl.workers.polling import PollIntervals

logger = log.get(__name__)
T = TypeVar("T")

LOOKS_PER_TTL = 4
"""Number of checks, per TTL of a lease, for agents that have not sent `Hello`."""
PUBLISH_AGAIN_S = (2.0, 300.0)
"""Minimum and maximum pause before the master publishes a missing weight version again."""
SINKS_S = 60.0
"""Seconds for which the master waits for slow sinks at the end of a trial."""
REST_S = 0.05
LAST_RETRY_S = (2.0, 60.0)
"""Minimum and maximum pause before the master retries the last commit."""


class Master:
    """Runs one incarnation of a trial."""

    def __init__(
        self,
        paths: RunPaths,
        config: Config,
        plan: Plan,
        names: NameStore,
        writer: IncarnationWriter,
        state: TrialState,
        progress: Progress,
        recorder: MetricsRecorder,
        results: Results,
        scores: EvaluationScores,
        rollouts: RolloutTasks | None = None,
    ) -> None:
        self.rollouts = rollouts
        self.paths = paths
        self.config = config
        self.plan = plan
        self.writer = writer
        self.events = EventWriter(paths, f"master.{writer.incarnation}")
        intervals = PollIntervals.of(plan.hosts, config.cluster.heartbeat_s)
        self.channel = WorkerChannel(
            paths,
            plan,
            writer.incarnation,
            self._while_waiting,
            longest_poll_s=intervals.poll_s,
            wakeups=open_wakeups(paths.control, config.cluster.interface, plan.trainers.hosts),
            wakers=rollouts.wakeups.descriptors if rollouts is not None else (),
        )
        self.agents = AgentRegistry(
            names,
            plan,
            ChainMap(self.channel.mailbox.agents, rollouts.agents if rollouts is not None else {}),
            incarnation=writer.incarnation,
            job=str(state.begin_data.get("job")),
            look_s=config.cluster.lease_ttl_s / LOOKS_PER_TTL,
        )
        self.status = StatusPublisher(
            names,
            paths,
            self.agents,
            incarnation=writer.incarnation,
            total_steps=progress.known_steps,
            lease_ttl_s=config.cluster.lease_ttl_s,
            interval_s=intervals.status_s,
        )
        self.requests = StackRequests(
            names, writer.incarnation, self.channel.post, look_s=intervals.status_s
        )
        self.committer = Committer(
            paths,
            writer,
            self.channel,
            state.commits,
            config.checkpoint,
            config.step_timeout_s,
            recorder.sync,
        )
        self.versions = self._publisher()
        self.progress = progress
        self.scores = scores
        self.steps = self._step_runner()
        self.timeline = Timeline(paths.timeline)
        self.results = results
        self.recorder = recorder
        self.unscored = UnscoredSteps()
        self.fresh = state.last_commit is None
        self.samples = KeptSampleWriter(paths.samples, writer.incarnation, state.last_step + 1)
        self.rows_left_out = 0
        """Number of rows of the training data that were dropped because they are too long."""
        self._told_unknown = self._saw_metric = False
        self._publish_pauses = Backoff(*PUBLISH_AGAIN_S)
        self._publish_at = 0.0
        """Monotonic time from which on the master may publish a missing version again."""
        self._stall_s: float | None = None
        """Seconds of stall by checkpoints since the last metrics line; None without checkpoints."""

    def _publisher(self) -> VersionPublisher | None:
        settings = self.config.rollout.publish
        if settings is None:
            return None
        return VersionPublisher(
            self.paths.versions,
            self.channel,
            settings,
            self.plan.models["actor"].ranks,
            self.writer.incarnation,
            self.config.step_timeout_s,
            self.writer.check,
        )

    def _step_runner(self) -> StepRunner:
        return StepRunner(
            self.channel,
            self.plan,
            self.progress,
            self.scores,
            self.config.step_timeout_s,
            self.writer.incarnation,
            self.rollouts,
            self._publish_again,
        )

    # -- the whole run -----------------------------------------------------------------------

    def run(self) -> None:
        """Train until the trial is finished or the job will end; then let the ranks exit."""
        began = time.monotonic()
        self._wait_for_ranks()
        seconds = round(time.monotonic() - began, 3)
        self.events.write("ready", step=self.progress.step, seconds=seconds)
        self._retry("begin the samples", self.samples.begin)
        self._publish()
        if self.fresh:
            self._start()
        while not self.channel.warned and self.progress.finish_reason() is None:
            self._step()
        self._commit_last()
        if self.versions is not None:
            self._tell_version(self.versions.wait())
        reason = self.progress.finish_reason()
        if reason is not None:
            self._let_sinks_catch_up()
            self._finish(reason)
        else:
            logger.info("stopping at step %d, because the job will end", self.progress.step)
            self.events.write("stopped", step=self.progress.step)
        self.channel.post(Exit())
        self.recorder.close()

    def _while_waiting(self) -> None:
        self.agents.look()
        rollouts = self.rollouts
        self.status.tick(self.channel.waiting, rollouts.view if rollouts is not None else None)
        dead = self.status.dead()
        self.agents.report_lost(dead)
        if rollouts is not None:
            rollouts.look(dead, self.progress.step)
            if self.versions is not None and rollouts.unreadable:
                self.versions.distrust(rollouts.unreadable)
                rollouts.unreadable.clear()
        self.requests.look()
        self._tell(self.committer.poll())
        if self.versions is not None:
            self._tell_version(self.versions.poll())

    def _wait_for_ranks(self) -> None:
        ready = self.channel.wait_ready(self.config.cluster.start_timeout_s)
        held_out = {own.suite: own.size for own in ready[0].held_out}
        seen = {
            (answer.size, answer.fingerprint, *(own.size for own in answer.held_out))
            for answer in ready.values()
        }
        if len(seen) > 1:
            raise CheckpointError(f"the ranks see different datasets: {sorted(seen)}")
        directories = [self.paths.data / name for name in ready[0].directories]
        size, fingerprint = ready[0].size, ready[0].fingerprint
        use = partial(self.progress.use_dataset, size, fingerprint, held_out, directories)
        retry("read the order of the dataset", use, timeout_s=READ_S)
        template = partial(template_file, self.config.dataset)
        self.progress.use_template(retry("read the chat template", template, timeout_s=READ_S))
        self._use_stop_tokens({answer.stop_tokens for answer in ready.values()})
        if self.rollouts is not None:
            self.rollouts.start(self.progress.items, self.progress.stop_token_ids)
        self.status.update(total_steps=self.progress.total_steps)
        self._tell_left_out(ready[0])

    def _tell_left_out(self, ready: Ready) -> None:
        """Report rows that are longer than the configuration allows."""
        self.rows_left_out = ready.left_out
        found = [(self.config.dataset, ready.left_out, ready.size)]
        evaluations = self.config.evaluations
        found += [
            (evaluations[rows.suite].held_out, rows.left_out, rows.size) for rows in ready.held_out
        ]
        for dataset, left, size in found:
            if left:
                where, total = dataset.title, size + left
                logger.warning(
                    "%d of %d lines of %s are too long and were dropped", left, total, where
                )
                self.events.write("left_out", file=where, rows=left, of=total)

    def _tell_unknown_metric(self, line: dict[str, Any]) -> None:
        """Warn once if ``stop_when`` names a metric that the line lacks."""
        condition = self.progress.stop_when
        self._saw_metric |= condition is not None and condition.metric in line
        if condition is None or self._saw_metric or self._told_unknown:
            return
        evaluated = any(name.startswith("eval/") for name in line)
        if evaluated if condition.metric.startswith("eval/") else line["step"] > 0:
            self._told_unknown = True
            hint = near(condition.metric, sorted(line))
            logger.warning("stop_when: this step has no '%s'; %s", condition.metric, hint)
            self.events.write("no_such_metric", condition=str(condition))

    def _use_stop_tokens(self, seen: set[tuple[tuple[int, str], ...]]) -> None:
        """Set the stop tokens. ``seen`` contains the ids and strings that ranks have reported."""
        if len(seen) > 1:
            raise CheckpointError(f"the ranks see different stop tokens: {sorted(seen)}")
        tokens = seen.pop()
        generates = any(call.method == Method.GENERATE for call in self.plan.all_calls)
        names = [call.interface for call in self.plan.all_calls]  # User code may use the tokens.
        used = any("reward_model" in name or not name.startswith(OWN_PACKAGE) for name in names)
        self.progress.use_stop_tokens([token for token, _ in tokens], check=generates or used)
        if generates:
            named = ", ".join(f"{text!r} ({token})" for token, text in tokens)
            logger.info("a completion ends with one of these tokens: %s", named)

    def _start(self) -> None:
        """Evaluate the initial model before the first step."""
        evaluation = self.config.evaluation
        if evaluation is not None and evaluation.tasks is None and evaluation.at_start:
            self._record(self._evaluate(self.progress.step))

    def _step(self) -> None:
        began = time.monotonic()
        self._tell(self.committer.poll())
        step = self.progress.step + 1
        scalars = self.progress.scalars()
        executed = self.steps.train(step)
        if executed is None:
            return
        metrics = executed.metrics
        self._publish_pauses.reset()
        self.progress.advance(metrics)
        if self.versions is not None and self.versions.is_due(step):
            self._publish()
        self.results.finish_step()
        metrics.update(self._retry("read the recorded results", self.results.metrics))
        self._write_samples(step, executed.texts)
        self.timeline.add(step, executed.answered)
        if self.progress.evaluation_due():
            metrics.update(self._evaluate(step))
        self._record({**scalars, **metrics, "time/total": time.monotonic() - began})
        self.unscored.add(metrics)
        if self.progress.commit_due():
            self._checkpoint(asynchronous=self.config.checkpoint.asynchronous)

    # -- parts of a step ---------------------------------------------------------------------

    def _record(self, metrics: dict[str, Any]) -> None:
        step = self.progress.step
        line = {"step": step, "epoch": self.progress.epoch, **metrics}
        if self.rows_left_out:
            line["rows_left_out"] = self.rows_left_out
        self._tell_unknown_metric(line)
        if self._stall_s is not None:
            line["time/checkpoint_stall"], self._stall_s = self._stall_s, None
        self.progress.metrics = line
        self._retry("write the metrics", partial(self.recorder.write, line))
        self.status.update(step=step, metrics=line, phase="running")
        if self.progress.log_due():
            shown = {
                name: round(value, 4) if isinstance(value, float) else value
                for name, value in line.items()
                if not name.startswith("time/")
            }
            logger.info("%s", json.dumps(shown))

    def _evaluate(self, step: int) -> dict[str, Any]:
        executed = self.steps.evaluate(step)
        self._write_samples(step, executed.texts, evaluation=True)
        return executed.metrics

    def _write_samples(
        self, step: int, rows: Sequence[Mapping[str, Any]], *, evaluation: bool = False
    ) -> None:
        if rows:
            lines = publish.sample_lines(step, rows)
            write = partial(self.samples.write, step, lines, evaluation=evaluation)
            self._retry("write samples", write)

    def _retry(self, what: str, action: Callable[[], T]) -> T:
        """Retry ``action`` while the directory rejects it.

        During the retries, the master removes a failed checkpoint that has filled the disk.
        """
        return retry(what, action, self.channel.rest)

    # -- weight versions ---------------------------------------------------------------------

    def _publish(self) -> None:
        """Wait until the previous publication has ended; then publish the current weights."""
        if self.versions is not None:
            self._tell_version(self.versions.wait())
            self._tell_version(self.versions.start(self.progress.step))

    def _publish_again(self) -> None:
        """Publish the current weights again if rollout tasks need weights but can read no version.

        The ranks must be between two steps.
        """
        versions, rollouts, now = self.versions, self.rollouts, time.monotonic()
        if versions is None or rollouts is None or now < self._publish_at:
            return
        self._publish_at = now + PUBLISH_AGAIN_S[0]
        try:
            if not (rollouts.lack_weights and versions.is_lacking):
                return
        except EnvironmentFailure as error:
            logger.warning("cannot look for the newest weight version, will retry: %s", error)
            return
        self._publish_at = now + self._publish_pauses.next_s()
        self._tell_version(versions.start(self.progress.step, again=True))

    def _tell_version(self, outcome: Publication | None) -> None:
        """Report the result of a publication. After a failure, the run continues."""
        if outcome is None:
            return
        named = {"step": outcome.version.step, "version": outcome.version.name}
        if outcome.error is not None:
            self.events.write("weights_failed", **named, reason=outcome.error)
            return
        self.events.write(
            "weights",
            **named,
            base=None if outcome.base is None else outcome.base.name,
            bytes=outcome.bytes,
            seconds=round(outcome.seconds, 3),
            stall_s=round(outcome.stall_s, 3),
        )
        if self.rollouts is not None:
            self.rollouts.tell_weights()

    # -- checkpoints -------------------------------------------------------------------------

    def _checkpoint(self, *, asynchronous: bool) -> None:
        """Wait until the previous checkpoint has ended; then save this step."""
        self._tell(self.committer.wait())
        step, state = self.progress.step, self.progress.state()
        if self.rollouts is not None:
            state["rollouts"] = documents.to_json(self.rollouts.record())
        self._tell(self.committer.start(step, state, asynchronous=asynchronous))
        if not asynchronous:
            self._tell(self.committer.wait())

    def _commit_last(self) -> None:
        """Commit the last step of this incarnation. Retry until the job ends.

        Otherwise all progress since the last commit would be lost.
        """
        self.timeline.write()
        backoff = Backoff(*LAST_RETRY_S)
        self._tell(self.committer.wait())
        while self.committer.last_step != self.progress.step:
            self._checkpoint(asynchronous=False)
            if self.committer.last_step != self.progress.step:
                pause_s = backoff.next_s()
                logger.warning(
                    "retrying the checkpoint of step %d in %.0f s", self.progress.step, pause_s
                )
                self.channel.rest(pause_s)

    def _tell(self, outcome: Outcome | None) -> None:
        """Report the result of a checkpoint. After a failure, the run continues."""
        if outcome is None:
            return
        self._stall_s = (self._stall_s or 0.0) + outcome.stall_s
        if outcome.error is not None:
            failed = {"step": outcome.step, "reason": outcome.error}
            self.status.update(checkpoint_failed=failed)
            self.events.write("checkpoint_failed", **failed)
            return
        self.status.committed(outcome.step)
        self.recorder.committed(outcome.step)
        if self.rollouts is not None:
            self.rollouts.committed()
        with suppress(EnvironmentFailure):  # The next commit retries.
            self.scores.keep(outcome.step)
        self.events.write(
            "commit",
            step=outcome.step,
            seconds=round(outcome.seconds, 3),
            stall_s=round(outcome.stall_s, 3),
        )

    def _finish(self, reason: str) -> None:
        step = self.progress.step
        if self.config.checkpoint.export_at_end and step and self.plan.models["actor"].trained:
            self._export(step)
        self._retry("write the results", self.results.write)
        self.writer.append(Kind.FINISHED, {"step": step, "reason": reason})
        self.results.remove_parts()
        self.status.update(phase="finished")
        self.events.write("finished", step=step, reason=reason)
        if self._told_unknown and not self._saw_metric:
            logger.warning(
                "no step since the last start had the metric of stop_when: %s",
                self.progress.stop_when,
            )
            self.events.write("no_such_metric", condition=str(self.progress.stop_when), step=step)

    def _let_sinks_catch_up(self) -> None:
        """Wait until sinks have all steps. No later incarnation sends missing steps."""
        deadline = time.monotonic() + SINKS_S
        while behind := self.recorder.behind:
            if time.monotonic() > deadline:
                named = ", ".join(f"logging.{name}" for name in behind)
                message = "%s did not accept all steps within %.0f s and lacks the last steps"
                logger.warning(message, named, SINKS_S)
                self.events.write("sinks_behind", sinks=behind)
                return
            self.channel.rest(REST_S)

    def _export(self, step: int) -> None:
        commit = self.committer.commits[-1]
        exported = self._retry(
            "export the actor", lambda: export_actor(self.paths, self.config, commit)
        )
        folder, warning = exported.folder, exported.warning
        kept = None if exported.types is None else exported.types.kept
        if warning:
            logger.warning("%s: %s", folder, warning)
        self.writer.append(Kind.EXPORT, {"step": step, "directory": folder.name})
        self.events.write("export", step=step, directory=str(folder), kept=kept, warning=warning)

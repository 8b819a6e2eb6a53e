"""The master's loop: begin an incarnation, run steps, commit, and end.

begin ── restore ── wait for ranks ──► step ──► evaluate? ──► record ──► commit? ──┐
                                        ▲                                          │
                                        └──────────────────────────────────────────┘
                                                    until finished, or told to stop
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from slurmrl import log
from slurmrl.config.schema import Config
from slurmrl.errors import CheckpointError
from slurmrl.fsio.atomic import replace
from slurmrl.history.record import Kind
from slurmrl.history.state import TrialState
from slurmrl.history.writer import IncarnationWriter
from slurmrl.monitor.events import EventWriter
from slurmrl.monitor.recorder import Recorder
from slurmrl.name_resolve.base import NameStore
from slurmrl.paths import RunPaths
from slurmrl.plan.model import CallPlan, Plan
from slurmrl.workers import messages
from slurmrl.workers.master import step_metrics
from slurmrl.workers.master.committer import Committer
from slurmrl.workers.master.exporting import export_actor
from slurmrl.workers.master.progress import Progress
from slurmrl.workers.master.publish import StatusPublisher
from slurmrl.workers.master.workforce import Workforce
from slurmrl.workers.pace import Pace

logger = log.get(__name__)


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
        recorder: Recorder,
    ) -> None:
        self.paths = paths
        self.config = config
        self.plan = plan
        self.writer = writer
        self.events = EventWriter(paths, f"master.{writer.incarnation}")
        hosts = sum(group.hosts for group in plan.groups)
        pace = Pace.of(hosts, config.cluster.heartbeat_s)
        self.workforce = Workforce(
            paths,
            plan,
            writer.incarnation,
            self._while_waiting,
            longest_poll_s=pace.poll_s,
        )
        self.status = StatusPublisher(
            names,
            paths,
            self.workforce.mailbox.agents,
            incarnation=writer.incarnation,
            total_steps=config.total_steps,
            lease_ttl_s=config.cluster.lease_ttl_s,
            interval_s=pace.status_s,
        )
        self.committer = Committer(
            paths,
            writer,
            self.workforce,
            state.commits,
            keep_last=config.checkpoint.keep_last,
            timeout_s=config.step_timeout_s,
        )
        self.progress = progress
        self.recorder = recorder
        self.fresh = state.last_commit is None

    # -- the whole run -----------------------------------------------------------------------

    def run(self) -> None:
        """Run until the trial is finished or the job is to end; the ranks are told to exit."""
        self._wait_for_ranks()
        self.events.write("ready", step=self.progress.step)
        if self.fresh:
            self._start()
        while not self.workforce.warned and self.progress.finish_reason() is None:
            self._step()
        if self.committer.last_step != self.progress.step:
            self._commit()
        reason = self.progress.finish_reason()
        if reason is not None:
            self._finish(reason)
        else:
            logger.info("stopping at step %d as told", self.progress.step)
            self.events.write("stopped", step=self.progress.step)
        self.workforce.post({"type": messages.EXIT})
        self.recorder.close()

    def _while_waiting(self) -> None:
        self.status.tick()

    def _wait_for_ranks(self) -> None:
        ready = self.workforce.wait_ready(self.config.cluster.start_timeout_s)
        found = {
            (answer["size"], answer["fingerprint"], answer["evaluation_size"])
            for answer in ready.values()
        }
        if len(found) > 1:
            raise CheckpointError(f"the ranks see different datasets: {sorted(found)}")
        self.progress.use_dataset(*found.pop())

    def _start(self) -> None:
        """Before the first step: evaluate what training starts from."""
        evaluation = self.config.evaluation
        if evaluation is not None and evaluation.at_start:
            self._record(self._evaluate())

    def _step(self) -> None:
        began = time.monotonic()
        step = self.progress.step + 1
        scalars = self.progress.scalars()
        items = self.progress.take_batch()
        metrics, calls = self._execute(step, items, self.plan.calls, evaluation=False)
        self.progress.advance(metrics)
        self._write_samples(step, step_metrics.texts(calls))
        if self.progress.evaluation_due():
            metrics.update(self._evaluate())
        self._record({**metrics, **scalars, "time/total": time.monotonic() - began})
        if self.progress.commit_due():
            self._commit()

    # -- parts of a step ---------------------------------------------------------------------

    def _execute(
        self,
        step: int,
        items: Sequence[tuple[int, int]],
        calls: Sequence[CallPlan],
        *,
        evaluation: bool,
    ) -> tuple[dict[str, Any], list[tuple[CallPlan, step_metrics.Answers]]]:
        """Post one batch and all of its calls at once, in their one order, and collect."""
        began = time.monotonic()
        scalars = self.progress.scalars()
        load = {"type": messages.LOAD, "step": step, "items": list(items)}
        batch = [load] + [
            {"type": messages.CALL, "step": step, "name": call.name, "scalars": scalars}
            for call in calls
        ]
        numbers = self.workforce.post(*({**one, "evaluation": evaluation} for one in batch))
        timeout_s = self.config.step_timeout_s
        self.workforce.collect(numbers[0], f"loading the batch of step {step}", timeout_s)
        answered: list[tuple[CallPlan, step_metrics.Answers]] = [
            (call, self.workforce.collect(number, f"{call.name} of step {step}", timeout_s))
            for call, number in zip(calls, numbers[1:], strict=True)
        ]
        return step_metrics.of_step(answered, time.monotonic() - began), answered

    def _evaluate(self) -> dict[str, Any]:
        """Judge held-out prompts; nothing that training reads is changed."""
        step = self.progress.step
        items = self.progress.evaluation_items()
        metrics, _ = self._execute(step, items, self.plan.evaluation_calls, evaluation=True)
        wanted = {f"eval/{name}": value for name, value in metrics.items() if "/" not in name}
        return {**wanted, "time/evaluation": metrics["time/step"]}

    def _record(self, metrics: dict[str, Any]) -> None:
        step = self.progress.step
        line = {"step": step, "epoch": self.progress.cursor.epoch, **metrics}
        self.progress.metrics = line
        self.recorder.write(line)
        self.status.update(step=step, metrics=line, phase="running")
        if self.progress.log_due():
            shown = {
                name: round(value, 4) if isinstance(value, float) else value
                for name, value in line.items()
                if not name.startswith("time/")
            }
            logger.info("%s", json.dumps(shown))

    def _write_samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        if rows:
            lines = "".join(json.dumps({"step": step, **row}) + "\n" for row in rows)
            path = self.paths.samples / f"step-{step:08d}.jsonl"
            replace(path, lines.encode(), durable=False)

    def _commit(self) -> None:
        self.recorder.sync()
        began = time.monotonic()
        self.committer.commit(self.progress.step, self.progress.state())
        self.status.committed(self.progress.step)
        self.events.write(
            "commit", step=self.progress.step, seconds=round(time.monotonic() - began, 3)
        )

    def _finish(self, reason: str) -> None:
        step = self.progress.step
        if self.config.checkpoint.export_at_end:
            self._export(step)
        self.writer.append(Kind.FINISHED, {"step": step, "reason": reason})
        self.status.update(phase="finished")
        self.events.write("finished", step=step, reason=reason)

    def _export(self, step: int) -> None:
        folder = export_actor(self.paths, self.config, self.committer.commits[-1])
        self.writer.append(Kind.EXPORT, {"step": step, "directory": folder.name})
        self.events.write("export", step=step, directory=str(folder))

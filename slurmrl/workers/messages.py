"""Every message between master, agents and workers. All are JSON objects with a ``type``.

Master to workers (control log, in execution order on every rank; ``seq`` numbers them):

========  =====================================================================================
load      ``step, items [[epoch, index], …], evaluation``: take the batch from the dataset
call      ``step, name, scalars, evaluation``: execute one call of the dataflow graph
save      ``step, directory, asynchronous``: write this rank's part of a checkpoint
exit      the incarnation ends here, as it should
over      the incarnation ends here, because something failed; with ``stacks``, why, agents ask
          their processes for their stacks before they end them
stacks    ``number, ranks`` (null: all): agents ask these for their stacks, for a person
========  =====================================================================================

Workers to master (through the agent's log): ``ready`` (``rank, size, fingerprint, left_out``),
``done`` (``rank, seq, stats, seconds, tokens, texts``), ``saved`` (``rank, seq`` of the ``save``,
``files``, or ``error``; an asynchronous one comes after the ``done``).
Agents themselves add ``hello`` (``group, task, attempt, host, job``), ``warning`` (``signal, cause,
time_left_s``: the job will end soon) and ``failed`` (``failure``: why the incarnation must end, see
`workers.failure`) and ``stacked`` (``group, task, file, ranks``: what these were doing, a list of
objects).

Only on a host: agent to worker, once, ``start``; worker to agent ``error`` (``rank, step, call,
exception, traceback``, ``damaged``: a checkpoint's directory, ``echo``: it looks like the end of
another rank); worker and master to agent ``pulse`` (a worker's says what it is doing); agent to
fork server ``fork`` (with the new worker's pipe), ``kill`` and ``stacks``; fork server to agent
``ended`` (``code``: how its worker ended).
"""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]

LOAD = "load"
CALL = "call"
SAVE = "save"
EXIT = "exit"
OVER = "over"
STACKS = "stacks"

START = "start"
READY = "ready"
DONE = "done"
SAVED = "saved"
ERROR = "error"
HELLO = "hello"
WARNING = "warning"
FAILED = "failed"
STACKED = "stacked"

PULSE = "pulse"
FORK = "fork"
KILL = "kill"
ENDED = "ended"

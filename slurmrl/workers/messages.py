"""The messages between master, agents and workers: JSON objects with a ``type``.

Master to workers and agents (control log; every rank executes them in this order; ``seq`` numbers
them):

========  =====================================================================================
load      ``step, items [[epoch, index], …], evaluation``: take the batch from the dataset
call      ``step, name, scalars, evaluation``: execute one call of the dataflow graph
save      ``step, directory, asynchronous``: write this rank's part of a checkpoint
exit      the incarnation ends normally
over      the incarnation ends because of a failure; if ``stacks`` is there, it says why agents
          collect the stacks of their processes before they kill them
stacks    ``number, ranks`` (null: all): a user requests the stacks of these ranks
bell      ``host, port, token``: agents ring the master's bell when their logs have grown; not
          numbered, and not for the workers
========  =====================================================================================

Workers to master (through the agent's log): ``preparing`` (``rank``: it is tokenising a dataset, so
that the start takes longer), ``ready`` (``rank, size, fingerprint, left_out``),
``done`` (``rank, seq, stats, seconds, tokens, texts``), ``saved`` (``rank, seq`` of the ``save``,
``files``, or ``error``; that of an asynchronous ``save`` comes after its ``done``).

Agent to master (its log): ``hello`` (``group, task, attempt, host, job``, ``bell``: the address of
the agent's own bell, or null), ``warning`` (``signal, cause, time_left_s``: the job will end soon),
``failed`` (``failure``: why the incarnation must end, see `workers.failure`) and ``stacked``
(``group, task, number, file, ranks``: what these were doing, see `monitor.hang`).

Within a host (pipes): agent to worker, once, ``start``; worker to agent ``error`` (``rank, step,
call, exception, traceback``, ``damaged``: a checkpoint's directory, ``absent``: an input's path,
``echo``: it looks like a consequence of another rank's end); worker and master to agent ``pulse``
(a worker's says what it is doing); agent to fork server ``fork`` (with the new worker's pipe),
``kill`` and ``stacks``; fork server to agent ``ended`` (``code``: its worker's exit code).
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
BELL = "bell"

START = "start"
PREPARING = "preparing"
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

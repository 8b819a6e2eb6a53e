"""Every message between master, agents and workers. All are JSON objects with a ``type``.

Master to workers (control log, in execution order on every rank; ``seq`` numbers them):

========  =====================================================================================
load      ``step, items [[epoch, index], …], evaluation``: take the batch from the dataset
call      ``step, name, scalars, evaluation``: execute one call of the dataflow graph
save      ``step, directory``: write this rank's part of a checkpoint
exit      the incarnation ends here
========  =====================================================================================

Workers to master (through the agent's log): ``ready`` (``rank, size, fingerprint``), ``done``
(``rank, seq, stats, seconds, tokens, texts, files``), ``error`` (``rank, step, call, exception,
traceback``). Agents themselves add ``hello`` (``group, task, attempt, host, job``) and
``warning`` (``signal``: the job will end soon). Agent to worker, once: ``start``.
"""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]

LOAD = "load"
CALL = "call"
SAVE = "save"
EXIT = "exit"

START = "start"
READY = "ready"
DONE = "done"
ERROR = "error"
HELLO = "hello"
WARNING = "warning"

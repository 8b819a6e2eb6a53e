"""The process that runs math-verify: one JSON request a line in, one JSON verdict a line out.

It is started by path, so it imports nothing of slurmrl. Time limits are its parent's business
(who kills it): math-verify's own ones work through SIGALRM and do not interrupt long operations
on big numbers.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answer until standard input ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    replies.write('{"ready": true}\n')
    for line in sys.stdin:
        request = json.loads(line)
        reference, completion = (
            parse(request[key], parsing_timeout=None) for key in ("reference", "completion")
        )
        correct = verify(reference, completion, timeout_seconds=None)
        replies.write(json.dumps({"correct": bool(correct)}) + "\n")


if __name__ == "__main__":
    main()

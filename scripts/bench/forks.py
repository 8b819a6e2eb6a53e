"""Child processes of benchmarks."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def fork(serve: Callable[[], None]) -> int:
    """Run ``serve`` in a child process, which exits when ``serve`` returns. Return its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            serve()
        except BaseException:  # noqa: BLE001 - the process boundary
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid

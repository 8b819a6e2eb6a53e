"""Waiting in a thread until names have gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from slurmrl import log
from slurmrl.errors import EnvironmentFailure

logger = log.get(__name__)


class Watch:
    """Looks at some keys until none is there any more, then calls back once."""

    def __init__(
        self, exists: Callable[[str], bool], keys: Sequence[str], callback: Callable[[], object]
    ) -> None:
        self._exists = exists
        self._awaited = set(keys)
        self._present: set[str] = set()
        self._callback = callback
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, poll_s: float, wait_timeout_s: float) -> None:
        """Look once, so that whatever is there now is known to be there; then in the thread."""
        deadline = time.monotonic() + wait_timeout_s
        self._look_at_all(deadline)
        self._thread = threading.Thread(
            target=self._run, args=(poll_s, deadline), daemon=True, name="watch names"
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop looking; the callback will not be called any more."""
        self._stopped.set()
        self.join()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the callback, or for `stop`; False if time ran out."""
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, poll_s: float, deadline: float) -> None:
        while self._awaited or self._present:
            if self._stopped.wait(poll_s):
                return
            self._look_at_all(deadline)
        self._callback()

    def _look_at_all(self, deadline: float) -> None:
        for key in sorted(self._awaited | self._present):
            there = self._look(key)
            if there:
                self._present.add(key)
            elif there is False:
                self._present.discard(key)
            if there or (there is False and time.monotonic() >= deadline):
                self._awaited.discard(key)

    def _look(self, key: str) -> bool | None:
        """Whether a key is there; None if the store does not say."""
        try:
            return self._exists(key)
        except EnvironmentFailure as error:
            logger.warning("watching %s: %s", key, error)
            return None

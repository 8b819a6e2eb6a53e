"""What vLLM calls as it starts, in each of its processes, where slurmrl is installed beside it: an
entry point of ``vllm.general_plugins``. It imports nothing that vLLM has not imported."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

BACKEND: Final = "slurmrl"
"""In ``--weight-transfer-config``."""
RECEIVER: Final = "slurmrl.engines.rollout.vllm_receiver", "GroupReceiver"
"""Imported where vLLM is started with this backend."""
STATE: Final = "state"
"""Topic of a rank's first note."""
CLOSED: Final = "1"
"""Its text. The number changes with what is said over the group and in its notes."""
OPEN: Final = f"{CLOSED}, within an update"
"""The same if vLLM waits for the end of an update, and would refuse the start of another."""


def register() -> None:
    """Tell vLLM of the backend. Versions that take no backends of others go without."""
    with suppress(ImportError, AttributeError, TypeError):
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        with suppress(ValueError):  # it was registered before
            WeightTransferEngineFactory.register_engine(BACKEND, *RECEIVER)

"""What vLLM calls as it starts, in each of its processes, where slurmrl is installed beside it: an
entry point of ``vllm.general_plugins``. It imports nothing that vLLM has not imported."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

BACKEND: Final = "slurmrl"
"""In ``--weight-transfer-config``."""
RECEIVER: Final = "slurmrl.engines.rollout.vllm_receiver", "GroupReceiver"
"""Imported where vLLM is started with this backend."""
OPEN: Final = "open"
"""Topic of a rank's note of whether vLLM waits for the end of an update; empty: it does not."""


def register() -> None:
    """Tell vLLM of the backend. Versions that take no backends of others go without."""
    with suppress(ImportError):
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        with suppress(ValueError):  # it was registered before
            WeightTransferEngineFactory.register_engine(BACKEND, *RECEIVER)

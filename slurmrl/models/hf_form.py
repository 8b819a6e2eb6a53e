"""The layout of the files of transformers' models. Torch-free.

Only transformers knows the layout. Processes that have not imported torch, such as the master, ask
a child process instead of importing transformers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import Any, Final

from slurmrl.child import ChildRequest, answer
from slurmrl.errors import RunFailedError, UsageError
from slurmrl.fsio.documents import from_json
from slurmrl.models.architecture import Head
from slurmrl.models.hf_config import FileForm, HFConfig
from slurmrl.registry import resolve

FORM: Final = "slurmrl.models.hf_files:file_form"
"""Function that finds the layout. The function is found by name, because transformers takes seconds
to import."""
MODULE: Final = "slurmrl.models.hf_form"
LIMIT_S: Final = 600.0
"""Maximum duration of a child process, which imports transformers, in seconds."""


def file_form(config: HFConfig, head: Head) -> FileForm:
    """Return the layout of the files of a config's model.

    Raises UsageError if transformers does not know the family, or computes tensors of its files.
    Raises RunFailedError if the child process fails, which may be permanent: do not retry forever.
    """
    if "torch" in sys.modules:
        form: FileForm = resolve(FORM)(config, head)
        return form
    return _asked(json.dumps(dict(config.values), sort_keys=True), head)


@lru_cache(maxsize=8)
def _asked(text: str, head: Head) -> FileForm:
    request = ChildRequest(MODULE, {"values": json.loads(text), "head": head}, limit_s=LIMIT_S)
    reply = request.last()
    if "refused" in reply:
        raise UsageError(reply["refused"])
    if "form" not in reply:
        why = request.ended.last_line or f"exit code {request.ended.code}"
        raise RunFailedError(
            f"the layout of the model's files is unknown: a process with transformers failed: {why}"
        )
    return from_json(FileForm, reply["form"], "the layout of the model's files")


def _replies(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        form = resolve(FORM)(HFConfig.from_hf(request["values"]), request["head"])
    except UsageError as error:
        yield {"refused": str(error)}
    else:
        yield {"form": asdict(form)}


if __name__ == "__main__":
    answer(_replies)

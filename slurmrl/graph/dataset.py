"""The keys that each kind of dataset feeds into the graph."""

from __future__ import annotations

from typing import Final

DATASET_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "prompt": ("prompt_ids",),
    "prompt_answer": ("input_ids", "prompt_mask"),
}

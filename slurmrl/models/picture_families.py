"""Families of transformers that read images. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

PICTURE_FAMILIES: Final = frozenset(
    (
        *("gemma3", "gemma4", "glm4v", "internvl"),
        *("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
    )
)
"""Families that join the images of several prompts along dim 0 of each argument."""

WITHOUT_ENCODER: Final = frozenset(("qwen3_5", "qwen3_5_moe"))
"""Families among these that transformers also runs without the image encoder."""


def picture_refusal(values: Mapping[str, Any]) -> str:
    """Return why the model of a ``config.json`` object cannot read images here; or ""."""
    family = values.get("model_type")
    if family in PICTURE_FAMILIES:
        return ""
    known = ", ".join(sorted(PICTURE_FAMILIES))
    return f"images are not possible for {family} models; allowed families: {known}"

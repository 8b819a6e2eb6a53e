"""Families of transformers that read images. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

PICTURE_FAMILIES: Final = frozenset(
    (
        *("gemma3", "gemma4", "glm46v", "glm4v", "glm4v_moe", "internvl", "llava"),
        *("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
    )
)
"""Families that join the images of several prompts along dim 0 of each argument."""
PATCH: Final = {"patch_size": 14, "temporal_patch_size": 2, "in_channels": 3}
"""Sizes of Qwen2.5-VL's patches. SGLang mistakes other patches for hidden states of images."""
STRAY: Final = 0
"""The token that is read in place of a placeholder without an image."""
SERVED: Final[Mapping[str, tuple[str, ...]]] = {
    "sglang": ("qwen2_5_vl", "qwen3_vl"),
    "vllm": ("qwen2_5_vl", "qwen3_vl"),
}
"""Families to which servers get images. For other families, the requests to a server were not
compared with training."""

PIXTRAL: Final = "pixtral"
"""An encoder whose processor pads the images of a batch to the size of the largest one."""

WITHOUT_ENCODER: Final = frozenset(("qwen3_5", "qwen3_5_moe"))
"""Families among these that transformers also runs without the image encoder."""


def served_refusal(values: Mapping[str, Any], server: str) -> str:
    """Return why a server gets no images for the model of a ``config.json`` object; or ""."""
    family, known = values.get("model_type"), SERVED[server]
    if family in known:
        tower = {**PATCH, **(values.get("vision_config") or {})}
        odd = any(tower[name] != size for name, size in PATCH.items())
        if odd and (server, family) == ("sglang", "qwen2_5_vl"):
            sizes = ", ".join(f"{name} {size}" for name, size in PATCH.items())
            return f"sglang servers read images of {family} models only with {sizes}"
        return ""
    names = ", ".join(known)
    return f"{server} servers get no images for {family} models; allowed families: {names}"


def picture_refusal(values: Mapping[str, Any]) -> str:
    """Return why the model of a ``config.json`` object cannot read images here; or ""."""
    family = values.get("model_type")
    tower = values.get("vision_config")
    if family == "llava" and isinstance(tower, Mapping) and tower.get("model_type") == PIXTRAL:
        return f"images are not possible for {family} models with a {PIXTRAL} encoder"
    if family in PICTURE_FAMILIES:
        return ""
    known = ", ".join(sorted(PICTURE_FAMILIES))
    return f"images are not possible for {family} models; allowed families: {known}"

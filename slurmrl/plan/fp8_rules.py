"""FP8 matrices of servers: which models have them, and their form in files.

Files have them as DeepSeek V3 introduced it, which SGLang and vLLM read: a matrix of float8_e4m3fn,
and the factor of each block of 128 x 128 elements in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from slurmrl.config.schema.roles import TARGETS
from slurmrl.plan.estimates.shape import ModelShape

FP8_FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Families of which both servers store exactly the matrices of `TARGETS` in FP8."""
FP8_CAPABILITY: Final = (8, 9)
"""The least compute capability of GPUs with products of FP8 matrices."""
ALIGNMENT: Final = 16
"""Number by which TransformerEngine must be able to divide the sizes of FP8 matrices."""
BLOCK: Final = 128
"""Rows and columns of a block of elements that share a factor."""
LARGEST: Final = 448.0
"""Largest number of float8_e4m3fn."""
MATRICES: Final = tuple(f"{name}.weight" for name in TARGETS)
"""Ends of the names of matrices in FP8."""
FACTORS: Final = "_scale_inv"
"""End of the name of a matrix's factors, after the name of the matrix."""


def fp8_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``config.json`` object of a model whose matrices are in FP8."""
    gates = [f"model.layers.{n}.mlp.gate" for n in range(values["num_hidden_layers"])]
    kept = ["lm_head", *(gates if "num_experts" in values else ())]
    return {
        **values,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": kept,
        },
    }


def unequal_sizes(shape: ModelShape, tp: int, multiple: int) -> Iterator[tuple[str, float]]:
    """Yield each size of a tensor rank's matrices that is not a multiple of a number.

    For servers the number is `BLOCK`: they join matrices and split them in whole blocks.
    """
    sizes = {
        "hidden_size": shape.hidden,
        "the queries of a tensor rank": shape.queries / tp,
        "the keys of a tensor rank": shape.kv_heads_of_rank(tp) * shape.head_dim,
    }
    if shape.expert_layers < shape.layers:
        sizes["intermediate_size of a tensor rank"] = shape.inner / tp
    if shape.experts:
        sizes["the inner size of experts of a tensor rank"] = shape.expert_inner / tp
    yield from ((name, size) for name, size in sizes.items() if size % multiple)

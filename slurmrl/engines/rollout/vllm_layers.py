"""How the layers of a model in a vLLM server get new weights, one after the other.

A layer that gets weights has no memory of its own until all of them have come: then vLLM puts them
into the form that its kernels use, and copies them to where the layer's weights were. Where weights
are missing or wrong, vLLM (0.32) leaves layers without memory, with which it would end, and counts
what has come as a part of the next weights. This runs in vLLM's environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

SHOWN = 4


class LayersInTurn:
    """One replacement of all weights. Unless it comes to its `end`, layers that have not got all
    of their weights keep those that they had."""

    def __init__(self, model: Any, settings: Any) -> None:
        """``model``: one of vLLM's; ``settings``: its ``ModelConfig``."""
        self._model, self._settings = model, settings
        self._missing: set[str] | None = None
        """Parameters that were not loaded yet; None: that is not known."""
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def begin(self) -> None:
        initialize_layerwise_reload(self._model)
        if self._settings.quantization is None:
            self._missing = set(_in_every_checkpoint(self._model))

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Raises what vLLM raises for tensors that the model does not have."""
        with disable_mtp_completeness_check():
            loaded = self._model.load_weights(tensors)
        if loaded is None:
            self._missing = None
        elif self._missing is not None:
            self._missing -= set(loaded)

    def end(self) -> None:
        """All tensors were loaded. Raises ValueError if the model has others, too."""
        if self._missing:
            some = ", ".join(sorted(self._missing)[:SHOWN])
            raise ValueError(f"no weights came for {len(self._missing)} parameters: {some}")
        finalize_layerwise_reload(self._model, self._settings)
        for layer in self._model.modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, UnquantizedEmbeddingMethod):
                # On CPUs, a vocabulary projection that is tied to the embedding has a copy in
                # another form, which vLLM makes only of weights that are loaded for it.
                method.process_weights_after_loading(layer)
        self._ended = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._ended:
            return
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():  # it waits for weights
                info.loaded_weights.clear()
                info.load_numel = 0
        finalize_layerwise_reload(self._model, self._settings)


def _in_every_checkpoint(model: nn.Module) -> Iterator[str]:
    """The parameters that no checkpoint may lack. vLLM's own check leaves out the same ones: those
    of layers that may be quantized."""
    others = {
        parameter
        for module in model.modules()
        if hasattr(getattr(module, "quant_method", None), "process_weights_after_loading")
        for parameter in module.parameters()
    }
    for name, parameter in model.named_parameters():
        if parameter not in others:
            yield name

"""How the layers of a model in a vLLM server get new weights, one after the other.

A layer that gets weights has no memory of its own until all of them have come: then vLLM puts them
into the form that its kernels use, and copies them to where the layer's weights were. Where weights
are missing or wrong, vLLM (0.32) leaves layers without memory, with which it would end, and counts
what has come as a part of the next weights. This runs in vLLM's environment.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from torch import Tensor
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
    of their weights keep those that they had; biases are replaced at once."""

    def __init__(self, model: Any, settings: Any) -> None:
        """``model``: one of vLLM's; ``settings``: its ``ModelConfig``."""
        self._model, self._settings = model, settings
        self._missing: set[str] | None = None
        """Parameters that were not loaded yet; None: the model does not say what it loads."""
        self._tied: set[str] = set()
        """Further names of parameters, which no checkpoint of this model has."""
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def begin(self) -> None:
        parameters = self._model.named_parameters
        once, all_names = (
            {name for name, _ in parameters(remove_duplicate=x)} for x in (True, False)
        )
        self._tied = all_names - once
        initialize_layerwise_reload(self._model)
        self._missing = {name for name, _ in parameters(remove_duplicate=False)} - self._tied

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Raises ValueError for a tensor that the model has under another name, too, and what vLLM
        raises for those that it does not have."""
        tensors = list(tensors)
        if tied := self._tied.intersection(name for name, _ in tensors):
            raise ValueError(f"the model ties {', '.join(sorted(tied))}, which has weights here")
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

"""Check whether a server can be used: its version, its flags and its model. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from slurmrl.errors import RunFailedError, UsageError
from slurmrl.plan.engine_rules import (
    EXPERTS_FLAG,
    EXPERTS_NEED,
    RETRACTING_NEEDS,
    RETRACTING_SGLANG,
    SERVER_KINDS,
    VLLM_FLAGS,
    numbers_of,
)
from slurmrl.plan.estimates.server_types import unserved_on_cpus
from slurmrl.plan.estimates.shape import ModelShape
from slurmrl.plan.estimates.shape import read as read_shape


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model whose weights a server loads."""

    architecture: str
    """Architecture as in ``config.json``: ``Qwen2ForCausalLM``."""
    vocabulary: int
    shape: ModelShape | None = None
    """Sizes of the model; None allows any sizes."""
    dtype: str | None = None
    """Element type of the weights' files; None allows any type."""
    text: bool = False
    """Whether requests need a tokenizer on the server."""
    experts: bool = False
    """Whether requests record the experts that process each token."""

    @staticmethod
    def of(values: Mapping[str, Any], *, text: bool, experts: bool) -> ServedModel:
        """Return the model of a ``config.json`` object."""
        return ServedModel(
            architecture=values["architectures"][0],
            vocabulary=values["vocab_size"],
            shape=read_shape(values),
            dtype=values["dtype"],
            text=text,
            experts=experts,
        )

    def check_folder(self, where: str, folder: object) -> None:
        """Raise UsageError if sizes in the server's model ``folder`` differ from `shape`.

        Do nothing if the folder does not exist on this host. A server would silently load the
        weights of a model with fewer layers.
        """
        if self.shape is None:
            return
        try:
            values = json.loads((Path(str(folder)) / "config.json").read_bytes())
        except (OSError, ValueError):
            return  # the hub or only the server's host has the folder
        found = read_shape(values) if isinstance(values, dict) else None
        for size in fields(ModelShape):
            own, its = getattr(self.shape, size.name), getattr(found, size.name, None)
            if found is not None and own != its and size.name != "positions":
                raise UsageError(
                    f"{where}: the server's model {folder} has {size.name}={its}, but the weights "
                    f"have {own}"
                )

    async def check_vocabulary(self, where: str, knows: Callable[[int], Awaitable[bool]]) -> None:
        """Raise UsageError unless the server's model has a vocabulary of the weights' size.

        ``knows`` returns whether the server's model has a token id.
        """
        if not await knows(self.vocabulary - 1) or await knows(self.vocabulary):
            raise UsageError(
                f"{where}: the vocabulary of the server's model must have {self.vocabulary} token "
                f"ids, like the weights"
            )


def field_of(where: str, value: object, name: str) -> object:
    """Return a field of a response. Raises RunFailedError if the response lacks the field."""
    if not isinstance(value, dict) or name not in value:
        raise RunFailedError(f"{where}: the answer has no field '{name}': {str(value)[:200]}")
    return value[name]


class FitServer(NamedTuple):
    """A server that can be used."""

    version: str
    context: int
    """Maximum number of tokens of a prompt and its completion."""
    settings: object
    """Content of the server's ``/server_info``."""


Get = Callable[[str], Awaitable[object]]
"""Function that requests a path from a server."""


async def examine(kind: str, where: str, get: Get, needs: ServedModel) -> FitServer:
    """Return facts about a server of this kind.

    Raises UsageError if the server cannot be used for ``needs``, and RunFailedError if it does not
    answer.
    """
    return await {"sglang": _examine_sglang, "vllm": _examine_vllm}[kind](where, get, needs)


async def _examine_sglang(where: str, get: Get, needs: ServedModel) -> FitServer:
    server, model = await get("/server_info"), await get("/model_info")
    version = str(field_of(where, server, "version"))
    _check_version(where, "sglang", version)
    if field_of(where, server, "enable_custom_logit_processor"):
        raise UsageError(
            f"{where}: --enable-custom-logit-processor is not allowed: the server would run code "
            "that requests carry"
        )
    _check_tokenizer(where, server, needs)
    if needs.experts:
        assert isinstance(server, dict), "it has fields"
        _check_experts(where, server)
    names = field_of(where, model, "architectures")
    if not isinstance(names, list) or needs.architecture not in names:
        raise UsageError(
            f"{where}: the architecture of the server's model is {names}; the weights belong to "
            f"{needs.architecture}"
        )
    needs.check_folder(where, field_of(where, model, "model_path"))
    return FitServer(version, int(str(field_of(where, server, "max_req_input_len"))) + 1, server)


def retracts(where: str, server: object) -> bool:
    """Return whether a paused SGLang server can empty its cache and keep its requests.

    ``server`` has the server's settings (``/server_info``).
    """
    assert isinstance(server, dict), "it was checked"
    if numbers_of(str(field_of(where, server, "version"))) < RETRACTING_SGLANG:
        return False
    return all(server.get(name, value) == value for name, value in RETRACTING_NEEDS.items())


async def _examine_vllm(where: str, get: Get, needs: ServedModel) -> FitServer:
    version = str(field_of(where, await get("/version"), "version"))
    try:
        server = await get("/server_info?config_format=json")
    except UsageError as error:
        raise UsageError(
            f"{where} does not allow updates of weights: start it with VLLM_SERVER_DEV_MODE=1 "
            f"({error})"
        ) from error
    _check_version(where, "vllm", version)
    model = field_of(where, field_of(where, server, "vllm_config"), "model_config")
    _check_tokenizer(where, model, needs)
    mode = field_of(where, model, "logprobs_mode")
    if mode != "processed_logprobs":
        raise UsageError(
            f"{where}: --logprobs-mode is {mode}, so it does not report log-probabilities of "
            f"the sampled distribution; start the server with {' '.join(VLLM_FLAGS)}"
        )
    listed = field_of(where, await get("/v1/models"), "data")
    if not isinstance(listed, list) or not listed:
        raise RunFailedError(f"{where}: /v1/models lists no model")
    needs.check_folder(where, field_of(where, listed[0], "root"))
    _check_vllm_reads(where, server, needs)
    return FitServer(version, int(str(field_of(where, listed[0], "max_model_len"))), server)


def _check_vllm_reads(where: str, server: object, needs: ServedModel) -> None:
    """Raise UsageError if a vLLM server would not sample with the weights that it loads later.

    On CPUs, vLLM does not update a vocabulary projection that is also the embedding. vLLM packs
    experts for its kernels only at the start, so it would mistake new experts for packed experts.
    """
    config = field_of(where, server, "vllm_config")
    device = config.get("device_config") if isinstance(config, dict) else None
    on_cpu = isinstance(device, dict) and device.get("device") == "cpu"
    if not on_cpu or needs.shape is None:
        return
    if reason := unserved_on_cpus("vllm", needs.shape):
        raise UsageError(f"{where}: {reason}: use native or sglang")
    if needs.shape.tied:
        raise UsageError(
            f"{where}: vLLM on CPUs cannot load new weights of a model with "
            "tie_word_embeddings from files: use native or sglang"
        )


def check_context(where: str, context: int, least: int) -> None:
    """Raise UsageError if a server accepts fewer than ``least`` tokens of prompt and completion.

    The server would cut off completions, which would look like completions at the limit.
    """
    if context < least:
        raise UsageError(
            f"{where}: the server accepts at most {context} tokens in a prompt and its completion, "
            f"but this run may need {least}. Give it a longer context or more memory, or lower "
            "dataset.max_prompt_tokens, rollout.max_new_tokens, rollout.episode.max_tokens or "
            "max_turns, evaluation.dataset.max_prompt_tokens or evaluation.max_new_tokens"
        )


def _check_version(where: str, kind: str, version: str) -> None:
    rules = SERVER_KINDS[kind]
    if rules.is_older(version):
        least = ".".join(map(str, rules.oldest))
        raise UsageError(f"{where}: {rules.title} {version} is too old; at least {least} is needed")


def _check_tokenizer(where: str, settings: object, needs: ServedModel) -> None:
    if needs.text and field_of(where, settings, "skip_tokenizer_init"):
        raise UsageError(
            f"{where}: --skip-tokenizer-init is not allowed: rollout.min_new_tokens and "
            "rollout.stop_strings need the server's tokenizer"
        )


def _check_experts(where: str, server: Mapping[str, object]) -> None:
    """Raise UsageError if a server with these settings reports no experts or wrong experts."""
    if server.get("enable_return_routed_experts") is not True:
        raise UsageError(f"{where}: rollout.replay_experts needs a server with {EXPERTS_FLAG}")
    for name, needed in EXPERTS_NEED.items():
        value = server.get(name, needed)
        if value not in (needed, None):
            raise UsageError(
                f"{where}: with {name} {value} the server reports experts for the wrong tokens; "
                "leave out this setting, or rollout.replay_experts"
            )

"""Completions from SGLang: requests, replies, and completions of several requests.

An update of weights may end a request, so a completion may need several requests:

- A server looks for stop strings only in the tokens of one request. A later request therefore also
  stops at the suffix of each stop string whose prefix ends the earlier tokens.
- A server stops at stop strings even before ``min_new_tokens``. The completion then continues with
  another request.
- Before a server aborts a request, it samples one more token, and does not check whether this token
  ends the request.

SGLang stores the experts of tokens next to keys and values. A cached prefix has the experts of the
request that computed it. A completion uses the experts of its last request, whose prompt contains
the tokens of the earlier requests.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from operator import contains
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, TypeAdapter, ValidationError

from slurmrl.data.meta import SampledMasks
from slurmrl.errors import RunFailedError
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.hf_config import HFConfig
from slurmrl.plan.engine_rules import EXPERTS_FLAG
from slurmrl.rollouts.completions import Completion, Finish, joined_masks
from slurmrl.rollouts.generation.base import ABORTED, GenerationRequest
from slurmrl.rollouts.generation.image_requests import PromptImage
from slurmrl.rollouts.generation.launch_sglang import ARRAYS
from slurmrl.tensors.layout import Array

NEUTRAL: Mapping[str, float] = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Neutral sampling parameters, which override a server's ``--preferred-sampling-params``."""


class _SglangSpan(BaseModel):
    """Range of tokens, ``start`` to ``end`` - 1, that the weights ``version`` sampled."""

    version: str
    start: int
    end: int


class _SglangFinish(BaseModel):
    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str | None = None


class _SglangMeta(BaseModel):
    finish_reason: _SglangFinish
    weight_versions: list[_SglangSpan] = []
    output_token_logprobs: list[tuple[float, int, str | None]]
    output_token_sampling_logprobs: list[float] | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    routed_experts: str | None = None


class _SglangReply(BaseModel):
    output_ids: list[int]
    text: str | None = None
    """The decoded tokens; None from a server without a tokenizer."""
    meta_info: _SglangMeta


REPLY = TypeAdapter(_SglangReply)
FINISH: Mapping[str, Finish] = {"stop": "stop", "length": "length", "abort": "aborted"}


def request_body(sampling: GenerationRequest, *, cache: str | None = None) -> dict[str, Any]:
    """Return the body of a request for one completion.

    Two requests share cached prefixes only if their ``cache`` is equal (or None for both).
    """
    options = sampling.options
    return {
        # SGLang aborts by prefix: without the slash, an abort of request 1 also ends 12.
        "rid": f"{sampling.request_id}/",
        "input_ids": list(sampling.prompt),
        "sampling_params": {
            "max_new_tokens": options.max_new_tokens,
            "min_new_tokens": options.min_new_tokens,
            "temperature": options.temperature,
            "top_p": 1.0 if options.greedy else options.top_p,
            "top_k": 1 if options.greedy else options.top_k or -1,
            **NEUTRAL,
            "stop_token_ids": list(options.stop_token_ids),
            "stop": list(options.stop_strings),
            "sampling_seed": sampling.server_seed,
            "skip_special_tokens": False,  # stop strings may contain special tokens
            "no_stop_trim": True,
        },
        "return_logprob": True,
        "return_sampling_mask": options.masks,
        "return_routed_experts": options.experts,
        "priority": sampling.priority,
        "extra_key": cache,
        **image_data(sampling.images),
    }


def image_data(images: Sequence[PromptImage]) -> dict[str, Any]:
    """Return the field with the arrays of a prompt's images, in the form for `launch_sglang`."""
    if not images:
        return {}
    arrays = {
        name: np.concatenate([each.arguments[name] for each in images])
        for name in images[0].arguments
    }
    content = {
        name: (str(array.dtype), array.shape, base64.b64encode(array.tobytes()).decode())
        for name, array in arrays.items()
    }
    return {"image_data": [ARRAYS + json.dumps(content)]}


def read_reply(
    where: str, reply: object, sampling: GenerationRequest, *, routed: RoutedLayers | None = None
) -> tuple[Completion, str]:
    """Return the completion of a reply, with its text, and the stop string that ended it.

    Raises RunFailedError if the reply does not fit the request. Log-probabilities are over all
    tokens, or under the sampling masks if the request records masks. ``routed`` describes the
    model's blocks of experts.
    """
    try:
        read = REPLY.validate_python(reply)
    except ValidationError as error:
        raise RunFailedError(f"{where}: the answer does not have SGLang's form: {error}") from error
    tokens, meta = read.output_ids, read.meta_info
    finish, options = meta.finish_reason, sampling.options
    if finish.type == "abort" and options.masks and meta.output_token_sampling_mask is None:
        # The request was aborted while it waited for its first or a repeated prefill.
        return replace(ABORTED, masks=SampledMasks()), ""
    logprobs = [entry[0] for entry in meta.output_token_logprobs]
    if options.masks:
        logprobs = meta.output_token_sampling_logprobs or []
    versions = [span.version for span in meta.weight_versions for _ in range(span.start, span.end)]
    if [entry[1] for entry in meta.output_token_logprobs] != tokens or not (
        len(logprobs) == len(versions) == len(tokens)
    ):
        raise RunFailedError(
            f"{where}: the answer has {len(tokens)} tokens, {len(logprobs)} log-probabilities and "
            f"{len(versions)} weight versions: these counts and the token ids must match"
        )
    masks = None
    if options.masks:
        masks = _read_masks(where, tokens, meta.output_token_sampling_mask or [])
    experts = None
    if options.experts:
        assert routed is not None, "checked with the request"
        # A request that was aborted before its prefill has no experts.
        with suppress(RunFailedError) if finish.type == "abort" else nullcontext():
            experts = routed.read(where, meta.routed_experts, len(sampling.prompt) + len(tokens))
    stops = (*options.stop_token_ids, *options.stop_strings)
    if finish.type == "stop" and finish.matched not in stops:
        raise RunFailedError(
            f"{where}: the server ended a completion at {finish.matched!r}, which is not among its "
            f"stop tokens and stop strings {stops}"
        )
    if options.stop_strings and read.text is None:
        raise RunFailedError(f"{where}: an answer to a request with stop strings has no text")
    completion = Completion(
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        finish=FINISH[finish.type],
        masks=masks,
        experts=experts,
        text=read.text or "",
    )
    return completion, finish.matched if isinstance(finish.matched, str) else ""


def _read_masks(where: str, tokens: list[int], masks: list[list[int]]) -> SampledMasks:
    """Return the sampling masks that a server reports, with ascending token ids."""
    if len(masks) != len(tokens) or not all(map(contains, masks, tokens)):
        raise RunFailedError(
            f"{where}: the answer has {len(tokens)} tokens and {len(masks)} sampling masks: the "
            "numbers differ, or a mask lacks its token"
        )
    read = SampledMasks()
    for mask in masks:
        read.add(sorted(mask))
    return read


@dataclass(frozen=True, kw_only=True)
class RoutedLayers:
    """The blocks of experts of a model."""

    layers: int
    """Number of all layers, including dense layers."""
    sparse: tuple[int, ...]
    """Indices of the layers with experts, ascending."""
    experts: int
    per_token: int

    @staticmethod
    def of(config: ModelConfig | HFConfig) -> RoutedLayers | None:
        """Return the blocks of a model; None without experts, or for a model of transformers."""
        if isinstance(config, HFConfig) or config.moe is None:
            return None
        return RoutedLayers(
            layers=config.num_layers,
            sparse=tuple(sorted(config.moe.layers)),
            experts=config.moe.experts,
            per_token=config.moe.per_token,
        )

    def read(self, where: str, text: str | None, tokens: int) -> Array:
        """Return the experts of a prompt and its completion, in the form of `Completion.experts`.

        ``text`` must be int32 [tokens - 1, layers, experts of a token] in base64. Raises
        RunFailedError otherwise.
        """
        if text is None:
            raise RunFailedError(
                f"{where}: the answer has no experts; start the server with {EXPERTS_FLAG}"
            )
        try:
            numbers = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
            rows = numbers.reshape(tokens - 1, self.layers, self.per_token)[:, self.sparse]
        except (binascii.Error, ValueError) as error:
            raise RunFailedError(
                f"{where}: the experts of {tokens} tokens are not {tokens - 1} rows of "
                f"{self.per_token} in each of {self.layers} layers: {error}"
            ) from error
        ordered = np.sort(rows, -1)
        known = (ordered >= 0).all() and (ordered < self.experts).all()
        if not known or (ordered[..., 1:] == ordered[..., :-1]).any():
            raise RunFailedError(
                f"{where}: the experts of a token are not {self.per_token} of the {self.experts} "
                "experts of each layer"
            )
        flat = rows.reshape(tokens - 1, len(self.sparse) * self.per_token).astype(np.int16)
        return np.pad(flat, ((0, 1), (0, 0)), constant_values=-1)


INCOMPLETE = "\ufffd"
"""Character to which incomplete UTF-8 is decoded."""


@dataclass
class PiecewiseSampling:
    """A completion in progress, from several requests.

    The texts of the pieces are used only to find stop strings.
    """

    sampling: GenerationRequest
    pieces: list[Completion] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for piece in self.pieces for token in piece.tokens)

    def rest(self) -> GenerationRequest:
        """Return the request for the missing tokens.

        If the last piece was aborted within a character that may be part of a stop string, sampling
        begins again. If a stop string ended the piece within a character, a repetition would end
        there again. The completion then continues, and may miss a stop string with this character.
        """
        stops = self.sampling.options.stop_strings
        aborted = bool(self.pieces) and self.pieces[-1].finish == "aborted"
        if stops and aborted and self._text.endswith(INCOMPLETE):
            self.pieces.clear()
        options, tokens = self.sampling.options, self.tokens
        left = replace(
            options,
            max_new_tokens=options.max_new_tokens - len(tokens),
            min_new_tokens=max(options.min_new_tokens - len(tokens), 0),
            stop_strings=(*stops, *self._rests_of_stops()),
        )
        return replace(self.sampling, prompt=self.sampling.prompt + tokens, options=left)

    def add(self, piece: Completion, stop: str = "") -> Finish | None:
        """Add a piece that may have ended at ``stop``; return why the completion ended.

        "aborted" means that the piece was aborted. None means that the completion continues: the
        piece ended at a stop string before the minimum number of tokens, or at a suffix of a stop
        string without its prefix.
        """
        self.pieces.append(piece)
        if self._is_stopped(piece, stop):
            return "stop"
        if len(self.tokens) >= self.sampling.options.max_new_tokens:
            return "length"
        return None if stop else piece.finish

    def _is_stopped(self, piece: Completion, stop: str) -> bool:
        """Return whether the last token of the piece ends the completion.

        A server reports only one of several reasons to stop, and no reason for an aborted piece.
        """
        options, tokens, text = self.sampling.options, self.tokens, self._text
        if piece.finish == "stop" and not stop:
            return True  # the piece ended at a stop token
        if not piece.tokens or len(tokens) <= options.min_new_tokens:
            return False
        before, stops = len(text) - len(piece.text), options.stop_strings
        return (
            stop in stops
            or tokens[-1] in options.stop_token_ids
            or any(each in text[max(before - len(each) + 1, 0) :] for each in stops)
        )

    @property
    def _text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    def _rests_of_stops(self) -> list[str]:
        """Return the suffix of each stop string whose prefix ends the tokens so far."""
        text, stops = self._text, self.sampling.options.stop_strings
        cuts = ((stop, cut) for stop in stops for cut in range(1, len(stop)))
        return sorted({stop[cut:] for stop, cut in cuts if text.endswith(stop[:cut])} - {*stops})

    def completion(self, finish: Finish) -> Completion:
        read = self.sampling.options.experts and finish != "aborted"
        experts = self.pieces[-1].experts if read else None
        if read and experts is None:
            raise RunFailedError(
                f"{self.sampling.request_id}: the aborted request has no experts in its answer"
            )
        return Completion(
            tokens=self.tokens,
            logprobs=tuple(logprob for piece in self.pieces for logprob in piece.logprobs),
            versions=tuple(version for piece in self.pieces for version in piece.versions),
            finish=finish,
            masks=joined_masks(self.pieces) if self.sampling.options.masks else None,
            experts=experts,
        )

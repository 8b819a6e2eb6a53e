"""The contract for kinds of servers: requests for completions, and updates of weights."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from slurmrl.errors import RunFailedError, UsageError
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.base import GenerationRequest, WeightVersion
from slurmrl.rollouts.generation.fitness import ServedModel
from slurmrl.rollouts.generation.fp8_weights import fp8_folder
from slurmrl.rollouts.generation.image_requests import ServedPrompt
from slurmrl.rollouts.generation.weight_checks import Digest, Held, ServerCheck, WeightChecks

if TYPE_CHECKING:
    import torch

    from slurmrl.rollouts.generation.http import HttpClient

CONTROL_S: Final = 60.0
"""Seconds within which a server must pause, resume or abort. A server answers between two steps."""
FIRST_S: Final = 600.0
"""Seconds within which a server must sample its first token. The server may compile first."""


class Dialect(ABC):
    """The routes, bodies and replies of one kind of server, used through one client.

    Methods raise RunFailedError if the server cannot be reached, fails, or does not answer in time,
    and UsageError if it rejects the request itself.
    """

    where: str
    """The server's address, for messages."""

    @abstractmethod
    async def connect(self) -> int:
        """Check the kind, the version and the flags of the server before other methods are called.

        Return the maximum number of tokens of a prompt and its completion.
        """

    @abstractmethod
    async def sample(self, sampling: GenerationRequest) -> Completion:
        """Return the completion of a request with one key when the completion has ended.

        There is no time limit, because servers may be paused.
        """

    @abstractmethod
    async def abort(self, name: str) -> None:
        """Let the server end the request ``name`` and return its tokens as ``aborted``.

        Do nothing if the server does not know the name (yet).
        """

    @abstractmethod
    async def pause(self) -> None:
        """Return when no more tokens are sampled; requests wait. There is no time limit."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue sampling after ``pause``."""

    @abstractmethod
    async def version(self) -> str:
        """Return the name of the weight version that the server reports."""

    async def check_version(self, name: str) -> None:
        """Raise RunFailedError if the server does not have the version ``name``."""
        held = await self.version()
        if held != name:
            raise RunFailedError(f"{self.where}: holds version {held} instead of {name}")

    @abstractmethod
    async def load(self, version: WeightVersion) -> None:
        """Replace the weights of the paused server by the weights of ``version``.

        Clear the cache, unless requests in flight keep it. Check that the server reports the
        version. There is no time limit: the duration depends on the weights and their location.
        """

    @abstractmethod
    async def sleep(self) -> None:
        """Free the device memory of the idle server. The server's weights and caches are lost."""

    @abstractmethod
    async def wake(self) -> None:
        """Allocate the memory that `sleep` freed. The weights are undefined until `load`."""

    @abstractmethod
    async def health(self) -> None:
        """Check that the server's computing processes answer."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections. Requests in flight fail with RunFailedError."""


class HttpDialect(Dialect):
    """Base class of dialects over HTTP."""

    GENERATE: str
    """The route of completions."""

    def __init__(
        self,
        client: HttpClient,
        control: HttpClient | None = None,
        *,
        model: ServedModel,
        checks: WeightChecks | None = None,
        health_s: float = 30.0,
        stale_cache: bool = False,
        placeholders: tuple[int, ...] = (),
        quantizer: torch.device | None = None,
    ) -> None:
        """``control`` is a client with the administration key, if ``client`` has another key.

        ``model``: `connect` rejects servers of other models. ``checks``: the checks of all servers
        of this run. ``health_s``: time limit of `health` in seconds, at least the longest step.
        ``stale_cache``: requests in flight keep the caches of older weights. ``placeholders``: the
        token ids of placeholders of a model that reads images. ``quantizer``: the device that
        computes FP8 matrices for the server; None if the server gets the weights as they are.
        """
        self._client, self._control = client, control or client
        self._model = model
        self._checks = checks or WeightChecks()
        self._check: ServerCheck | None = None
        self._health_s, self._stale_cache = health_s, stale_cache
        self._placeholders = placeholders
        self._quantizer = quantizer
        self._loaded: str | None = None
        """Name of the last version that was loaded over this connection."""
        self.where = client.address.text

    def _connected(self, digest: Digest | str, dtype: object, *, first_only: bool = False) -> None:
        """Start the checks of a server with ``dtype``, whose checksums ``digest`` computes."""
        if self._quantizer is not None:
            digest = "it has matrices in FP8 (rollout.quantization)"
        how = self._checks.digest(self.where, digest, self._model.dtype, dtype)
        self._check = ServerCheck(self._checks, self.where, how, self._held, first_only=first_only)
        self._loaded = None

    @abstractmethod
    def _first(self) -> dict[str, Any]:
        """Return the body of a request for one token, as a JSON object."""

    async def _knows(self, token: int) -> bool:
        """Return whether the vocabulary has this token id.

        Servers do not report the size of the vocabulary. An unknown token in a prompt makes vLLM
        exit, while SGLang computes with the token. Both servers check the token ids of
        ``logit_bias``.
        """
        body = self._first()
        body["sampling_params"]["logit_bias"] = {str(token): 0.0}
        try:
            await self._client.post(self.GENERATE, body, timeout_s=FIRST_S)
        except UsageError as error:
            if "logit_bias" not in str(error):
                raise
            return False
        return True

    async def _with_images(self, sampling: GenerationRequest) -> GenerationRequest:
        """Return a request with its images, if the model reads images.

        Placeholders become stop tokens, because training replaces a sampled placeholder by another
        token. Raises as `ServedPrompt.of` does.
        """
        if not (tokens := self._placeholders):
            return sampling
        made = await asyncio.to_thread(ServedPrompt.of, sampling.prompt, tokens, sampling.pictures)
        stops = (*sampling.options.stop_token_ids, *tokens)
        return replace(
            sampling,
            prompt=made.tokens,
            images=made.images,
            options=replace(sampling.options, stop_token_ids=stops),
        )

    @property
    def _cache(self) -> str | None:
        """Name under which prompts share the server's cache; None if all prompts share it."""
        return self._loaded if self._stale_cache else None

    @property
    def _keeps_cache(self) -> bool:
        """Whether an update keeps the cache.

        The first update clears the cache, because another run may have filled it.
        """
        return self._stale_cache and self._loaded is not None

    async def load(self, version: WeightVersion) -> None:
        folder = version.folder
        if folder is None or not folder.is_dir():
            raise UsageError(
                f"weight version {version.name}: {folder} is not a folder with a checkpoint"
            )
        await self._ready_to_load()
        assert self._check is not None, "a server loads weights only after `connect`"
        await self._check.before_load(version)
        with ExitStack() as stack:
            if self._quantizer is not None:
                making = fp8_folder(folder, self._quantizer)
                folder = await asyncio.to_thread(stack.enter_context, making)
            await self._load(version.name, folder)
        await self.check_version(version.name)
        self._loaded = version.name
        await self._check.after_load(version)

    async def _ready_to_load(self) -> None:
        """Wait until the paused server can load weights."""

    @abstractmethod
    async def _load(self, name: str, folder: Path) -> None:
        """Load the weights of ``folder``, and let the server report this version."""

    @abstractmethod
    async def _held(self) -> Sequence[Held]:
        """Return the checksums of the server's weights."""

    async def close(self) -> None:
        if self._check is not None:
            self._check.close()
        await self._client.close()
        await self._control.close()

    async def _get(self, path: str) -> object:
        return await self._client.get(path, timeout_s=CONTROL_S)

    async def _post(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        timeout_s: float | None = CONTROL_S,
    ) -> object:
        return await self._control.post(path, body, timeout_s=timeout_s)

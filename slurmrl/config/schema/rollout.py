"""Settings of sampling, episodes, existing servers, and moves of weights to engines."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from slurmrl import env
from slurmrl.config.schema.base import (
    OWN_CODE,
    Line,
    NonNegativeInt,
    PathText,
    PlainPathText,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Section,
    Sequence,
    Text,
    Unit,
    Word,
)
from slurmrl.config.schema.cluster import JobOptions
from slurmrl.config.schema.reward import PartName
from slurmrl.errors import UsageError
from slurmrl.fsio import inputs

SINGLE_TURN: Final = "single_turn"
MULTI_TURN: Final = "multi_turn"
VERIFIERS: Final = "verifiers"
EARNS_NOTHING: Final = "tools"
"""Name of the environment whose turns earn no rewards."""
CALLS_IN_JSON: Final = "json"
"""Default of the option `format` of the environment `tools`."""
SAME_COMPLETIONS = "all completions of a prompt would be the same; use n 1, or sample"


def _check_address(text: str) -> str:
    try:
        Address(text)
    except UsageError as error:
        raise ValueError(f"an address is {ADDRESSES}") from error
    return text.rstrip("/")


def _check_stop_string(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    if any(character == "\ufffd" or "\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("must not have U+FFFD or surrogates, which stand for parts of characters")
    return text


StopString = Annotated[Text, AfterValidator(_check_stop_string)]
ServerAddress = Annotated[Word, AfterValidator(_check_address)]


def subset_sizes(n: int) -> tuple[int, ...]:
    """Return each k of pass@k and maj@k with n completions: the powers of 2 below n, and n."""
    return (*(2**power for power in range(n.bit_length()) if 2**power < n), n)


class Publish(Section):
    """Weight versions: the actor's weights as files in `versions/` of the run directory.

    Generation outside the trainers' job reads the versions. A version has the tensors of an export
    in `actor.dtype`, or with `actor.lora` only the adapters, in float32. Each start of the trainers
    first publishes a version of the step from which it continues.
    """

    every_steps: PositiveInt = 1
    """Steps between versions."""
    whole_every: PositiveInt = 10
    """Number of versions from one full version to the next. The versions between are compressed
    deltas: they contain only the bits that changed since the previous version. For deltas, the
    ranks keep a second copy of the weights in host memory. With 1, all versions are full."""
    keep_whole: PositiveInt = 2
    """Number of newest full versions to keep, with the deltas that build on these versions."""

    @property
    def copies(self) -> int:
        """Number of copies of a rank's tensors in host memory that publication needs."""
        return 2 if self.whole_every > 1 else 1


class Tasks(Section):
    """Generation in separate tasks, each on one host, that come and go during training.

    The tasks run in separate Slurm jobs, or with `rollout.gpus` in the trainers' job. Example:
    `{max: 8, max_staleness: 1}`
    """

    max: PositiveInt | None = None
    """Maximum number of tasks that run at a time. Default: the `d` of `backend`, or as many as fill
    `rollout.gpus`. Example: `8`"""
    min: PositiveInt = 1
    """Number of tasks that must have joined before the trainers request completions at each start.
    Otherwise the first task would get all prompts. `slurmrl scale` accepts 0 or at least this
    number."""
    max_staleness: Annotated[NonNegativeInt, Unit("steps")] = 1
    """Maximum staleness of a completion: the number of steps from the oldest weights that sampled
    one of its tokens to the weights that train on it. slurmrl drops staler completions. With 0,
    each step waits for completions that the current weights have sampled."""
    max_in_flight: Annotated[PositiveInt, Unit("prompts")] | None = None
    """Maximum number of prompts on which all tasks together work. Default: as many as
    `max_staleness` allows. Example: `256`"""
    interruptible: bool = True
    """Continue unfinished completions with new weights. `false` finishes each completion with the
    weights that began it."""
    stale_cache: bool = False
    """Keep the cached keys and values of older weights when a completion continues with new
    weights, instead of computing its tokens again. Requires `interruptible` and a
    `max_staleness` of at least 1."""
    orphan_s: PositiveFloat = 1800.0
    """Time without trainers after which a task exits."""

    @model_validator(mode="after")
    def _goes_on(self) -> Tasks:
        if self.stale_cache and not (self.interruptible and self.max_staleness):
            other = "max_staleness 0" if self.interruptible else "interruptible: false"
            raise ValueError(
                f"stale_cache is not allowed with {other}, which lets no completion continue with "
                "new weights"
            )
        return self


class EnvironmentChoice(Section):
    """The environment, which answers the policy's turns.

    Example: `{name: tools}`
    """

    name: Word
    """`tools` calls the tools that a turn requests, and `guess_number` is a game. `FILE.py:Class`
    or `package.module:Class` is your own environment (docs/rollouts.md). Example: `tools`"""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment. Example: `{format: json}`"""


class ToolChoice(Section):
    """A tool that the policy may call."""

    name: Word | None = None
    """`calculator`, `python` (a sandbox), or your own function or class as `FILE.py:name` or
    `package.module:name`. Default: the name under which the policy calls the tool. Example:
    `calculator`"""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the tool. Example: `{timeout_s: 5}`"""


class EpisodeSettings(Section):
    """The turns of a completion (docs/rollouts.md).

    A completion has one turn of the policy, or several turns with messages between them. The policy
    is not trained on the messages. Example: `{name: multi_turn, environment: {name: tools}, tools:
    {calculator: {}}}`
    """

    name: Word = SINGLE_TURN
    """Kind of episode.

    - `single_turn`: one turn.
    - `multi_turn`: several turns with an `environment`.
    - `verifiers`: an environment of the verifiers package.
    - `FILE.py:name` or `package.module:name`: your own function or class.

    Example: `multi_turn`"""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `verifiers` or of your own episode. Example: `{environment: my_env}`"""
    environment: EnvironmentChoice | None = None
    """The environment of `multi_turn`, which answers the policy's turns."""
    tools: dict[PartName, ToolChoice] = Field(default_factory=dict)
    """Tools by the names under which the policy calls them. Example: `{calculator: {}}`"""
    max_turns: PositiveInt = 8
    """Maximum number of the policy's turns in an episode. An episode that needs more turns ends
    unfinished."""
    max_tokens: PositiveInt | None = None
    """Maximum number of tokens of an episode after its prompt, in all turns and messages. Default:
    `max_turns` times `rollout.max_new_tokens`, which limits each turn. Example: `4096`"""
    timeout_s: PositiveFloat = 300.0
    """Time that an episode may spend outside the engine, in tools and environments. A slower
    episode fails: it is not trained on, and its reward is 0."""
    concurrency: PositiveInt = 256
    """Maximum number of episodes that each rank advances at a time. If the built-in decoder serves
    episodes, also the maximum number of sequences that one call of the model extends."""
    cache_gib: PositiveFloat | None = None
    """Memory of each rank for keys and values, if the built-in decoder serves episodes. When this
    memory is full, the newest sequence waits, and its tokens are computed again later. Default:
    four fifths of the free GPU memory when generation begins; on CPUs, the size that the sequences
    need. Example: `20`"""

    @property
    def has_turns(self) -> bool:
        """Whether completions may have several turns."""
        return self.name != SINGLE_TURN

    @property
    def cache_bytes(self) -> int | None:
        """Value of ``cache_gib`` in bytes."""
        return None if self.cache_gib is None else int(self.cache_gib * 2**30)

    @property
    def describes_tools(self) -> bool:
        """Whether chat templates may describe the tools.

        Templates ask for calls in JSON, so this is false if the environment expects a different
        format. Environments of `verifiers` have their own tools.
        """
        environment = self.environment
        calls = environment is not None and environment.name == EARNS_NOTHING
        form = environment.options.get("format", CALLS_IN_JSON) if environment and calls else None
        return bool(self.tools) and form in (None, CALLS_IN_JSON) and self.name != VERIFIERS

    @property
    def own(self) -> dict[str, str]:
        """Mapping from a setting's key to the ``package.module:name`` of the user's own code."""
        named = {"name": self.name}
        if self.environment is not None:
            named["environment.name"] = self.environment.name
        named |= {f"tools.{key}.name": tool.name or key for key, tool in self.tools.items()}
        return {key: name for key, name in named.items() if OWN_CODE.fullmatch(name)}

    @model_validator(mode="after")
    def _uses_its_settings(self) -> EpisodeSettings:
        written = self.model_fields_set - {"name"}
        changed = [
            name
            for name, field in type(self).model_fields.items()
            if name in written
            and getattr(self, name) != field.get_default(call_default_factory=True)
        ]
        if not self.has_turns and changed:
            raise ValueError(
                f"{changed[0]} is not allowed with name: {SINGLE_TURN}, which has a single turn; "
                f"choose another name ({MULTI_TURN}, verifiers, module:name)"
            )
        if self.name == MULTI_TURN and self.environment is None:
            raise ValueError(f"environment is required with name: {MULTI_TURN}")
        if self.name != MULTI_TURN and self.environment is not None:
            raise ValueError(f"environment is not allowed with name: {self.name}")
        if self.name == MULTI_TURN and self.options:
            raise ValueError(f"options is not allowed with {MULTI_TURN}; use environment.options")
        return self


class Rollout(Section):
    """Generation of completions.

    Example: `{n: 8, max_new_tokens: 1024}`
    """

    backend: Line = ""
    """Engine and layout for generation (docs/allocation.md). The actor's weights move to this
    layout before each generation. `sglang` and `vllm` need `servers`, or `python` with `gpus` or
    `tasks`. Default: the actor's engine, on its ranks. Example: `native:d4`"""
    gpus: Line = ""
    """GPUs of the trainers' job for generation. On CPUs, list numbers of workers. Required with
    `sglang` and `vllm`, unless `servers` or `tasks` are given.

    With `tasks`, list GPUs after the GPUs of the trainers' models. Tasks then run inside the
    trainers' job, the same number on each host, instead of in separate jobs. Default: from GPU 0 of
    the trainers. Example: `4-7`"""
    python: PlainPathText | None = None
    """Python of the environment in which `sglang` or `vllm` is installed. This Python may differ
    from slurmrl's, and must have the same path on all hosts. Default: none. Example:
    `/shared/sglang/bin/python`"""
    servers: Sequence[ServerAddress] = ()
    """Addresses of running `sglang` or `vllm` servers: `http://host:30000`, `https://host:30000` or
    `unix:/path`. slurmrl sends them requests and weights, but neither starts nor stops them.

    `backend` is then `sglang` or `vllm`. With `sglang:t4`, the weights are gathered on 4 of the
    trainers' GPUs instead of one. Default: slurmrl starts the servers. Example:
    `["http://node01:30000"]`"""
    server_weights: PathText | None = None
    """Folder for new weights, which `servers` and trainers see under the same path. Default: a
    folder in the run directory. Example: `/shared/weights`"""
    server_keys: PathText | None = None
    """File with the API key of `servers`. A second line may hold SGLang's admin key. Only you may
    have access to the file (mode 0600). Default: the variables SLURMRL_SERVER_KEY and
    SLURMRL_SERVER_ADMIN_KEY of the job, or no key. Example: `~/.config/slurmrl/server-keys`"""
    server_args: Sequence[Line] = ()
    """Additional arguments of each server, one word per item. These words override slurmrl's own
    arguments, including its share of GPU memory. The words must not set keys, addresses, the model,
    its layout, or files with arguments (`--config`). Example: `[--mem-fraction-static, "0.5"]`"""
    quantization: Literal["fp8"] | None = None
    """Precision of the weights of the run's own `vllm` servers (docs/engines.md#fp8).
    Training is unchanged. Default: `actor.dtype`. Example: `fp8`"""
    kv_cache_dtype: Literal["fp8_e4m3", "fp8_e5m2"] | None = None
    """Type of the keys and values in the cache of the run's own `sglang` or `vllm` servers.
    Default: `actor.dtype`. Example: `fp8_e4m3`"""
    server_start_s: PositiveFloat = 600.0
    """Time within which a server must start, and load new weights. slurmrl starts a server three
    times before the run fails. With `servers`, also the time without a usable server after which
    requests fail."""
    server_silence_s: PositiveFloat = 60.0
    """Time without an answer, to a request or to a probe, after which a server counts as hung.
    slurmrl then restarts its own server; a server in `servers` gets no more requests. This time
    must be at least the longest step of the server's model."""
    offload: bool | None = None
    """Free the memory of the generation weights while another model computes. The weights move
    again before the next generation, and servers sleep. Requires `backend`. Default: true if
    generation shares GPUs with other models."""
    tensor_parallel_size: PositiveInt | None = None
    """Ranks that share each matrix, instead of or in addition to the `t` of `backend`.
    Default: the size in `backend`, or 1. Example: `2`"""
    pipeline_parallel_size: PositiveInt | None = None
    """Stages that share the layers, instead of or in addition to the `p` of `backend`.
    Default: the size in `backend`, or 1. Example: `2`"""
    n: PositiveInt = 1
    """Completions of each prompt. A step trains on `algorithm.batch_size` times this number.
    Default: set by `algorithm.name`: 1, or more if the algorithm compares completions of a
    prompt (8 for `grpo`). Example: `8`"""
    max_new_tokens: PositiveInt = 256
    """Maximum number of tokens of a completion, or of a turn in multi-turn episodes. Example:
    `1024`"""
    min_new_tokens: NonNegativeInt = 0
    """Minimum number of tokens in a completion."""
    temperature: PositiveFloat = 1.0
    """Divisor of the logits in sampling and in the log-probabilities of the losses."""
    top_p: PositiveFraction = 1.0
    """Sample from the smallest set of tokens whose total probability is at least this value. With
    `top_k`, the set is part of these `top_k` tokens. Training with a `top_p` below 1 requires
    `top_k`. Example: `0.95`"""
    top_k: PositiveInt | None = None
    """Sample from this many of the most probable tokens; `null` uses all. Training records these
    tokens at each position and computes log-probabilities over them. For training, the maximum is
    1024, and generation by `vllm` is not supported. Example: `50`"""
    replay_experts: bool = False
    """Train the actor with the experts that generation has chosen for each token, instead of the
    experts that its routers would choose now. Requires a model with experts, and generation by
    `native`, `sglang` or the actor's engine."""
    greedy: bool = False
    """Always take the most probable token."""
    stop_token_ids: Sequence[NonNegativeInt] = ()
    """Additional tokens that end a completion. Every `eos_token_id` in the actor's
    `generation_config.json`, `config.json` and tokenizer ends a completion too. The log of the run
    lists these tokens. The reward does not see the token that ended a completion. Example:
    `[151643]`"""
    stop_strings: Sequence[StopString] = ()
    """Strings that end a completion like a stop token, once the completion has `min_new_tokens`. A
    string may begin and end within tokens. The token that completes the string is kept and trained
    on, and the reward sees its characters. Example: `["</answer>"]`"""

    publish: Publish | None = None
    """Publication of the actor's weights during training (docs/protocols.md)."""

    tasks: Tasks | None = None
    """Generate in separate tasks without the trainers. `{}` uses the defaults of all settings. With
    tasks, `backend` names the engine, the number of tasks (d) and the layout of one task. Default:
    the trainers generate."""

    slurm: JobOptions = JobOptions()

    episode: EpisodeSettings = EpisodeSettings()

    @property
    def needs_text(self) -> bool:
        """Whether servers need the tokenizer to sample completions."""
        return self.min_new_tokens > 0 or bool(self.stop_strings)

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens after a prompt, with messages between the policy's turns."""
        episode = self.episode
        if not episode.has_turns:
            return self.max_new_tokens
        return episode.max_tokens or episode.max_turns * self.max_new_tokens

    @property
    def most_written(self) -> int:
        """Maximum number of tokens that the policy writes in a completion."""
        turns = self.episode.max_turns if self.episode.has_turns else 1
        return min(turns * self.max_new_tokens, self.most_tokens)

    @model_validator(mode="after")
    def _lengths(self) -> Rollout:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens {self.min_new_tokens} exceeds max_new_tokens {self.max_new_tokens}"
            )
        if self.greedy and self.n > 1:
            raise ValueError(f"n {self.n} is not allowed with greedy: {SAME_COMPLETIONS}")
        return self


class Transfer(Section):
    """Moves of weights from the layout for training to the layout for generation."""

    verify: Literal["first", "always", "never"] = "first"
    """Moves after which all ranks compare checksums of every tensor: the first move of each start,
    all, or none. A difference stops the trainers. The error names the tensor."""
    staging_mib: PositiveInt = 256
    """Size of the buffers in which a rank sends and receives weights."""


ADDRESSES = "http://HOST:PORT, https://HOST:PORT or unix:/PATH"
MOST_KEYS = 2
MOST_KEY_BYTES = 4096
OTHER_USERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True)
class Address:
    """Address of a server: ``http://host:port``, ``https://host:port`` or ``unix:/path``."""

    text: str

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.text)
            port = parts.port
        except ValueError as error:
            message = f"server address '{self.text}': {error}; allowed: {ADDRESSES}"
            raise UsageError(message) from error
        if parts.scheme == "unix":
            valid = parts.path.startswith("/") and not parts.netloc
        else:
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and port is not None
            valid = valid and parts.path in ("", "/") and "@" not in parts.netloc
        if not valid or parts.query or parts.fragment:
            raise UsageError(f"server address '{self.text}' is not valid; allowed: {ADDRESSES}")

    @property
    def socket(self) -> str | None:
        """Path of the Unix socket; None for TCP."""
        scheme, _, path = self.text.partition(":")
        return path if scheme == "unix" else None

    def url(self, path: str) -> str:
        """Return the URL of ``/path``. For a Unix socket, the URL has a meaningless host name."""
        return (self.text.rstrip("/") if self.socket is None else "http://localhost") + path


@dataclass(frozen=True, kw_only=True)
class ServerKeys:
    """Keys that requests send as ``Authorization: Bearer KEY``; an empty key sends no header."""

    api: str = field(default="", repr=False)
    admin: str = field(default="", repr=False)
    """Key for routes that change the server, if the server has a separate key for them."""


def read_keys(path: Path | None, environ: Mapping[str, str] = os.environ) -> ServerKeys:
    """Return the keys in ``path``, which only the user may read, or in the environment if None.

    The first line of the file is the API key, and the second line, if any, is the admin key.

    Raises UsageError, and UnreadableInputError for a file that is missing or cannot be read.
    """
    if path is None:
        api, admin = (
            _checked_key(variable.get(environ), variable.name)
            for variable in (env.SERVER_KEY, env.SERVER_ADMIN_KEY)
        )
        return ServerKeys(api=api, admin=admin or api)
    try:
        status = path.stat()
    except OSError as error:
        raise inputs.unreadable(error, path) from error
    if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_KEY_BYTES:
        raise UsageError(f"{path} is not a file with a key of at most {MOST_KEY_BYTES} bytes")
    if status.st_uid != os.geteuid() or status.st_mode & OTHER_USERS:
        raise UsageError(
            f"other users may read the key in {path} (mode {stat.S_IMODE(status.st_mode):04o}, "
            f"user {status.st_uid}): own the file, and set its mode to 0600"
        )
    lines = inputs.read(path).decode("ascii", errors="replace").splitlines()
    keys = [_checked_key(line.strip(), str(path)) for line in lines if line.strip()]
    if not 1 <= len(keys) <= MOST_KEYS:
        raise UsageError(
            f"{path} has {len(keys)} lines; allowed: the API key, then optionally the admin key"
        )
    return ServerKeys(api=keys[0], admin=keys[-1])


def _checked_key(key: str, where: str) -> str:
    """Return the key. Raises UsageError for a line break, which would add headers to requests."""
    if not all("!" <= character <= "~" for character in key):
        raise UsageError(
            f"the key in {where} has spaces or other characters that a header cannot hold"
        )
    return key

"""The engines and the kinds of servers, with the capabilities and needs of each.

A new engine is a file under ``slurmrl/engines`` and one line here. The allocation grammar knows
more backends than there are engines. A backend that is not in this table parses, and is then
refused. Checks of a configuration, the doctor and the start of a server read the table of servers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from typing import Final

from slurmrl.config.allocation import Allocation
from slurmrl.config.allocation.allocation import AXIS_OF, BACKENDS
from slurmrl.errors import AllocationError


@dataclass(frozen=True)
class EngineRules:
    """The features that an engine supports.

    They include the dimensions of its layouts, and ``module:Class`` of the torch-free class whose
    ``from_hf`` rejects architectures that it cannot run.
    """

    dimensions: str
    architectures: str
    hf_architectures: str | None = None
    """The same for ``implementation: hf``; None where the engine does not have it."""
    generates: bool = True
    copies_heads: bool = True
    """Whether key and value heads are replicated when there are more tensor-parallel ranks."""
    own_experts: bool = True
    """Whether experts may have a layout of their own."""
    cpu_offload: bool = False
    adapters: bool = False
    """Whether it trains low-rank adapters of the built-in decoder."""
    transformer_engine: bool = False
    """Whether it can build its layers from TransformerEngine's modules."""
    context_heads: bool = False
    """Whether context-parallel ranks share the attention heads, which must then divide evenly."""
    records_support: bool = True
    """Whether generation can report the tokens that each one was drawn from."""
    records_experts: bool = False
    """Whether generation can report the experts that read each token."""
    records_no_experts_of: tuple[str, ...] = ()
    """Kinds of models (``model_type``) of which it cannot."""
    dense_layers: bool = True
    """Whether some layers of a model with experts may be dense."""
    experts_of_whole_sequences: bool = True
    """Whether it trains experts on several tensor ranks without sequence parallelism."""
    module: str = ""
    """Module that it needs beside slurmrl's own dependencies; of servers, in their own Python."""
    install: str = ""
    """Command that installs the module."""
    needs_gpu: bool = False

    def records_experts_of(self, kind: object) -> bool:
        """Whether generation can report the experts of models with this ``model_type``."""
        return self.records_experts and kind not in self.records_no_experts_of


FSDP: Final = EngineRules(
    "dtc",
    "slurmrl.models.config:ModelConfig",
    hf_architectures="slurmrl.models.hf_config:HFConfig",
    own_experts=False,
    cpu_offload=True,
    adapters=True,
    context_heads=True,
    records_experts=True,
)
"""FSDP2 around the built-in decoder; ``archon`` is another name for it."""
EXPERTS_NEED: Final[Mapping[str, object]] = {
    "disaggregation_mode": "null",
    "enable_flexkv": False,
    "enable_hierarchical_cache": False,
    "enable_lmcache": False,
    "enable_two_batch_overlap": False,
    "enable_unified_cache_external_linker": False,
    "pp_size": 1,
    "radix_cache_backend": None,
    "speculative_algorithm": None,
}
"""What settings of SGLang must be where it reports experts. Other values bring keys and values into
the cache, or move them, without the experts beside them, or leave out layers: the server would
report those of other tokens."""
SERVERS: Final = EngineRules("dt", "slurmrl.models.config:ModelConfig", own_experts=False)
"""The leader of each data-parallel copy keeps a server on the GPUs of its tensor ranks."""
ENGINES: Final = {
    "fsdp": FSDP,
    "archon": FSDP,
    "megatron": EngineRules(
        "dtpce",
        "slurmrl.engines.megatron.parts:MegatronModel",
        generates=False,
        copies_heads=False,
        transformer_engine=True,
        context_heads=True,
        experts_of_whole_sequences=False,
        module="megatron.core",
        install="pip install megatron-core==0.16.1",
        needs_gpu=True,
    ),
    "sglang": replace(
        SERVERS,
        records_experts=True,
        records_no_experts_of=("mixtral",),
        dense_layers=False,
        module="sglang",
    ),
    "vllm": replace(
        SERVERS,
        records_support=False,
        module="vllm",
    ),
    "native": EngineRules(
        "dt",
        "slurmrl.models.config:ModelConfig",
        hf_architectures="slurmrl.models.hf_config:HFConfig",
        own_experts=False,
        records_experts=True,
    ),
}


def able(supports: Callable[[EngineRules], object], *, trains: bool | None = None) -> list[str]:
    """Return the names of the engines that support something.

    ``trains`` selects engines that train or do not; None selects all.
    """
    return [
        name
        for name, rules in ENGINES.items()
        if supports(rules) and trains in (None, BACKENDS[name].trains)
    ]


def known_backends(*, trains: bool) -> list[str]:
    """Return the names of the backends that train, or that only generate.

    The names come with and without an engine.
    """
    return [name for name, backend in BACKENDS.items() if backend.trains == trains]


def rules_of(allocation: Allocation) -> EngineRules:
    """The rules of an allocation's engine.

    Raises AllocationError for a backend or a dimension without an engine.
    """
    rules = ENGINES.get(allocation.backend)
    if rules is None:
        trains = BACKENDS[allocation.backend].trains
        others = ", ".join(able(lambda _: True, trains=trains))
        raise AllocationError(
            f"'{allocation}': there is no engine for {allocation.backend} in this version; "
            f"allowed: {others}"
        )
    for letter, axis in AXIS_OF.items():
        if allocation.sizes[axis] > 1 and letter not in rules.dimensions:
            split = [name for name, other in ENGINES.items() if letter in other.dimensions]
            hint = f" ({', '.join(split)} does)" if split else ""
            raise AllocationError(
                f"'{allocation}': the {allocation.backend} engine of this version does not split "
                f"'{letter}'{hint}; allowed: {', '.join(rules.dimensions)}"
            )
    if allocation.experts is not None and not rules.own_experts:
        raise AllocationError(
            f"'{allocation}': with {allocation.backend}, experts have the layout of the rest of "
            "the model; write one layout instead of (attn:…|ffn:…)"
        )
    return rules


LEAST: Final = len("--tp")
"""argparse also knows a flag by its beginning; no shorter one is looked for."""


def last_value(arguments: Sequence[str], flags: Collection[str]) -> str | None:
    """Return the value of the last argument that is one of the flags, as argparse reads it.

    The value follows `=` or is the next word. A flag may have `_` for `-`, and may be a beginning
    of its name. Return None without such an argument.
    """
    words = [part for argument in arguments for part in argument.split("=", 1)]
    found = [value for word, value in pairwise(words) if any(is_flag(word, flag) for flag in flags)]
    return found[-1] if found else None


def is_flag(word: str, flag: str) -> bool:
    """Return whether argparse reads a word of a command line as a flag."""
    word = word.replace("_", "-")
    return word == flag or (word.startswith("--") and len(word) >= LEAST and flag.startswith(word))


EXPERTS_FLAG: Final = "--enable-return-routed-experts"
"""Flag with which SGLang reports the experts of each token."""
VLLM_FLAGS: Final = ("--enable-scale-out", "--logprobs-mode", "processed_logprobs")
"""Without these a server rejects requests, or reports log-probabilities before temperature."""
RETRACTING_SGLANG: Final = (0, 5, 22)
"""0.5.20 cannot empty its cache while requests wait; 0.5.21 may queue one twice (DP attention)."""
RETRACTING_NEEDS: Final[Mapping[str, object]] = {
    **EXPERTS_NEED,
    "enable_hisparse": False,
    "enable_pdmux": False,
    "max_queued_requests": None,
    "tokenizer_worker_num": 1,
}
"""Settings that retracting needs. With other values a server may still compute, move keys and
values, or get an update before the pause, so its cache could not be emptied; or it may reject its
own requests."""
KEY: Final = "all users of the host could read the key, and a Unix socket of your own needs none"
ADDRESS: Final = "slurmrl chooses where the server listens"
MODEL: Final = "the server has the actor, and gets its weights from slurmrl"
LAYOUT: Final = "rollout.backend says over how many GPUs a server is spread"
CONFLICTS: Final[Mapping[str, str]] = {
    "--config": (
        "its file could set what rollout.server_args must not; write its settings there as "
        "arguments"
    ),
    "--api-key": KEY,
    **dict.fromkeys(("--host", "--port"), ADDRESS),
    **dict.fromkeys(("--model", "--load-format"), MODEL),
    **dict.fromkeys(
        ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"), LAYOUT
    ),
}
"""Flags that conflict with slurmrl in every kind of server, and the reasons."""


@dataclass(frozen=True, kw_only=True)
class ServerRules:
    """What is known of one kind of server."""

    title: str
    """Its name in messages."""
    oldest: tuple[int, ...]
    """The first version that works."""
    newest: tuple[int, ...]
    """The last version that was tested."""
    words: tuple[str, ...]
    """Routes in quotes, and names of settings behind flags, that its source must contain."""
    to_sleep: tuple[str, ...] = ()
    """Modules that it needs to free the memory of GPUs, as ``import NAME``."""
    least_temperature: float
    """Below this it samples at another temperature than requests ask for, without an error."""
    conflicts: Mapping[str, str]
    """Flags that ``rollout.server_args`` must not have, and the reasons."""
    experts_conflicts: Mapping[str, str] = field(default_factory=dict)
    """Further flags that it must not have with ``rollout.replay_experts``."""
    stale_cache_conflicts: Mapping[str, str] = field(default_factory=dict)
    """Further flags that it must not have with ``rollout.tasks.stale_cache``."""

    @property
    def routes(self) -> tuple[str, ...]:
        """Routes that it must have."""
        return tuple(word.strip('"') for word in self.words if word.startswith('"/'))

    @property
    def tested(self) -> str:
        """The tested versions, for messages."""
        return " to ".join(".".join(map(str, each)) for each in (self.oldest, self.newest))

    def is_older(self, version: str) -> bool:
        """Return whether a version is too old."""
        return numbers_of(version) < self.oldest

    def is_newer(self, version: str) -> bool:
        """Return whether a version is newer than the tested ones."""
        return numbers_of(version)[: len(self.newest)] > self.newest


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: (0, 5, 20) of ``0.5.20.post1``."""
    return tuple(map(int, takewhile(str.isdigit, version.split("."))))


SERVER_KINDS: Final[Mapping[str, ServerRules]] = {
    "sglang": ServerRules(
        title="SGLang",
        oldest=(0, 5, 20),
        newest=(0, 5, 23),
        words=(
            '"/generate"',
            '"/server_info"',
            '"/model_info"',
            '"/abort_request"',
            '"/pause_generation"',
            '"/continue_generation"',
            '"/update_weights_from_disk"',
            '"/flush_cache"',
            '"/release_memory_occupation"',
            '"/resume_memory_occupation"',
            "enable_priority_scheduling",
            "schedule_low_priority_values_first",
            "disable_priority_preemption",
            "sampling_mask_max_tokens",
            "enable_return_routed_experts",
            "enable_memory_saver",
            "log_level_http",
            "SGLANG_USE_PICKLE_IPC",
        ),
        to_sleep=("import torch_memory_saver",),
        least_temperature=1e-6,
        conflicts={
            **CONFLICTS,
            "--admin-api-key": KEY,
            "--model-path": MODEL,
            **dict.fromkeys(("--tp-size", "--pp-size", "--dp-size"), LAYOUT),
            "--enable-custom-logit-processor": "the server would run code that requests carry",
        },
        experts_conflicts=dict.fromkeys(
            (f"--{name.replace('_', '-')}" for name in EXPERTS_NEED),
            "with rollout.replay_experts: the server would report the experts of other tokens",
        ),
        stale_cache_conflicts={
            "--enable-pdmux": (
                "with rollout.tasks.stale_cache: the server would draw while it reads weights"
            )
        },
    ),
    "vllm": ServerRules(
        title="vLLM",
        oldest=(0, 32),
        newest=(0, 33),
        words=(
            '"/inference/v1/generate"',
            '"/inference/v1/abort_requests"',
            '"/server_info"',
            '"/pause"',
            '"/resume"',
            '"/collective_rpc"',
            '"/reset_prefix_cache"',
            '"/update_weight_version"',
            '"/weight_info"',
            '"/sleep"',
            '"/wake_up"',
            '"keep"',
            "def update_config",
            "def reload_weights",
            "disable_uvicorn_access_log",
            "enable_scale_out",
            "enable_sleep_mode",
            "processed_logprobs",
            "VLLM_SERVER_DEV_MODE",
        ),
        least_temperature=0.01,
        conflicts={
            **CONFLICTS,
            "--uds": ADDRESS,
            **dict.fromkeys(("-tp", "-pp", "-dp"), LAYOUT),
            "--logprobs-mode": "log-probabilities have to be those of the distribution drawn from",
        },
    ),
}
"""By the name of the backend."""

"""The engines and the kinds of servers, with their capabilities and requirements.

To add an engine, add a package to ``slurmrl/engines``, a line to ENGINES, and its name to rows of
CAPABILITIES. The checks of a configuration, `slurmrl doctor` and the start of servers read the
table of servers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Final, NamedTuple

from slurmrl.config.allocation import Allocation
from slurmrl.config.allocation.allocation import AXIS_OF, BACKENDS
from slurmrl.errors import AllocationError

HF: Final = "hf"
"""Name of models of transformers (``implementation: hf``) in the table of capabilities."""
FSDP: Final = ("fsdp",)
EVERY: Final = tuple(BACKENDS)
TRAINING: Final = tuple(name for name, backend in BACKENDS.items() if backend.trains)
GENERATING: Final = tuple(name for name in EVERY if name not in TRAINING)
BUILT_IN: Final = (*FSDP, "native")
"""Engines that generate with the built-in decoder."""


class Capability(NamedTuple):
    """An ability that only some engines have."""

    engines: tuple[str, ...]
    lack: str
    """Sentence about an engine without the ability; messages add the subject."""


CAPABILITIES: Final[Mapping[str, Capability]] = {
    "training": Capability(TRAINING, "only generates"),
    "rollouts": Capability(GENERATING, "is for training"),
    "generation": Capability((*BUILT_IN, "sglang", "vllm", HF), "cannot generate"),
    "transformers": Capability((*BUILT_IN, "sglang", "vllm"), "runs only its own models"),
    "cpu_offload": Capability((*FSDP, HF), "cannot keep weights and optimizer state on the CPU"),
    "transformer_engine": Capability(
        ("megatron", HF), "does not build layers from TransformerEngine"
    ),
    "fp8": Capability(("megatron",), "does not compute in FP8"),
    "adapters": Capability((*FSDP, HF), "does not train adapters"),
    "averages": Capability((*FSDP, HF), "keeps no float32 weights of a frozen model"),
    "cache_limit": Capability(BUILT_IN, "has no cache whose size can be limited"),
    "masks": Capability(
        (*BUILT_IN, "sglang", HF),
        "does not report the sampling mask of each token, which the losses need",
    ),
    "experts": Capability((*BUILT_IN, "sglang", HF), "does not record the experts of this model"),
    "experts of mixtral": Capability((*BUILT_IN, HF), "does not record the experts of mixtral"),
    "experts of gpt_oss": Capability((*BUILT_IN, HF), "does not record the experts of gpt_oss"),
    "dense_layers": Capability(
        (*TRAINING, "native", "vllm", HF),
        "gives every layer experts, with weights that the actor does not have",
    ),
    "expert_layout": Capability(
        ("megatron",),
        "gives experts the layout of the rest of the model: "
        "write one layout instead of (attn:…|ffn:…)",
    ),
    "whole_sequences": Capability(
        (*FSDP, *GENERATING),
        "trains experts on several tensor ranks only with sequence parallelism",
    ),
    "split_biases": Capability(
        (*FSDP, *GENERATING, HF),
        "does not split experts with biases over tensor ranks: give them their own layout with t1 "
        "((attn:…|ffn:…))",
    ),
    "head_copies": Capability((*FSDP, *GENERATING), "does not copy heads of keys and values"),
}
"""Mapping from names to capabilities of engines, the only source for checks and messages."""


def can(engine: str, capability: str) -> bool:
    """Return whether an engine has a capability."""
    return engine in CAPABILITIES[capability].engines


def lacking(engine: str, capability: str) -> str:
    """Return why an engine lacks a capability, and which engines have it; empty if it has it.

    Name only engines for the same task (training or generation) if there are any.
    """
    engines, lack = CAPABILITIES[capability]
    if engine in engines:
        return ""
    if engine == HF:
        return f"implementation hf {lack}; allowed: builtin"
    trains, able = engine in TRAINING, [name for name in engines if name != HF]
    others = [name for name in able if (name in TRAINING) == trains] or able
    return f"{engine} {lack}; allowed backends: {', '.join(others)}"


@dataclass(frozen=True)
class EngineRules:
    """The layouts, models and packages of an engine."""

    dimensions: str
    """Letters of the axes of the engine's layouts."""
    architectures: str
    """``module:Class`` of the torch-free class whose ``from_hf`` rejects architectures that the
    engine cannot run."""
    module: str = ""
    """Module that the engine needs in addition to slurmrl's dependencies."""
    install: str = ""
    """Command that installs the module."""
    needs_gpu: bool = False


DECODER: Final = "slurmrl.models.architecture:ModelConfig"
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
"""Settings that SGLang must have to report experts. With other values, SGLang fills or moves
KV-cache entries without their expert records, or skips layers. SGLang would then report experts of
other tokens."""
ENGINES: Final = {
    **dict.fromkeys(FSDP, EngineRules("dtc", DECODER)),
    "megatron": EngineRules(
        "dtpce",
        "slurmrl.engines.megatron.parts:MegatronModel",
        module="megatron.core",
        install="pip install megatron-core==0.16.1",
        needs_gpu=True,
    ),
    "sglang": EngineRules("dt", DECODER, module="sglang"),
    "vllm": EngineRules("dt", DECODER, module="vllm"),
    "native": EngineRules("dt", DECODER),
}
"""Mapping from an engine's name to its rules. The first rank of each data-parallel copy runs a
server on the GPUs of the copy's tensor ranks."""


def rules_of(allocation: Allocation) -> EngineRules:
    """Return the rules of an allocation's engine.

    Raises AllocationError for a layout that the engine cannot run.
    """
    rules = ENGINES[allocation.backend]
    for letter, axis in AXIS_OF.items():
        if allocation.sizes[axis] > 1 and letter not in rules.dimensions:
            trains = allocation.backend in TRAINING
            others = ((name, ENGINES[name]) for name in (TRAINING if trains else GENERATING))
            split = [name for name, other in others if letter in other.dimensions]
            hint = f" ({', '.join(split)} does)" if split else ""
            raise AllocationError(
                f"'{allocation}': the {allocation.backend} engine of this version does not split "
                f"'{letter}'{hint}; allowed: {', '.join(rules.dimensions)}"
            )
    if allocation.experts is not None and (reason := lacking(allocation.backend, "expert_layout")):
        raise AllocationError(f"'{allocation}': {reason}")
    return rules


LEAST: Final = len("--tp")
"""Minimum length of an abbreviated flag that argparse accepts."""


def last_value(arguments: Sequence[str], flags: Collection[str]) -> str | None:
    """Return the value of the last of these flags in the arguments; None without such a flag.

    As in argparse, the value follows `=` or a letter (`-qfp8`), or is the next word. A flag may
    have `_` for `-` and may be abbreviated.
    """
    parted = (re.sub(r"(?<=^-\w)(?=\w)", "=", argument) for argument in arguments)
    words = [part for argument in parted for part in argument.split("=", 1)]
    found = [value for word, value in pairwise(words) if any(is_flag(word, flag) for flag in flags)]
    return found[-1] if found else None


def is_flag(word: str, flag: str) -> bool:
    """Return whether argparse reads a word of a command line as a flag."""
    word = word.replace("_", "-")
    return word == flag or (word.startswith("--") and len(word) >= LEAST and flag.startswith(word))


EXPERTS_FLAG: Final = "--enable-return-routed-experts"
"""Flag with which SGLang reports the experts of each token."""
VLLM_FLAGS: Final = ("--enable-scale-out", "--logprobs-mode", "processed_logprobs")
"""Flags without which a server rejects requests or reports log-probabilities of temperature 1."""
VLLM_IMAGE_FLAGS: Final = (
    "--no-mm-device-do-normalize",
    *("--mm-processor-cache-gb", "0"),
    *("--limit-mm-per-prompt", '{"video": 0}'),
)
"""Flags for a model that reads images. Requests carry normalized pixels: the model must not
normalize them again, and the server need not keep them. No memory is reserved for videos."""
LEAST_HEAD: Final = 32
"""Minimum dimensions of an attention head for which vLLM has kernels on CPUs."""
RETRACTING_SGLANG: Final = (0, 5, 22)
"""First version of SGLang that can retract requests. 0.5.20 cannot empty its cache while requests
wait, and 0.5.21 may queue a request twice with DP attention."""
RETRACTING_NEEDS: Final[Mapping[str, object]] = {
    **EXPERTS_NEED,
    "enable_hisparse": False,
    "enable_pdmux": False,
    "max_queued_requests": None,
    "tokenizer_worker_num": 1,
}
"""Settings that SGLang must have to retract requests. With other values, a server may compute or
move keys and values during the pause, so that its cache cannot be emptied. The server may also
reject its own requests."""
KEY: Final = "all users of the host could read the key; slurmrl's Unix socket needs no key"
ADDRESS: Final = "slurmrl chooses the server's address"
MODEL: Final = "the server runs the actor, whose weights slurmrl sends"
LAYOUT: Final = "rollout.backend sets the number of GPUs of a server"
CONFLICTS: Final[Mapping[str, str]] = {
    "--config": (
        "a file could set options that slurmrl sets itself; write the settings of the file into "
        "rollout.server_args"
    ),
    "--api-key": KEY,
    **dict.fromkeys(("--host", "--port"), ADDRESS),
    **dict.fromkeys(("--model", "--load-format"), MODEL),
    **dict.fromkeys(
        ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"), LAYOUT
    ),
}
"""Mapping from a flag that slurmrl rejects for every kind of server to the reason."""


@dataclass(frozen=True, kw_only=True)
class ServerRules:
    """Versions, routes and flags of one kind of server."""

    title: str
    """Name of the server in messages."""
    oldest: tuple[int, ...]
    """First version that works."""
    newest: tuple[int, ...]
    """Last version that was tested."""
    words: tuple[str, ...]
    """Strings that the server's source must contain: routes in quotes, and names of settings."""
    to_sleep: tuple[str, ...] = ()
    """Import statements of modules that the server needs to free GPU memory."""
    least_temperature: float
    """Minimum temperature. For lower values, the server silently samples at a different one."""
    conflicts: Mapping[str, str]
    """Mapping from a flag that ``rollout.server_args`` must not have to the reason."""
    experts_conflicts: Mapping[str, str] = field(default_factory=dict)
    """Additional ``conflicts`` with ``rollout.replay_experts``."""
    stale_cache_conflicts: Mapping[str, str] = field(default_factory=dict)
    """Additional ``conflicts`` with ``rollout.tasks.stale_cache``."""
    image_conflicts: Mapping[str, str] = field(default_factory=dict)
    """Additional ``conflicts`` with images."""

    @property
    def routes(self) -> tuple[str, ...]:
        """Routes that the server must have."""
        return tuple(word.strip('"') for word in self.words if word.startswith('"/'))

    @property
    def tested(self) -> str:
        """Range of the tested versions, for messages."""
        return " to ".join(".".join(map(str, each)) for each in (self.oldest, self.newest))

    def is_older(self, version: str) -> bool:
        """Return whether a version is too old."""
        return numbers_of(version) < self.oldest

    def is_newer(self, version: str) -> bool:
        """Return whether a version is newer than all tested versions."""
        return numbers_of(version)[: len(self.newest)] > self.newest


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version: (0, 5, 20) for ``0.5.20.post1``."""
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
            "with rollout.replay_experts: the server would report experts for the wrong tokens",
        ),
        stale_cache_conflicts={
            "--enable-pdmux": (
                "with rollout.tasks.stale_cache: the server would sample while it loads weights"
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
            "--logprobs-mode": "log-probabilities must be relative to the sampling distribution",
        },
        image_conflicts=dict.fromkeys(
            ("--mm-device-do-normalize", "--mm-processor-cache-gb"),
            "slurmrl sends the pixels of images already normalized",
        ),
    ),
}
"""Mapping from a backend's name to its rules."""

"""Invalid configurations: each gives one message, at the invalid key."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from slurmrl.errors import ConfigError, Problem
from slurmrl.plan.settings import Settings
from tests.unit.plan.conftest import EXPERTS, LARGE, memory_problems

Load = Callable[..., Settings]
ARCHITECTURE = LARGE
MIXTRAL = {**LARGE, "model_type": "mixtral", "num_local_experts": 4}
MEGATRON = "actor.backend=megatron:"


class Wrong(NamedTuple):
    overrides: tuple[str, ...]
    key: str
    message: str
    architecture: dict[str, Any] = ARCHITECTURE


def wrong(
    key: str, message: str, *overrides: str, architecture: dict[str, Any] = ARCHITECTURE
) -> Wrong:
    return Wrong(overrides, key, message, architecture)


BACKEND = "actor.backend"
KINDS = {
    "n of no generation": wrong(
        "rollout.n",
        "4 is not allowed: sft does not generate in training (see evaluation.n)",
        *("algorithm={name: sft, batch_size: 16}", "critic=", "ref=", "rollout.n=4"),
        "dataset.type=prompt_answer",
    ),
    "group of one": wrong(
        "rollout.n",
        "1 is not allowed with algorithm.advantage: group",
        "algorithm.advantage=group",
    ),
    "measure of another dataset": wrong(
        "algorithm.measure",
        "'likelihood' is not allowed with a dataset of type prompt; allowed: completions",
        "algorithm={name: evaluate, batch_size: 16, measure: likelihood}",
        *("critic=", "ref=", "evaluation="),
    ),
    "std of one": wrong(
        "rollout.n",
        "1 is not allowed with algorithm.advantage_std: group",
        *("algorithm.advantage=batch", "algorithm.advantage_std=group"),
    ),
    "buffer beyond the completion": wrong(
        "algorithm.overlong_buffer",
        "300 is not allowed: it is a part of rollout.max_new_tokens, 256",
        "algorithm.overlong_buffer=300",
    ),
    "stop strings of a transformers' model": wrong(
        "rollout.stop_strings",
        "is not allowed with actor.implementation hf: it generates whole batches",
        "actor.implementation=hf", "rollout.stop_strings=[stop]",
    ),
    "an empty stop string": wrong(
        "rollout.stop_strings.1", "must not be empty", 'rollout.stop_strings=[stop, ""]'
    ),
    "half of a character as a stop string": wrong(
        "rollout.stop_strings.0", "must not have U+FFFD or surrogates",
        r'rollout.stop_strings=["\ufffd"]',
    ),
    "one stop string, not a list": wrong(
        "rollout.stop_strings", "must be a list", "rollout.stop_strings=stop"
    ),
    "versions of no training": wrong(
        "rollout.publish", "is not allowed: generate trains no actor whose weights change",
        *("algorithm={name: generate, batch_size: 16}", "critic=", "ref=", "evaluation="),
        "rollout.publish={every_steps: 2}",
    ),
    "versions every 0 steps": wrong(
        "rollout.publish.every_steps", "0 is not allowed: must be greater than 0",
        "rollout.publish={every_steps: 0}",
    ),
    "settings of turns without turns": wrong(
        "rollout.episode", "max_turns is not allowed with name: single_turn",
        "rollout.episode={max_turns: 3}",
    ),
    "an unknown episode": wrong(
        "rollout.episode.name",
        "'multi_trun' is not allowed; did you mean 'multi_turn'? allowed: multi_turn, single_turn, "
        "verifiers, or module:name of your own",
        "rollout.episode={name: multi_trun}",
    ),
    "an unknown environment": wrong(
        "rollout.episode.environment.name",
        "'guess' is not allowed; allowed: guess_number, tools, or module:name of your own",
        "rollout.episode={name: multi_turn, environment: {name: guess}}",
    ),
    "an unknown tool": wrong(
        "rollout.episode.tools.calc",
        "'calc' is not allowed; allowed: calculator, python, or module:name of your own",
        "rollout.episode={name: multi_turn, environment: {name: tools}, tools: {calc: {}}}",
    ),
    "a tool without a name": wrong(
        "dataset.tools.0", "must be the JSON schema of a tool: {function: {name: NAME, …}}",
        "dataset.tools=[{type: function, function: {}}]",
    ),
    "tools of prompts without a chat template": wrong(
        "dataset.tools", "is not allowed without a chat template: set chat_template to true",
        "dataset.tools=[{function: {name: add}}]",
    ),
    "an environment of tools without any": wrong(
        "rollout.episode.tools", "is required with environment 'tools'",
        "rollout.episode={name: multi_turn, environment: {name: tools}}",
    ),
    "an environment without a reward": wrong(
        "reward", "is required: environment 'tools' gives no rewards",
        "rollout.episode={name: multi_turn, environment: {name: tools}, tools: {calculator: {}}}",
        "reward=",
    ),
    "a cache for less than a sequence": wrong(
        "rollout.episode.cache_gib",
        "1e-06 is not allowed: the longest sequence, ",
        "rollout.episode={name: 'my:own', cache_gib: 1.0e-6}",
    ),
    "a cache of servers": wrong(
        "rollout.episode.cache_gib",
        "is not allowed with 'sglang:d4' and implementation builtin; it needs the built-in "
        "decoder (fsdp or native)",
        *("rollout.episode={name: 'my:own', cache_gib: 1}", "rollout.backend=sglang:d4"),
    ),
    "a cache of a rank of a split model for less than a sequence": wrong(
        "rollout.episode.cache_gib",
        "1e-06 is not allowed: the longest sequence, ",
        *("rollout.episode={name: 'my:own', cache_gib: 1.0e-6}", "rollout.backend=native:d2t2"),
    ),
    "a cache without turns": wrong(
        "rollout.episode", "cache_gib is not allowed with name: single_turn",
        "rollout.episode={cache_gib: 1}",
    ),
    "several turns without an environment": wrong(
        "rollout.episode", "environment is required with name: multi_turn",
        "rollout.episode={name: multi_turn}",
    ),
    "buffer beyond the turns": wrong(
        "algorithm.overlong_buffer",
        "300 is not allowed: it is a part of what the policy may write in an episode, 200",
        *("algorithm.overlong_buffer=300", "rollout.max_new_tokens=100"),
        "rollout.episode={name: 'my:own', max_turns: 2}",
    ),
    "minibatches without a prompt": wrong(
        "algorithm.n_minibatches",
        "9 is not allowed: a minibatch has at least one of the 8 prompts of batch_size",
        *("algorithm.batch_size=8", "algorithm.n_minibatches=9", "rollout.n=8"),
        *("actor.backend=fsdp:d4", "critic.backend=fsdp:d4", "algorithm.shuffle_minibatches=true"),
    ),
    "variance of one": wrong(
        "rollout.n",
        "1 is not allowed with algorithm.zero_variance: drop, which compares completions",
        "algorithm.zero_variance=drop",
    ),
    "n without chance": wrong(
        "rollout", "n 4 is not allowed with greedy", "rollout.n=4", "rollout.greedy=true"
    ),
    **{
        f"training on completions of {field}": wrong(
            f"rollout.{field}",
            f"{value} is not allowed with ppo: its losses assume",
            f"rollout.{field}={value}",
        )
        for field, value in {"greedy": "true", "min_new_tokens": "2"}.items()
    },
    "supports without a bound": wrong(
        "rollout.top_p",
        "0.9 is not allowed without rollout.top_k, which bounds the tokens that are recorded",
        "rollout.top_p=0.9",
    ),
    "supports of half a vocabulary": wrong(
        "rollout.top_k", "5000 is not allowed with ppo: so many token ids", "rollout.top_k=5000"
    ),
    "supports that the engine does not report": wrong(
        "rollout.top_k",
        "20 is not allowed with vllm and ppo: it does not report the tokens",
        *("rollout.top_k=20", "rollout.backend=vllm:d2"),
    ),
    **{
        f"experts with {name}": wrong(
            "rollout.replay_experts",
            f"true is not allowed: {message}",
            *("rollout.replay_experts=true", *overrides),
            architecture=architecture,
        )
        for name, message, overrides, architecture in (
            ("a dense model", "the actor has no experts", (), ARCHITECTURE),
            (
                "vllm",
                "vllm does not record the experts of qwen3_moe; rollout.backend may be sglang or "
                "native",
                ("rollout.backend=vllm:d2",),
                EXPERTS,
            ),
            (
                "a kind of models of sglang",
                "sglang does not record the experts of mixtral; rollout.backend may be native",
                ("rollout.backend=sglang:d2",),
                MIXTRAL,
            ),
        )
    },
    "an actor that never trains": wrong(
        "total_steps",
        "5 is not allowed: the first 5 steps do not train actor",
        "total_steps=5",
        "algorithm.critic_warmup_steps=5",
    ),
    "no such backend": wrong(BACKEND, "did you mean 'megatron'", "actor.backend=megatrom:d2"),
    "no backend": wrong(BACKEND, "unknown backend 'd4t2'", "actor.backend=d4t2"),
    "tasks of no training": wrong(
        "rollout.tasks", "is not allowed: generate does not train on completions",
        *("algorithm={name: generate, batch_size: 16}", "critic=", "ref=", "evaluation="),
        "rollout.tasks={}",
    ),
    "options of no tasks": wrong(
        "rollout.slurm", "is not allowed without rollout.tasks",
        "rollout.slurm.partition=preemptible",
    ),
    "tasks that are warned at once": wrong(
        "rollout.slurm", "signal_lead_s 120 (seconds) must be shorter than time 2:",
        "rollout.tasks={}", "rollout.slurm.time=2",
    ),
    "two generations in tasks": wrong(
        "rollout.tasks",
        "is not allowed: remax generates 2 times in a step (actor_gen, greedy_gen)",
        *("algorithm={name: remax, batch_size: 64}", "critic=", "rollout.tasks={}"),
    ),
    "two numbers of tasks": wrong(
        "rollout.tasks.max", "3 is not allowed: rollout.backend 'native:d2' says 2 tasks",
        "rollout.tasks={max: 3}", "rollout.backend=native:d2",
    ),
    "a task of too many ranks": wrong(
        "rollout.backend", "t5 does not divide num_attention_heads",
        "rollout.tasks={max: 2}", "rollout.backend=native:t5",
    ),
    "weights too rarely for tasks": wrong(
        "rollout.tasks.max_staleness", "0 is not allowed: weights are published every 3 steps",
        "rollout.tasks={max_staleness: 0}", "rollout.publish={every_steps: 3}",
    ),
    "tasks on GPUs of the trainers": wrong(
        "rollout.gpus", "the trainers have GPUs 0-1, tasks those behind; write 2-3",
        "actor.backend=fsdp:d2", "rollout.tasks={max: 2}", "rollout.gpus=0-1",
    ),
    "tasks that do not fill the hosts": wrong(
        "rollout.gpus", "no number of hosts with 8 GPUs has equal shares of 8,",
        "actor.backend=fsdp:d8", "rollout.tasks={}", "rollout.gpus=8-10",
    ),
    "hosts with different tasks": wrong(
        "cluster.workers_per_host", "and of 2 rollout tasks with 1 GPU each",
        "actor.backend=fsdp:d4", "rollout.tasks={}", "rollout.gpus=4-5",
        "cluster={workers_per_host: 2}",
    ),
    "array options of tasks inside": wrong(
        "rollout.slurm", "is not allowed with rollout.gpus",
        "actor.backend=fsdp:d2", "rollout.tasks={}", "rollout.gpus=2-3",
        "rollout.slurm.time=30",
    ),
    "repeated dimension": wrong(BACKEND, "'d' is repeated", "actor.backend=fsdp:d2d4"),
    "dimension of another": wrong(BACKEND, "fsdp has no dimension 'p'", "actor.backend=fsdp:d2p2"),
    "open parenthesis": wrong(BACKEND, "expected ')'", f"{MEGATRON}(attn:d4|ffn:d4"),
    "halves of two sizes": wrong(BACKEND, "the same number", f"{MEGATRON}(attn:d4|ffn:d2)"),
    "e does not divide": wrong(BACKEND, "e3 does not divide", f"{MEGATRON}d4e3"),
    "engine alone": wrong(BACKEND, "expected ':'", "actor.backend=megatron"),
    "components": wrong(BACKEND, "expected a single allocation", "actor.backend=fsdp:d2+fsdp:d2"),
    "older spelling": wrong(BACKEND, "unknown backend 'd2m2p2'", "actor.backend=d2m2p2"),
    "actor cannot train": wrong(BACKEND, "sglang only generates", "actor.backend=sglang:d2"),
    "critic's string": wrong("critic.backend", "at character 6", "critic.backend=fsdp:x2"),
    "rollout's string": wrong("rollout.backend", "no dimension 'e'", "rollout.backend=sglang:d2e2"),
    "copy over hosts": wrong("rollout.backend", "a host has 8", "rollout.backend=vllm:t8p2"),
    "copy over small hosts": wrong(
        "rollout.backend", "a host has 2", "rollout.backend=vllm:t4", "cluster.workers_per_host=2"
    ),
    "offload of another": wrong(
        "actor.cpu_offload",
        "true is not allowed with megatron; allowed backends: fsdp, archon",
        *(f"{MEGATRON}d8", "actor.cpu_offload=true"),
    ),
    "modules of another": wrong(
        "critic.transformer_engine",
        "true is not allowed with fsdp; allowed backends: megatron",
        *("critic.backend=fsdp:d8", "critic.transformer_engine=true"),
    ),
    "rollout's heads": wrong(
        "rollout.backend", "does not divide num_attention_heads 8", "rollout.backend=sglang:t3"
    ),
    "heads": wrong(BACKEND, "t3 does not divide num_attention_heads 8", f"{MEGATRON}t3"),
    "kv heads": wrong(
        BACKEND,
        "neither divides num_key_value_heads 6",
        "actor.backend=fsdp:t4",
        architecture={**LARGE, "num_attention_heads": 12, "num_key_value_heads": 6,
                      "hidden_size": 96},
    ),
    "hidden size": wrong(
        BACKEND,
        "does not divide hidden_size 66",
        f"{MEGATRON}t4",
        architecture={**LARGE, "hidden_size": 66, "head_dim": 8},
    ),
    "intermediate size": wrong(
        BACKEND,
        "does not divide intermediate_size 98",
        f"{MEGATRON}t4",
        architecture={**LARGE, "intermediate_size": 98},
    ),
    "vocabulary": wrong(
        "actor.model.make_vocab_size_divisible_by",
        "leaves at least one of t2 ranks without a token; set it to 64, it is 128",
        f"{MEGATRON}t2",
        architecture={**LARGE, "vocab_size": 100},
    ),
    "layers": wrong(BACKEND, "p5 does not divide num_hidden_layers 12", f"{MEGATRON}p5"),
    "virtual without stages": wrong(
        "actor.model.virtual_pipeline_model_parallel_size",
        "needs more than one pipeline stage",
        f"{MEGATRON}d2",
        "actor.model.virtual_pipeline_model_parallel_size=2",
    ),
    "virtual layers": wrong(
        "actor.model.virtual_pipeline_model_parallel_size",
        "p4 times 2 does not divide num_hidden_layers 12",
        f"{MEGATRON}p4",
        "actor.model.virtual_pipeline_model_parallel_size=2",
    ),
    "interleaved micro-batches": wrong(
        "actor.model.virtual_pipeline_model_parallel_size",
        "needs a multiple of p3 micro-batches",
        f"{MEGATRON}p3",
        "actor.model.virtual_pipeline_model_parallel_size=2",
    ),
    "sequence parallel": wrong(
        "actor.model.sequence_parallel",
        "needs tensor parallelism (t above 1)",
        f"{MEGATRON}d2",
        "actor.model.sequence_parallel=true",
    ),
    "experts of whole sequences": wrong(
        "actor.model.sequence_parallel",
        "false is not allowed: megatron trains experts on several tensor ranks",
        f"{MEGATRON}t2",
        "actor.model.sequence_parallel=false",
        architecture=EXPERTS,
    ),
    "optimizer of whole matrices": wrong(
        "actor.optimizer.name",
        "'Muon' is not allowed: it needs whole matrices, and a rank holds only a part of each; "
        "allowed: adamw, adam, sgd",
        "actor.optimizer.name=Muon",
        "actor.optimizer.momentum=0.9",
    ),
    "unknown optimizer": wrong(
        "critic.optimizer.name",
        "'adamv' is not allowed; did you mean 'adam'? allowed: adamw, adam",
        "critic.optimizer.name=adamv",
    ),
    "removed optimizer": wrong(
        "actor.optimizer.name",
        "'rmsprop' is not allowed: it is no longer supported; allowed: adamw, adam, sgd",
        "actor.optimizer.name=rmsprop",
        "actor.optimizer.alpha=0.99",
    ),
    "setting of a removed optimizer": wrong(
        "critic.optimizer.rho",
        "is no longer a setting: only adadelta used it, which is no longer supported",
        "critic.optimizer.rho=0.8",
    ),
    "setting of another optimizer": wrong(
        "actor.optimizer.name",
        "'sgd' is not allowed with betas, which it does not use; allowed: adamw, adam",
        "actor.optimizer.name=sgd",
        "actor.optimizer.betas=[0.8,0.9]",
    ),
    "setting of no default optimizer": wrong(
        "actor.optimizer.name",
        "'adamw' is not allowed with momentum, which it does not use; allowed: sgd",
        "actor.optimizer.momentum=0.9",
    ),
    "warning at the start": wrong(
        "cluster.slurm",
        "signal_lead_s 120 (seconds) must be shorter than time 2",
        "cluster.slurm.time=2",
    ),
    "positions": wrong(
        "rollout.max_new_tokens",
        "exceed max_position_embeddings 4096",
        "rollout.max_new_tokens=4096",
    ),
    "key and value heads of megatron": wrong(
        BACKEND,
        "t8 does not divide num_key_value_heads 4",
        f"{MEGATRON}t8",
        architecture={**LARGE, "num_key_value_heads": 4},
    ),
    "experts of a dense model": wrong(BACKEND, "the model has no experts", f"{MEGATRON}d4e2"),
    "expert halves of a dense model": wrong(
        BACKEND, "t4 of ffn is not allowed: the model has no experts", f"{MEGATRON}(attn:d4|ffn:t4)"
    ),
    "number of experts": wrong(
        BACKEND, "e32 does not divide the number of experts 16", f"{MEGATRON}d32e32",
        "algorithm.n_minibatches=1", architecture=EXPERTS,
    ),
    "expert size": wrong(
        BACKEND,
        "does not divide moe_intermediate_size 50",
        f"{MEGATRON}(attn:d8|ffn:t4e2)",
        architecture={**EXPERTS, "moe_intermediate_size": 50},
    ),
    "batch": wrong("algorithm.batch_size", "must be a multiple of 6", "actor.backend=fsdp:d6"),
    "critic's batch": wrong(
        "algorithm.batch_size", "size of critic.backend 'fsdp:d3'", "critic.backend=fsdp:d3"
    ),
    "minibatches": wrong(
        BACKEND, "leaves a rank without a sequence", "actor.backend=fsdp:d32", "evaluation="
    ),
    "micro-batches of stages": wrong(
        BACKEND, "p4 stages need at least as many micro-batches", f"{MEGATRON}d8p4"
    ),
    "evaluation samples": wrong("evaluation.samples", "at least 2", "evaluation.samples=1"),
    "spellings disagree": wrong(
        "actor.model.tensor_model_parallel_size",
        "says t = 4; both must agree",
        f"{MEGATRON}t4",
        "actor.model.tensor_model_parallel_size=2",
    ),
    "expert spellings disagree": wrong(
        "actor.model.expert_tensor_parallel_size",
        "says t of ffn = 1",
        f"{MEGATRON}d4e4",
        "actor.model.expert_tensor_parallel_size=2",
        architecture=EXPERTS,
    ),
    "rollout spellings disagree": wrong(
        "rollout.tensor_parallel_size",
        "says t = 2",
        "rollout.backend=sglang:d2t2",
        "rollout.tensor_parallel_size=4",
    ),
    "rollout sizes without an engine": wrong(
        "rollout.tensor_parallel_size", "without rollout.backend", "rollout.tensor_parallel_size=2"
    ),
    "sizes beyond the hosts": wrong(
        "actor.model.context_parallel_size",
        "which does not divide the 8 GPUs",
        "actor.backend=megatron",
        "actor.model.context_parallel_size=3",
        "cluster.hosts=1",
    ),
    "unknown size": wrong(
        "actor.tensor_model_parallel_size",
        "did you mean actor.model.tensor_model_parallel_size",
        "actor.tensor_model_parallel_size=2",
    ),
    "list of GPUs": wrong("actor.gpus", "is descending", "actor.gpus=3-1"),
    "too few GPUs": wrong("critic.gpus", "it lists 4 GPUs, 'fsdp:d2' needs 2", "critic.gpus=0-3"),
    "gap between GPUs": wrong(
        "critic.gpus", "GPUs 2-3 of the trial hold no model",
        "critic.gpus=4-5", "critic.backend=fsdp:d2",
    ),
    "gap before generation": wrong(
        "rollout.gpus", "GPUs 2-3 of the trial hold no model",
        "rollout.gpus=4-5", "rollout.backend=native:d2",
    ),
    "gap in a mesh": wrong(
        "allocation_mode", "GPUs 2-3 of the trial hold no model",
        "actor.backend=''", "allocation_mode=actor:n1:0,1:d2,ref:n1:4,5:d2",
    ),
    "actor beyond a gap": wrong("actor.gpus", "GPUs 0-1 of the trial hold no model",
        "actor.gpus=2-3", "actor.backend=fsdp:d2",
    ),
    "GPUs without an engine": wrong("rollout.gpus", "without rollout.backend", "rollout.gpus=0-1"),
    "average of a trained model": wrong("critic.ema", "critic is trained", "critic.ema=0.1"),
    "average on megatron": wrong(
        "ref.ema", "use archon, fsdp", "ref.ema=0.1", "ref.backend=megatron:d2"
    ),
    "average of another size": wrong(
        "ref.ema",
        "different architectures",
        "ref.ema=0.1",
        "ref.architecture={model_type: llama, vocab_size: 99, hidden_size: 64, "
        "intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4}",
    ),
    "offload without an engine": wrong(
        "rollout.offload", "without rollout.backend", "rollout.offload=true"
    ),
    "hosts that are not full": wrong(
        "cluster.workers_per_host",
        "must divide 4",
        "cluster.workers_per_host=3",
        "actor.backend=fsdp:d4",
    ),
    "too few hosts": wrong(
        "cluster.hosts", "need 2 hosts with 8 each", "cluster.hosts=1", "actor.backend=fsdp:d16"
    ),
    "memory": wrong(
        "cluster.gpu_memory",
        "GPU 0 is estimated to need",
        "cluster.gpu_memory=1M",
        "cluster.gpus_per_worker=1",
    ),
    "memory of a server": wrong(
        "rollout.backend",
        "GiB of weights",
        "rollout.backend=sglang:d2",
        "cluster.gpu_memory=20G",
        "cluster.gpus_per_worker=1",
        "actor.backend=fsdp:d64",
        "actor.max_tokens_per_microbatch=512",
        "actor.gradient_checkpointing=true",
        "actor.dtype=bfloat16",
        "algorithm.batch_size=256",
        architecture={**LARGE, "hidden_size": 8192, "intermediate_size": 32768},
    ),
    "transformers' model split": wrong(
        "actor.implementation", "'fsdp:t2' uses t", "actor.implementation=hf",
        "actor.backend=fsdp:t2",
    ),
    "transformers' model on another engine": wrong(
        "actor.implementation", "megatron runs its own models only; allowed backends: fsdp",
        "actor.implementation=hf", f"{MEGATRON}d2",
    ),
    "no such implementation": wrong(
        "critic.implementation", "allowed: builtin, hf", "critic.implementation=vllm"
    ),
    "fp16": wrong(
        "actor.fp16", "write dtype: bfloat16 (fp16 is not supported)", "actor.fp16=true"
    ),
    "bf16": wrong("ref.bf16", "write dtype: bfloat16", "ref.bf16=true"),
    "fp16 and bf16 both": wrong(
        "actor.fp16", "write dtype: bfloat16 (fp16 is not supported)",
        "actor.bf16=true", "actor.fp16=true",
    ),
    "float16": wrong(
        "actor.dtype", "'float16' is not allowed; did you mean 'bfloat16'?",
        "actor.dtype=float16",
    ),
    "half of a layer of transformers": wrong(
        "actor.implementation", "must be off or full",
        "actor.implementation=hf", "actor.gradient_checkpointing=selective",
    ),
    "older mode beside a backend": wrong(
        "allocation_mode", "is not allowed beside actor.backend", "allocation_mode=d2m1p1"
    ),
    "older mode beside other sizes": wrong(
        "actor.model.tensor_model_parallel_size", "says t = 1",
        "actor.backend=''", "allocation_mode=d2m1p1", "actor.model.tensor_model_parallel_size=2",
    ),
    "older mode": wrong(
        "allocation_mode", "searching for a layout is not supported",
        'actor.backend=""', "allocation_mode=search"
    ),
    "older mode without an actor": wrong(
        "allocation_mode", "nothing in it trains the actor",
        'actor.backend=""', "allocation_mode=sglang.d2"
    ),
    "component of no role": wrong(
        "allocation_mode",
        "'teacher' is not a role",
        'actor.backend=""',
        "allocation_mode=fsdp[actor]:d2|fsdp[teacher]:d2",
    ),
    "two actors": wrong(
        "allocation_mode", "two layouts for the actor", 'actor.backend=""',
        "allocation_mode=fsdp:d2+fsdp:d2",
    ),
}  # fmt: skip


def problems(load: Load, *overrides: str, **options: Any) -> list[Problem]:
    """Those that prevent a plan, else those of memory, which prevent only a submission."""
    try:
        settings = load(*overrides, **options)
    except ConfigError as error:
        return list(error.problems)
    return memory_problems(settings)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_configuration_gives_one_clear_message(plan_ppo: Load, kind: str) -> None:
    case = KINDS[kind]
    found = problems(plan_ppo, *case.overrides, architecture=case.architecture)
    assert len(found) == 1, found
    [problem] = found
    assert problem.key == case.key
    assert case.message in problem.message
    assert problem.where == "command line" or re.search(r"ppo\.yaml:[56]$", problem.where)


def test_there_are_at_least_forty_kinds() -> None:
    assert len(KINDS) >= 40


def test_all_errors_are_reported_at_once(plan_ppo: Load) -> None:
    found = problems(
        plan_ppo,
        f"{MEGATRON}d3t3p5",
        "rollout.backend=sglang:t16",
        "actor.model.sequence_parallel=true",
        "cluster.hosts=1",
        "evaluation.samples=1",
    )
    assert {problem.key for problem in found} == {
        "actor.backend",
        "algorithm.batch_size",
        "cluster.hosts",
        "evaluation.samples",
        "rollout.backend",
    }
    told = " ".join(problem.message for problem in found)
    assert "num_attention_heads" in told
    assert "num_hidden_layers" in told


RIGHT = {
    "settings of the optimizer": "actor.optimizer={name: sgd, momentum: 0.9}",
    "heads, kv heads, vocabulary": f"{MEGATRON}t4",
    "kv heads are copied": "actor.backend=fsdp:t8",
    "tokens are filled up": "actor.backend=fsdp:t2c4",
    "layers": f"{MEGATRON}p6",
    "context": f"{MEGATRON}c4",
    "batch": "actor.backend=fsdp:d16",
    "all": f"{MEGATRON}d2t2p2c2",
    "one copy in a host": "rollout.backend=vllm:d3t4p2",
}


@pytest.mark.parametrize("kind", RIGHT)
def test_what_fits_is_accepted(plan_ppo: Load, kind: str) -> None:
    assert plan_ppo(RIGHT[kind]).config.experiment == "addition"


@pytest.mark.parametrize("dims", ["d4e4", "(attn:d4t2|ffn:t4e2)", "(attn:d2p2|ffn:e2)"])
def test_experts_that_fit_are_accepted(plan_ppo: Load, dims: str) -> None:
    settings = plan_ppo(f"{MEGATRON}{dims}", architecture=EXPERTS)
    assert settings.missing


def test_virtual_stages_that_fit_are_accepted(plan_ppo: Load) -> None:
    field = "actor.model.virtual_pipeline_model_parallel_size"
    assert plan_ppo(f"{MEGATRON}p4", f"{field}=3").missing


@pytest.mark.parametrize("implementation", ["hf", "builtin"])
@pytest.mark.parametrize(("new", "fits"), [(256, True), (257, False)])
def test_sequences_do_not_exceed_learned_positions(
    plan_ppo: Load, implementation: str, new: int, fits: bool
) -> None:
    small = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512}
    settings = plan_ppo(
        f"actor.implementation={implementation}",
        f"rollout.max_new_tokens={new}",
        "evaluation=",
        architecture={"model_type": "gpt2", "vocab_size": 151936, **small},
    )
    found = [problem for problem in settings.missing if "positions" in problem.message]
    assert [problem.key for problem in found] == ([] if fits else ["dataset.max_prompt_tokens"])
    for problem in found:
        assert "up to 513 tokens are not allowed" in problem.message
        assert "has positions for 512 tokens" in problem.message


LONGROPE = {
    **LARGE,
    "model_type": "phi3",
    "original_max_position_embeddings": 512,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
}


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (["rollout.max_new_tokens=256"], None, ""),
        (
            ["rollout.max_new_tokens=257", "evaluation="],
            "dataset.max_prompt_tokens",
            "up to 513 tokens are not",
        ),
        (["dataset.max_prompt_tokens="], "dataset.max_prompt_tokens", "is required: with rope_t"),
        (
            ["evaluation.max_new_tokens=300"],
            "evaluation.dataset.max_prompt_tokens",
            "sequence, prompt and completion, has more than 512 tokens",
        ),
        (["actor.architecture.rope_scaling=", "dataset.max_prompt_tokens="], None, ""),
    ],
)
def test_lengths_of_transformers_models_are_bounded_where_batches_would_matter(
    plan_ppo: Load, overrides: list[str], key: str | None, message: str
) -> None:
    settings = plan_ppo(
        "actor.implementation=hf",
        *([] if "evaluation=" in overrides else ["evaluation.dataset.max_prompt_tokens=256"]),
        *overrides,
        architecture=LONGROPE,
    )
    found = [problem for problem in settings.missing if "rope_type" in problem.message]
    assert [problem.key for problem in found] == ([key] if key else [])
    assert all(message in problem.message for problem in found)


def test_evaluation_is_named_as_the_cause_where_only_it_generates_on_the_trainers(
    plan_ppo: Load,
) -> None:
    tasks = (f"{MEGATRON}d1", "rollout.backend=vllm:d1", "rollout.tasks={}")
    [problem] = [one for one in plan_ppo(*tasks).missing if one.key == BACKEND]
    assert "the trainers generate for `evaluation`" in problem.message
    remedy = "evaluation={tasks: {backend: fsdp:d1}, dataset: {type: prompt, path: held_out.jsonl}}"
    assert "evaluation.tasks={backend: fsdp:d1}" in problem.message
    assert BACKEND not in {one.key for one in plan_ppo(*tasks, remedy).missing}

"""The megatron engine against the built-in decoder in one process, from the same folders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import Outputs
from slurmrl.models.decoder import Decoder
from slurmrl.models.experts import SparseMLP, scores_of
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from tests.distributed.engines import cases
from tests.distributed.engines.cases import ARCHITECTURE, LENGTHS, batch, model
from tests.distributed.engines.megatron_cases import Case, Placed, placed
from tests.distributed.engines.test_engines_contract import plain_decoder, value_model
from tests.pool import RankPool
from tests.support.decoder_folders import to_hf
from tests.support.rotation import rotating

HERE = "tests.distributed.engines.megatron_cases"
EVEN = {
    **ARCHITECTURE,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "initializer_range": 0.1,
}
"""With weights small enough that rounding is not magnified beyond the bounds."""
ONE_HEAD = {**EVEN, "num_attention_heads": 1, "num_key_value_heads": 1}
TIED = {**EVEN, "tie_word_embeddings": True}
QWEN2 = {**EVEN, "model_type": "qwen2", "num_key_value_heads": 4}
LLAMA = {
    **EVEN,
    "model_type": "llama",
    "attention_bias": True,
    "mlp_bias": True,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
}
MISTRAL = {**EVEN, "model_type": "mistral", "sliding_window": 4}
GEMMA = {**EVEN, "model_type": "gemma"}
MOE = {
    **EVEN,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
    "initializer_range": 0.155,
}
"""With weights of a size that leaves every router a margin, as below."""
MIXTRAL = {
    **EVEN,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.135,
}
GLM = {
    **EVEN,
    "model_type": "glm4_moe",
    "head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "use_qk_norm": True,
    "attention_bias": True,
    "initializer_range": 0.12,
}
LATENT = {
    **GLM,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "attention_bias": False,
}
LATENT.pop("use_qk_norm")
PLAIN_QUERIES = {**LATENT, "q_lora_rank": None, "initializer_range": 0.14}
SINKS = {
    **EVEN,
    "model_type": "gpt_oss",
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 16,
    "sliding_window": 5,
    "swiglu_limit": 0.3,
    "initializer_range": 0.15,
}
SCALED = {
    **PLAIN_QUERIES,
    "model_type": "deepseek_v2",
    "topk_method": "group_limited_greedy",
    "initializer_range": 0.115,
}
BUDGET = {"max_tokens_per_microbatch": 16, "model": {"make_vocab_size_divisible_by": 1}}
STEPS = 3
ROUNDING = 2e-6
"""Of float32 sums in another order, as a share of a gradient's largest element."""
MAGNIFIED = 3e-4
"""The same of how far AdamW, which divides by a gradient's size, moves a tensor's weights."""
MARGIN = 1e-3
"""Least distance of the logits of a token's last expert and of the first that it does not pass:
rounding must not send it elsewhere."""
DESCENT = {"name": "sgd", "lr": 0.1, "momentum": 0.5}


def grid(pp: int, dp: int, ep: int, tp: int) -> dict[str, int]:
    return {"pp": pp, "dp": dp, "ep": ep, "tp": tp}


Layouts = dict[str, tuple[Placed, dict[str, Any], str]]
FAST: Layouts = {
    "t2 sp tied": (placed(tp=2, sp=True), TIED, "lm"),
    "p2 v2": (placed(pp=2, v=2), EVEN, "lm"),
    "d2 experts e2": (placed(dp=2, experts=grid(1, 1, 2, 1)), MOE, "lm"),
    "c3 ring": (placed(cp=3), EVEN, "lm"),
    "corrected t2 sp p2": (placed(tp=2, sp=True, pp=2), GLM, "lm"),
    "latent t2 sp": (placed(tp=2, sp=True), LATENT, "lm"),
    "sinks t2 sp e2": (placed(tp=2, sp=True, experts=grid(1, 1, 2, 1)), SINKS, "lm"),
}
LONG: Layouts = {
    "sinks p2 c2": (placed(pp=2, cp=2), SINKS, "lm"),
    "sinks d2 e2": (placed(dp=2, experts=grid(1, 1, 2, 1)), SINKS, "lm"),
    "sinks c3 ring": (placed(cp=3), SINKS, "lm"),
    "sinks attn t2 d2 ffn d4": (
        placed(tp=2, sp=True, dp=2, experts=grid(1, 4, 1, 1)), SINKS, "lm",
    ),
    "latent t2 p2": (placed(tp=2, pp=2, sp=True), PLAIN_QUERIES, "lm"),
    "latent c2 e2": (placed(cp=2, experts=grid(1, 1, 2, 1)), LATENT, "lm"),
    "latent p2 c2": (placed(pp=2, cp=2), PLAIN_QUERIES, "lm"),
    "scaled t2 sp e2": (placed(tp=2, sp=True, experts=grid(1, 1, 2, 1)), SCALED, "lm"),
    "latent c3 ring": (placed(cp=3), LATENT, "lm"),
    "one": (placed(), EVEN, "lm"),
    "p4 tied": (placed(pp=4), TIED, "lm"),
    "p2 v2 tied": (placed(pp=2, v=2), TIED, "lm"),
    "d2 tied": (placed(dp=2), TIED, "lm"),
    "c4": (placed(cp=4), EVEN, "lm"),
    "t2 sp d2": (placed(tp=2, sp=True, dp=2), EVEN, "lm"),
    "t2 sp p2 v2": (placed(tp=2, sp=True, pp=2, v=2), TIED, "lm"),
    "t2 sp p2 c2": (placed(tp=2, sp=True, pp=2, cp=2), EVEN, "lm"),
    "value t2 sp": (placed(tp=2, sp=True), EVEN, "value"),
    "value p2 c2": (placed(pp=2, cp=2), EVEN, "value"),
    "qwen2 t2 sp": (placed(tp=2, sp=True), QWEN2, "lm"),
    "llama t2": (placed(tp=2), LLAMA, "lm"),
    "mistral t2 sp": (placed(tp=2, sp=True), MISTRAL, "lm"),
    "gemma t2 sp": (placed(tp=2, sp=True), GEMMA, "lm"),
    "experts p2 v2": (placed(pp=2, v=2), MOE, "lm"),
    "experts t2 sp": (placed(tp=2, sp=True), MOE, "lm"),
    "experts t2 sp e2": (placed(tp=2, sp=True, experts=grid(1, 1, 2, 1)), MOE, "lm"),
    "experts c2 e2": (placed(cp=2, experts=grid(1, 1, 2, 1)), MOE, "lm"),
    "experts attn t2 d2 ffn e2 t2": (
        placed(tp=2, sp=True, dp=2, experts=grid(1, 1, 2, 2)), MOE, "lm",
    ),
    "experts attn t2 d2 ffn d4": (
        placed(tp=2, sp=True, dp=2, experts=grid(1, 4, 1, 1)), MOE, "lm",
    ),
    "experts p2 d2 e2": (placed(pp=2, dp=2, experts=grid(2, 1, 2, 1)), MOE, "lm"),
    "t2 sp c2 ring": (placed(tp=2, sp=True, cp=2), {**EVEN, "num_attention_heads": 2}, "lm"),
    "p2 c2 ring": (placed(pp=2, cp=2), ONE_HEAD, "lm"),
    "value c3 ring": (placed(cp=3), MISTRAL, "value"),
    "experts c3 ring": (placed(cp=3), MOE, "lm"),
    "corrected p2 v2": (placed(pp=2, v=2), GLM, "lm"),
    "corrected c2 e2": (placed(cp=2, experts=grid(1, 1, 2, 1)), GLM, "lm"),
    "corrected c3 ring": (placed(cp=3), GLM, "lm"),
    "corrected attn t2 d2 ffn e2 t2": (
        placed(tp=2, sp=True, dp=2, experts=grid(1, 1, 2, 2)), GLM, "lm",
    ),
    "corrected p2 d2 e2": (placed(pp=2, dp=2, experts=grid(2, 1, 2, 1)), GLM, "lm"),
    "mixtral d2 e2": (placed(dp=2, experts=grid(1, 1, 2, 1)), MIXTRAL, "lm"),
}  # fmt: skip


def start(folder: Path, architecture: dict[str, Any], head: Any) -> Decoder:
    """The one process's model, in float64, and its folder."""
    if head == "value":
        decoder = value_model(folder, **architecture)
    else:
        decoder = decoder_of(head, architecture)
        for constant in decoder.constants().values():
            constant.copy_(torch.linspace(-1, 1, constant.numel()))
        to_hf(decoder, folder)
    return decoder.double()


def decoder_of(head: Any, architecture: dict[str, Any]) -> Decoder:
    return plain_decoder(head, **architecture)


def reference(decoder: Decoder, options: dict[str, Any]) -> torch.optim.Optimizer:
    if options.get("name") == "sgd":
        rates = {"lr": options["lr"], "momentum": options["momentum"]}
        return torch.optim.SGD(decoder.parameters(), **rates)
    return torch.optim.AdamW(
        decoder.parameters(),
        lr=options["lr"],
        betas=options["betas"],
        eps=options["eps"],
        weight_decay=0.0,
    )


def outputs_of(decoder: Decoder, sample: SequenceSample) -> Outputs:
    """One sequence at a time, with whole logits."""
    found: list[Outputs] = []
    for item in (sample.take([index]) for index in range(sample.bs)):
        ids = item.tensor("input_ids")
        hidden = decoder(ids, torch.tensor([0, len(ids)], dtype=torch.int32), len(ids))
        if decoder.head == "value":
            found.append({"values": decoder.values(hidden)})
            continue
        everything = (hidden @ decoder.head_weight().t()).log_softmax(-1)
        zero = everything.new_zeros(1)
        logp = everything[:-1].gather(1, ids[1:, None]).squeeze(1)
        entropy = -(everything.exp() * everything).sum(-1)[:-1]
        found.append({"logp": torch.cat([zero, logp]), "entropy": torch.cat([zero, entropy])})
    return {name: torch.cat([row[name] for row in found]) for name in found[0]}


def choosing(router: SparseMLP, logits: Tensor) -> Tensor:
    """Return the router values whose largest select the experts of a token."""
    if not router.moe.exact:
        return logits
    values = scores_of(router.moe, logits, router.gate.correction)[1]
    return values if router.moe.corrected else values.clamp(min=0).log()


@contextmanager
def margins(decoder: Decoder) -> Iterator[list[float]]:
    """Return the smallest margin between chosen and other experts in each router call."""
    found: list[float] = []

    def note(router: SparseMLP, logits: Tensor) -> None:
        ranked = choosing(router, logits.detach()).sort(-1, descending=True).values
        gaps = ranked[:, router.per_token - 1] - ranked[:, router.per_token]
        found.append(gaps.min().item())

    handles = [
        module.gate.register_forward_hook(lambda _, __, out, router=module: note(router, out))
        for module in decoder.modules()
        if isinstance(module, SparseMLP)
    ]
    yield found
    for handle in handles:
        handle.remove()


def close(name: str, found: Tensor, wanted: Tensor, whole: float, share: float = ROUNDING) -> None:
    difference = (found - wanted).abs().max().item()
    bound = max(share * wanted.abs().max().item(), 2e-8 * whole)
    assert difference <= bound, (name, difference, bound)


def compared(
    ranks: RankPool,
    tmp_path: Path,
    where: Placed,
    head: str,
    decoder: Decoder,
    more: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Compare the loss and gradient norm of each step, the gradients of the first step if the
    optimizer keeps them, and the last weights. ``more`` are settings of the model and its
    optimizer.
    """
    settings = model(architecture=None, optimizer=options, **BUDGET, **more or {})
    case = Case(where, settings, head, source=tmp_path)
    saved = tmp_path / "saved"
    for number in range(STEPS):
        (saved / str(number)).mkdir(parents=True)
    n = len(where.ranks)
    results = ranks(n, f"{HERE}:train", case, range(STEPS), save=saved, deadline_s=400.0)
    assert all(result == results[0] for result in results)
    first = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    optimizer = reference(decoder, settings["optimizer"])
    for number in range(STEPS):
        sample = batch(number)
        optimizer.zero_grad()
        with margins(decoder) as routed:
            total, stats = cases.loss(outputs_of(decoder, sample), sample)
        assert min(routed, default=1.0) > MARGIN
        (total / cases.denominator(sample)).backward()
        expected = {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}
        squares = sum(g.double().square().sum().item() for g in expected.values())
        theirs = results[0][number]
        assert theirs["loss"] == pytest.approx(total.item() / sum(LENGTHS), rel=1e-5, abs=1e-6)
        assert theirs["tokens"] == theirs["denominator"] == sum(LENGTHS)
        assert theirs["grad_norm"] == pytest.approx(squares**0.5, rel=1e-5)
        assert set(stats) < set(theirs)
        checkpoint = RoleCheckpoint(saved / str(number), "actor")
        checkpoint.layout.check()
        constants = decoder.constants()
        assert {name for name, _ in checkpoint.weights()} == {*expected, *constants}
        for name, values in constants.items():
            assert torch.equal(torch.from_numpy(checkpoint.read(name)), values), name
        if number == 0:  # the first moment after one step is the gradient
            kept = "momentum" if options else "exp_avg"
            for name, gradient in expected.items():
                found = torch.from_numpy(checkpoint.read(f"{kept}/{name}"))
                close(name, found, gradient, squares**0.5)
        optimizer.step()
    for name, parameter in decoder.named_parameters():
        found = torch.from_numpy(checkpoint.read(name))
        moved = (parameter - first[name]).abs().max().item()
        rounding = 2 * STEPS * 2**-24 * parameter.abs().max().item()  # of both at each step
        share = ROUNDING if options else MAGNIFIED
        assert (found - parameter).abs().max().item() <= share * moved + rounding, name


@pytest.mark.parametrize("name", FAST)
def test_megatron_model_trains_as_in_one_process(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    where, architecture, head = FAST[name]
    compared(ranks, tmp_path, where, head, start(tmp_path, architecture, head))


@pytest.mark.long
@pytest.mark.parametrize("name", rotating(*LONG, shares=2))
def test_every_layout_trains_as_one_process(ranks: RankPool, tmp_path: Path, name: str) -> None:
    where, architecture, head = LONG[name]
    compared(ranks, tmp_path, where, head, start(tmp_path, architecture, head))


DESCENDED = (
    *("t2 sp tied", "p2 v2", "d2 tied", "t2 sp p2 c2"),
    *("d2 experts e2", "experts p2 d2 e2", "experts attn t2 d2 ffn e2 t2"),
)


@pytest.mark.long
@pytest.mark.parametrize("name", rotating(*DESCENDED, shares=2))
def test_plain_gradient_descent_equals_one_process(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    """Plain gradient descent shows wrong gradient scales, on which AdamW's steps hardly depend."""
    where, architecture, head = {**FAST, **LONG}[name]
    compared(ranks, tmp_path, where, head, start(tmp_path, architecture, head), **DESCENT)

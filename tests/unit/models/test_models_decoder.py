from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slurmrl.engines.role_weights import init_tensor
from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.models.decoder import Decoder, build
from slurmrl.models.inference import short_forward
from slurmrl.models.paged import PagedCall, PagedCore, PagedDecoder
from slurmrl.models.parallel.boxes import TensorSplit
from slurmrl.models.parallel.split import Axis, Split
from slurmrl.models.recompute import Recompute
from slurmrl.models.shapes import parameter_shapes, stored_shapes
from slurmrl.tensors.ops.attention import Packing
from slurmrl.tensors.ops.logprobs import packed_logprobs_and_entropy
from tests.unit.models.conftest import BASE, ODD, small_decoder

LENGTHS = (5, 1, 17, 5, 33, 1, 40)


def pack(sequences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, int]:
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return torch.cat(sequences), cu, int(lengths.max())


def random_sequences(lengths: tuple[int, ...], vocabulary: int = 37) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocabulary, (n,), generator=generator) for n in lengths]


def test_logits_equal_transformers(odd_name: str, pair: Callable[..., Any]) -> None:
    decoder, reference = pair(odd_name)
    sequences = random_sequences(LENGTHS)
    with torch.no_grad():
        logits = decoder(*pack(sequences)) @ decoder.head_weight().T
        expected = torch.cat([reference(sequence[None]).logits[0] for sequence in sequences])
    assert expected.abs().max() > 0.5
    assert (logits - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    "name",
    [
        "llama-biases",
        "qwen2-tied",
        "qwen3-wide-heads",
        "mistral",
        "gemma",
        "mixtral",
        "qwen3_moe-some-dense",
        "glm4_moe",
        "glm4_moe-groups",
        "deepseek_v3",
        "deepseek_v3-plain-queries",
        *("deepseek_v3-biases", "deepseek_v2", "deepseek_v2-greedy", "glm4_moe_lite-types"),
        "gpt_oss",
        "gpt_oss-other",
        "gpt2",
    ],
)
def test_gradients_equal_transformers(
    name: str, pair: Callable[..., Any], as_decoder: Callable[..., Decoder]
) -> None:
    decoder, reference = pair(name)
    sequences = random_sequences((7, 3, 7))
    mix = torch.randn(17, 37, generator=torch.Generator().manual_seed(2))
    ((decoder(*pack(sequences)) @ decoder.head_weight().T) * mix).sum().backward()
    expected = torch.cat([reference(sequence[None]).logits[0] for sequence in sequences])
    (expected * mix).sum().backward()
    gradients = as_decoder(reference, {n: p.grad for n, p in reference.named_parameters()})
    whole = max(float(p.detach().norm()) for p in gradients.parameters())
    for parameter_name, parameter in decoder.named_parameters():
        wanted = gradients.get_parameter(parameter_name).detach()
        assert parameter.grad is not None
        # (Without a rotation the gradient of the keys' bias is zero but for rounding.)
        allowed = max(4e-6 * float(wanted.abs().max()), 3e-8 * whole)
        assert (parameter.grad - wanted).abs().max() <= allowed, parameter_name


@pytest.mark.parametrize("name", ["llama-llama3-rope", "qwen2-yarn", "gpt_oss", "mixtral", "gpt2"])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_float64_results_do_not_depend_on_micro_batches(name: str, head: Head) -> None:
    config = small_decoder(name).config
    decoder = build(config, head).double()
    for parameter_name, parameter in decoder.named_parameters():
        shape = tuple(parameter.shape)
        parameter.data.copy_(init_tensor(parameter_name, shape, config, seed=3) * 5)
    sequences = random_sequences((7, 12, 3, 12))
    outputs, gradients = [], []
    for parts in ([sequences], [[sequence] for sequence in sequences]):
        decoder.zero_grad()
        found = torch.cat([outputs_of(decoder, part) for part in parts])
        assert found.dtype == torch.float64
        found.square().sum().backward()
        outputs.append(found.detach())
        gradients.append([p.grad for p in decoder.parameters() if p.grad is not None])
    assert (outputs[0] - outputs[1]).abs().max() < 1e-11
    largest = max(float(gradient.abs().max()) for gradient in gradients[0])
    for whole, cut in zip(*gradients, strict=True):
        assert (whole - cut).abs().max() < 1e-12 * largest


def outputs_of(decoder: Decoder, sequences: list[torch.Tensor]) -> torch.Tensor:
    ids, cu, longest = pack(sequences)
    features = decoder(ids, cu, longest)
    if decoder.head == "value":
        return decoder.values(features, cu)
    return torch.cat([x[:, None] for x in decoder.logprobs(features, ids, cu, 0.7)], 1)


@pytest.mark.parametrize("name", ["qwen3", "mistral", "qwen3_moe", "gpt_oss", "gpt2"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_activation_checkpointing_changes_no_gradient(name: str, mode: Recompute) -> None:
    gradients = []
    for recompute in ("off", mode):
        decoder = small_decoder(name)
        decoder.use(recompute)
        decoder(*pack(random_sequences(LENGTHS))).square().sum().backward()
        gradients.append([p.grad for n, p in decoder.named_parameters() if "lm_head" not in n])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_selective_checkpointing_keeps_no_feed_forward_activations(name: str) -> None:
    kept: dict[Recompute, list[int]] = {"off": [], "selective": []}
    for inner in (40, 400):
        size = "n_inner" if name == "gpt2" else "intermediate_size"
        changes = {size: inner, "moe_intermediate_size": inner}
        for mode, sizes in kept.items():
            decoder = small_decoder(name, **changes)
            decoder.use(mode)
            with ActivationBytes() as counted:
                out = decoder(*pack(random_sequences((60, 60))))
            out.sum().backward()
            sizes.append(counted.total)
    assert kept["off"][1] > 2 * kept["off"][0]
    assert kept["selective"][1] == kept["selective"][0]


class ActivationBytes(TorchDispatchMode):
    """Bytes of all results, views aside, that are still alive at the end of the block."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in storages((args, kwargs))}
        for storage in storages(out):
            if storage._cdata not in given:
                self._held.append((weakref.ref(storage), storage.nbytes()))
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        alive = {id(ref()): size for ref, size in self._held if ref() is not None}
        self.total = sum(alive.values())


def storages(values: Any) -> list[torch.UntypedStorage]:
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors]


@pytest.mark.parametrize("head", ["lm", "value"])
def test_shape_table_equals_the_state_dict(odd_name: str, head: Any) -> None:
    config = small_decoder(odd_name).config
    with torch.device("meta"):
        decoder = build(config, head)
    shapes = {name: tuple(value.shape) for name, value in decoder.state_dict().items()}
    assert shapes == stored_shapes(config, head)
    assert [name for name, _ in decoder.named_parameters()] == [*parameter_shapes(config, head)]


def test_bfloat16_decoder_has_float32_logits() -> None:
    """This holds in decoding and training. Products are exact, so only their sums are rounded."""
    decoder = small_decoder("llama").to(torch.bfloat16)
    paged = PagedDecoder(decoder, page=8)
    paged.cache.grow(2)
    nothing = torch.zeros(0, dtype=torch.int64)
    call = PagedCall(
        slots=torch.tensor([0, 1, 2, 8, 9, 10, 11, 12]),
        fresh=Packing(torch.tensor([0, 3, 8], dtype=torch.int32), 5),
        fresh_tokens=8,
        tables=torch.tensor([[0], [1]]),
        rows=nothing,
        lengths=nothing,
        longest=0,
    )
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])
    logits = paged.logits(torch.arange(8), positions, call, torch.tensor([2, 7]))
    forward = short_forward(decoder) or decoder.run_unhooked
    hidden = forward(torch.arange(8), positions, PagedCore(paged.cache, call))
    exact = hidden[[2, 7]].double() @ decoder.head_weight().double().t()
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)


def test_parts_of_a_tensor_rank_have_the_sizes_of_its_boxes(odd_name: str) -> None:
    even = {"hidden_size": 24, "intermediate_size": 12, "moe_intermediate_size": 12}
    own = {name: even.get(name, value) for name, value in ODD[odd_name].items()}
    config = ModelConfig.from_hf({**BASE, **own})
    with torch.device("meta"):
        decoder = build(config, split=Split(tensor=Axis(1, 2)))
    boxes, shapes = TensorSplit(config, 2), stored_shapes(config, "lm")
    parts = dict(decoder.named_parameters()) | decoder.constants()
    assert {name: tuple(part.shape) for name, part in parts.items()} == {
        name: boxes.box(name, shape, 1).size for name, shape in shapes.items()
    }


def test_bfloat16_stays_near_float32() -> None:
    decoder = small_decoder("llama")
    inputs = pack(random_sequences(LENGTHS))
    exact = decoder(*inputs)
    rounded = decoder.to(torch.bfloat16)(*inputs)
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).norm() < 0.05 * exact.norm()


def test_empty_batch_gives_every_parameter_a_gradient() -> None:
    decoder = small_decoder()
    ids, cu = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    hidden = decoder(ids, cu, 0)
    assert hidden.shape == (0, 24)
    logp, _ = packed_logprobs_and_entropy(hidden, decoder.head_weight(), ids, cu)
    logp.sum().backward()
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() == 0

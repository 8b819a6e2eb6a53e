"""The CUDA operators against torch, on a real GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slurmrl.tensors.ops.intervals import Intervals, gather, scatter
from slurmrl.tensors.ops.scan import discounted_sums, gae_reference, packed_gae, scan_reference

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA device on this machine"
)

ROOT = Path(__file__).parents[2]
SHAPES = {
    "none": [],
    "empty": [0, 0, 0],
    "one-token": [1] * 5000,
    "short": [0, 3, 1, 64, 0, 7] * 900,
    "long": [300_000, 1, 0, 70_000],
    "tile borders": [4095, 1, 4096, 1, 4097, 127, 128, 129],
    "one of many tiles": [3_000_000],
}
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMRL_OPS", "native")


def batch(
    lengths: list[int], dtype: torch.dtype, offsets: torch.dtype = torch.int32, device: str = "cuda"
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(len(lengths))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    steps, sequences = int(cu_seqlens[-1]), len(lengths)
    return (
        torch.randn(steps, generator=generator).to(device, dtype),
        torch.randn(steps + sequences, generator=generator).to(device, dtype),
        cu_seqlens.to(device, offsets),
        (torch.rand(sequences, generator=generator) < 0.5).to(device),
    )


def in_float64(packed: tuple[Tensor, ...], gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    rewards, values, cu_seqlens, truncated = (x.cpu() for x in packed)
    return gae_reference(rewards.double(), values.double(), cu_seqlens, truncated, gamma, lam)


def close(found: Tensor, wanted: Tensor) -> None:
    tolerance = 1e-9 if found.dtype == torch.float64 else 2e-3
    torch.testing.assert_close(found.cpu().double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("offsets", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gae_on_gpu_equals_cpu(shape: str, dtype: torch.dtype, offsets: torch.dtype) -> None:
    packed = batch(SHAPES[shape], dtype, offsets)
    for gamma, lam in ((0.99, 0.95), (0.0, 1.0)):
        found, wanted = packed_gae(*packed, gamma, lam), in_float64(packed, gamma, lam)
        close(found[0], wanted[0])
        close(found[1], wanted[1])


def test_gae_accepts_aligned_values_in_unaligned_memory() -> None:
    rewards, values, cu_seqlens, truncated = batch(SHAPES["short"], torch.float32)
    shifted = torch.cat([rewards[:1], rewards])[1:]
    assert shifted.data_ptr() % 16 != 0
    ends = torch.randn(len(truncated), device="cuda")
    packed = (shifted, values[: len(rewards)].clone(), cu_seqlens, truncated)
    found = packed_gae(*packed, 0.9, 0.8, bootstrap_values=ends)
    wanted = gae_reference(*(x.cpu() for x in packed), 0.9, 0.8, ends.cpu())
    close(found[0], wanted[0].double())


def test_gae_is_bit_identical_each_time() -> None:
    packed = batch(SHAPES["one of many tiles"], torch.float32)
    first = packed_gae(*packed, 1.0, 1.0)[0]
    for _ in range(20):
        assert torch.equal(packed_gae(*packed, 1.0, 1.0)[0], first)


@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_discounted_sums_on_gpu_equal_cpu(shape: str, decays: bool) -> None:
    x, _, cu_seqlens, truncated = batch(SHAPES[shape], torch.float32)
    decay = torch.rand_like(x) if decays else None
    tail = torch.randn(len(truncated), device="cuda")
    found = discounted_sums(x, cu_seqlens, 0.98, decay, tail)
    wide = [None if one is None else one.cpu().double() for one in (decay, tail)]
    close(found, scan_reference(x.cpu().double(), cu_seqlens.cpu(), 0.98, *wide))


def intervals_of(size: int, gap: int, count: int) -> Intervals:
    starts = torch.arange(count) * (size + gap) + 1
    return Intervals.of(torch.stack([starts, starts + size], 1), "cuda")


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.bool, torch.complex128])
@pytest.mark.parametrize(("size", "gap"), [(1, 1), (4, 4), (5, 2), (1000, 8), (100_003, 1)])
def test_gather_and_scatter_on_gpu_equal_torch(size: int, gap: int, dtype: torch.dtype) -> None:
    intervals = intervals_of(size, gap, 200_000 // size + 1)
    flat = (torch.randn(intervals.stop + 1, device="cuda") * 50).to(dtype)
    packed = gather(flat, intervals)
    here = Intervals(
        intervals.starts.cpu(), intervals.offsets.cpu(), intervals.total, intervals.stop, True
    )
    assert torch.equal(packed.cpu(), gather(flat.cpu(), here))
    target = torch.zeros_like(flat)
    scatter(target, intervals, packed)
    wanted = torch.zeros_like(flat.cpu())
    scatter(wanted, here, packed.cpu())
    assert torch.equal(target.cpu(), wanted)


@pytest.mark.parametrize("one", FLOATS)
@pytest.mark.parametrize("other", FLOATS)
def test_moving_average_converts_dtypes(one: torch.dtype, other: torch.dtype) -> None:
    intervals = intervals_of(37, 3, 500)
    packed = torch.randn(intervals.total, device="cuda").to(one)
    target = torch.randn(intervals.stop, device="cuda").to(other)
    places = torch.cat([torch.arange(s, s + 37) for s in intervals.starts.tolist()])
    wanted = target.cpu().double()
    wanted[places] = 0.25 * packed.cpu().double() + 0.75 * wanted[places]
    scatter(target, intervals, packed, 0.25)
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(other, 1e-5)
    torch.testing.assert_close(target.cpu().double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("one", FLOATS)
@pytest.mark.parametrize("other", FLOATS)
def test_gather_converts_dtypes(one: torch.dtype, other: torch.dtype) -> None:
    """The bits equal torch's, with and without alignment to 16 bytes."""
    for pairs in ([(0, 4096), (8192, 9000)], [(1, 4096), (5003, 9000)]):
        flat = (torch.randn(9000, device="cuda") * 50).to(one)
        found = gather(flat, Intervals.of(pairs, "cuda"), dtype=other)
        assert torch.equal(found, torch.cat([flat[a:b] for a, b in pairs]).to(other))


def test_gather_gradient_is_right() -> None:
    flat = torch.randn(6, dtype=torch.float64, device="cuda", requires_grad=True)
    gather(flat, Intervals.of([(1, 4), (3, 5)], "cuda")).sum().backward()
    assert flat.grad is not None
    assert flat.grad.tolist() == [0, 1, 1, 2, 1, 0]


def test_offsets_may_exceed_32_bits() -> None:
    far, many = 2**32, 2**31 + 5
    if torch.cuda.mem_get_info()[0] < far + many + 2**30:
        pytest.skip("needs 8 GiB of free GPU memory")
    flat = torch.zeros(far + 64, dtype=torch.uint8, device="cuda")
    flat[far:] = 3
    assert gather(flat, Intervals.of([(far - 2, far + 2)], "cuda")).tolist() == [0, 0, 3, 3]
    intervals = Intervals.of([(7, 9), (far + 2 - many, far + 2)], "cuda")
    packed = gather(flat, intervals)
    assert packed[-3:].tolist() == [0, 3, 3]
    packed[-1], packed[0] = 5, 6
    scatter(flat, intervals, packed)
    assert flat[far : far + 3].tolist() == [3, 5, 3]
    assert flat[6:10].tolist() == [0, 6, 0, 0]


def work(packed: tuple[Tensor, ...], intervals: Intervals) -> tuple[Tensor, ...]:
    advantages, returns = packed_gae(*packed, 0.99, 0.95)
    return advantages, returns, gather(returns, intervals)


@pytest.mark.parametrize("form", ["native", "torch"])
def test_operators_use_the_current_stream_without_waiting(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMRL_OPS", form)
    packed, intervals = batch(SHAPES["long"], torch.float32), intervals_of(64, 64, 1000)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    rewards = torch.zeros_like(packed[0])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        wanted = work(packed, intervals)
        work(packed, intervals)  # its memory is there for the next one: to get some may wait
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        rewards.copy_(packed[0])  # only work on the same stream sees it
        try:
            with warnings.catch_warnings():  # it is called a prototype
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode("error")
            found = work((rewards, *packed[1:]), intervals)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not stream.query(), "the call came back while its stream was still busy"
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_operators_work_on_a_device_that_is_not_current() -> None:
    packed = batch(SHAPES["short"], torch.float32, device="cuda:1")
    found = packed_gae(*packed, 0.99, 0.95)
    assert torch.cuda.current_device() == 0
    assert found[0].device == torch.device("cuda:1")
    close(found[0], in_float64(packed, 0.99, 0.95)[0])


def test_operators_work_in_cuda_graphs() -> None:
    packed, intervals = batch(SHAPES["long"], torch.float32), intervals_of(64, 64, 1000)
    wanted = work(packed, intervals)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work(packed, intervals)
    for _ in range(3):
        for tensor in captured:
            tensor.zero_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, wanted, strict=True))


def test_operators_pass_opcheck() -> None:
    packed = batch([3, 0, 1, 5], torch.float32)
    torch.library.opcheck(torch.ops.slurmrl.gae.default, (*packed, None, 0.9, 0.8))


def test_operator_gradients_pass_gradcheck() -> None:
    rewards, values, cu_seqlens, truncated = batch([3, 0, 1, 5], torch.float64)
    inputs = (rewards.requires_grad_(), values.requires_grad_())
    run: Callable[..., object] = lambda r, v: packed_gae(r, v, cu_seqlens, truncated, 0.9, 0.8)  # noqa: E731
    assert torch.autograd.gradcheck(run, inputs)


SANITIZED = """
import torch
from slurmrl.tensors.ops.scan import packed_gae
from slurmrl.tensors.ops.intervals import Intervals, gather, scatter
for lengths in ([0, 3, 1, 64, 0, 7] * 300, [20000, 1, 0, 9000]):
    cu = torch.tensor([0, *lengths]).cumsum(0).cuda()
    steps, count = int(cu[-1]), len(lengths)
    r, v = torch.ones(steps, device="cuda"), torch.ones(steps + count, device="cuda")
    packed_gae(r, v, cu, torch.ones(count, dtype=torch.bool, device="cuda"), 0.9, 0.9)
for wrong in ([0, 10, 20, 30], [5, 10, 20, 9000], [0, 2**30, 2**30, 2**30], [-5, -4, -3, -2]):
    cu, cut = torch.tensor(wrong).cuda(), torch.ones(3, dtype=torch.bool, device="cuda")
    r, v, ends = (torch.ones(count, device="cuda") for count in (9000, 9003, 3))
    packed_gae(r, v, cu, cut, 0.9, 0.9)
    packed_gae(r, v[:9000].clone(), cu, cut, 0.9, 0.9, ends)
pairs = [(7 * i + 1, 7 * i + 1 + i % 7) for i in range(3000)]
intervals = Intervals.of(pairs, "cuda")
flat = torch.ones(intervals.stop, device="cuda")
scatter(flat, intervals, gather(flat, intervals, dtype=torch.bfloat16), 0.5)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_gpu_operators_pass_compute_sanitizer(tool: str, tmp_path: Path) -> None:
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed (it comes with the CUDA toolkit)")
    program = tmp_path / "sanitized.py"
    program.write_text(SANITIZED)
    environ = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(ROOT)}
    # What torch's own start asks the driver in vain is not for us to mend.
    quiet = ("--report-api-errors", "no") if tool == "memcheck" else ()
    command = [sanitizer, "--tool", tool, *quiet, "--error-exitcode", "9"]
    done = subprocess.run(
        [*command, sys.executable, str(program)],
        capture_output=True,
        text=True,
        env=environ,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]

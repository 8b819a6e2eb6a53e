"""Server engines on several ranks get weights by moves and send requests to a stand-in for SGLang,
which samples from transformers' model.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slurmrl.config.schema.roles import Model
from slurmrl.config.schema.rollout import Address, ServerKeys
from slurmrl.data.sample import SequenceSample
from slurmrl.engines import ENGINES
from slurmrl.engines.server_engine import ServerEngine
from slurmrl.rollouts.generation.base import GenerationOptions
from slurmrl.rollouts.generation.server_instance import Patience
from slurmrl.rollouts.generation.server_kinds import Running, Serving
from slurmrl.tensors.parallel.groups import build
from slurmrl.tensors.transfer.execute import Holdings, Mover
from slurmrl.tensors.transfer.plan import PlacedLayout, plan_move
from tests.distributed.engines import cases
from tests.distributed.engines.cases import Placed, Setup, batch, loss, model
from tests.pool import RankError, RankPool
from tests.support.generated import generated
from tests.support.rotation import rotating
from tests.support.stand_ins import Started, python

HERE = "tests.distributed.engines.test_engines_servers"
ARCHITECTURE = {
    "model_type": "qwen2",
    "vocab_size": 34,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
OTHER = {
    **ARCHITECTURE,
    "model_type": "gemma3_text",
    "head_dim": 4,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "pad_token_id": 0,
}
"""A family that transformers runs, with a tied output layer and constants."""
MODELS = {
    "builtin": model(architecture=ARCHITECTURE),
    "hf": model(architecture=OTHER, implementation="hf"),
}
PROMPTS = ((3, 4, 5), (9,), (1, 2), (30, 31, 32, 33))
PATIENCE = Patience(start_s=240.0)


def engine(
    sizes: dict[str, int], serving: Serving | Running, implementation: str = "builtin"
) -> ServerEngine:
    size = sizes.get("dp", 1) * sizes.get("tp", 1)
    context = build(
        [Placed("rollout", tuple(range(size)), sizes, "sglang")],
        rank=dist.get_rank(),
        device=torch.device("cpu"),
    )["rollout"]
    made: ServerEngine = ENGINES.load("sglang")(
        "rollout",
        Model(**MODELS[implementation]),
        head="lm",
        trained=False,
        context=context,
        seed=7,
        total_steps=1,
        source=None,
        serving=serving,
    )
    made.wait_until_up(lambda: None)
    return made


def drawn(servers: ServerEngine, prompts: tuple[tuple[int, ...], ...], step: int) -> list[Any]:
    """Return this rank's completions with their log-probabilities."""
    sample = SequenceSample.from_default(
        tuple(map(len, prompts)),
        [f"item{index}" for index in range(len(prompts))],
        {"prompt_ids": torch.tensor([token for prompt in prompts for token in prompt])},
    )
    output = generated(
        servers,
        sample,
        GenerationOptions(max_new_tokens=5),
        seed=3,
        step=step,
        keys=torch.arange(2 * len(prompts)),
    )
    ends = output.lengths.cumsum(0).tolist()
    begins = [0, *ends[:-1]]
    assert output.finished.tolist() == [False] * len(ends)
    return [
        (output.tokens[begin:end].tolist(), output.logprobs[begin:end].tolist(), prompt)
        for begin, end, prompt in zip(begins, ends, output.prompt_lengths.tolist(), strict=True)
    ]


def trained_and_served(
    sizes: dict[str, int], implementation: str, program: str, folder: Path
) -> list[Any]:
    """Train two steps. Return this rank's completions after each step, and the training engine's
    log-probabilities of their tokens.
    """
    setup = Setup(model=MODELS[implementation], sizes={"dp": 2})
    trained: Any = cases.make(setup)
    serving = Serving(
        python=program,
        arguments=(),
        tokenizer=None,
        patience=PATIENCE,
        log=folder / f"server.{dist.get_rank()}.log",
    )
    servers = engine(sizes, serving, implementation)
    ranks = (0, 1)
    results = []
    for step in (1, 2):
        sample = batch().take([0, 1, 2, 3, 4] if dist.get_rank() == 0 else [5, 6, 7, 8, 9])
        trained.train_batch(sample, loss, cases.denominator(sample))
        sides = [PlacedLayout(each.layout(), ranks) for each in (trained, servers)]
        plan = plan_move(*sides, hosts=dict.fromkeys(ranks, 0), budget=1 << 20)
        held, taken = (
            Holdings(side, dist.get_rank(), each.storages())
            for side, each in zip(sides, (trained, servers), strict=True)
        )
        Mover(plan, dist.get_rank(), held, taken, group=None, device=torch.device("cpu")).run()
        own = PROMPTS if "tp" in sizes else PROMPTS[2 * dist.get_rank() :][:2]
        rows = drawn(servers, own, step)
        tokens = SequenceSample.from_default(
            tuple(len(row[0]) for row in rows),
            [str(number) for number in range(len(rows))],
            {"input_ids": torch.tensor([token for row in rows for token in row[0]])},
        )
        results.append((rows, trained.forward(tokens)["logp"].tolist()))
        servers.offload()
        assert list(Path(servers._servers.folder).glob("*.*.*")) == [] if servers._servers else True
        servers.onload()
    servers.close()
    return results


@pytest.mark.parametrize(
    ("sizes", "implementation"),
    rotating(
        pytest.param({"tp": 2}, "builtin"),
        pytest.param({"dp": 2}, "builtin"),
        pytest.param({"dp": 2}, "hf"),
        pytest.param({"tp": 2}, "hf"),
        shares=2,
    ),
    ids=str,
)
def test_servers_sample_with_the_weights_of_every_step(
    ranks: RankPool, tmp_path: Path, sizes: dict[str, int], implementation: str
) -> None:
    """Covers one server for two tensor ranks, and one server per data-parallel rank.
    Log-probabilities of server and trainer agree in both steps, so every tensor arrived. Between
    the steps, the server sleeps and loses its weights, and no copy stays in host memory.
    """
    record = tmp_path / "record"
    results = ranks(
        2,
        f"{HERE}:trained_and_served",
        *(sizes, implementation, python(tmp_path / "bin", record), tmp_path),
    )
    for of_rank in results:
        for rows, logp in of_rank:
            assert len(rows) == 2 * len(PROMPTS if "tp" in sizes else PROMPTS[:2])
            own = [(value, at >= prompt) for _, row, prompt in rows for at, value in enumerate(row)]
            for (value, made), expected in zip(own, logp, strict=True):
                assert value == (pytest.approx(expected, abs=1e-4) if made else 0.0)
    if "tp" in sizes:
        assert results[0] == results[1]
    paths = [json.loads(line)[0] for line in record.read_text().splitlines()]
    servers = 1 if "tp" in sizes else 2
    assert paths.count("/update_weights_from_disk") == 2 * servers
    assert paths.count("/release_memory_occupation") == 2 * servers
    assert paths.count("/resume_memory_occupation") == servers
    words = (tmp_path / "server.0.log").read_text()
    assert "Traceback" not in words


def killed_by_requests(program: str, log: Path) -> None:
    """Let a server of this rank sample with weights, so that its requests end it."""
    serving = Serving(python=program, arguments=(), tokenizer=None, patience=PATIENCE, log=log)
    servers = engine({"dp": 1}, serving)
    try:
        for tensor in servers.storages().values():
            tensor.zero_()
        drawn(servers, PROMPTS, 1)
    finally:
        servers.close()


def test_server_that_repeats_one_error_ends_the_trial(ranks: RankPool, tmp_path: Path) -> None:
    """Each start of the server loads the weights and ends at the first request. The rank raises a
    user error, which ends the trial, with the server, its error and its log file.
    """
    program = python(tmp_path / "bin", options="--dies-of 'no kernel for heads of 4'")
    log = tmp_path / "server.log"
    message = (
        "UsageError: sglang server of rollout 0 cannot be used: its last 3 starts .* same error.*: "
        r"sglang server of rollout 0 ended \(SIGKILL\): RuntimeError: no kernel for heads of 4; "
        f"its log is {log}"
    )
    with pytest.raises(RankError, match=message):
        ranks(1, f"{HERE}:killed_by_requests", program, log)
    assert log.read_text().count("Scheduler hit an exception") == 3


@pytest.fixture
def started() -> Iterator[list[Started]]:
    servers: list[Started] = []
    yield servers
    for server in servers:
        server.end()


def running(addresses: Sequence[str], weights: Path, **options: Any) -> Running:
    options = {"keys": ServerKeys(), "context": 16, **options}
    return Running(
        addresses=tuple(map(Address, addresses)),
        weights=weights,
        text=False,
        patience=PATIENCE,
        **options,
    )


def served(settings: Running) -> list[Any]:
    """Return samples of running servers with two weight versions. The second version is
    all zeros.
    """
    servers = engine({"dp": 1}, settings)
    results = []
    for step, scale in ((1, 0.5), (2, 0.0)):
        generator = torch.Generator().manual_seed(step)
        for tensor in servers.storages().values():
            tensor.copy_(scale * torch.randn(tensor.shape, generator=generator))
        results.append(drawn(servers, PROMPTS, step))
    servers.close()
    return results


def test_external_servers_share_requests_and_get_every_version(
    ranks: RankPool, tmp_path: Path, started: list[Started]
) -> None:
    """Servers use TCP and a Unix socket, with keys, one of which is only for updates.

    The folder with weights is empty afterwards.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    keyed = ("--keys", "the-key,the-admin-key")
    started.append(Started(tmp_path, ARCHITECTURE, "tcp", str(port), *keyed))
    started.append(Started(tmp_path, ARCHITECTURE, "unix", str(tmp_path / "socket"), *keyed))
    addresses = [f"http://127.0.0.1:{port}", f"unix:{tmp_path / 'socket'}"]
    weights = tmp_path / "weights"
    (weights / "of-an-earlier-incarnation").mkdir(parents=True)
    keys = ServerKeys(api="the-key", admin="the-admin-key")
    settings = running(addresses, weights, keys=keys)
    (results,) = ranks(1, f"{HERE}:served", settings)
    for rows in results:
        assert len(rows) == 2 * len(PROMPTS)
    uniform = -math.log(ARCHITECTURE["vocab_size"])
    assert all(
        value == pytest.approx(uniform, abs=1e-5)
        for _, logprobs, prompt in results[1]
        for value in logprobs[prompt:]
    )
    assert all(server.count("/update_weights_from_disk") == 2 for server in started)
    tried = 2  # whether the vocabulary has a token
    assert all(server.count("/generate") > tried for server in started)
    assert not any(weights.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--keys", "other"), "HTTP status 401.*rollout.server_keys"),
        (("--mounted-as", "/elsewhere"), "see .*weights.*server_weights to a folder"),
    ],
)
def test_unusable_external_server_is_rejected_with_the_reason(
    ranks: RankPool,
    tmp_path: Path,
    started: list[Started],
    options: tuple[str, ...],
    message: str,
) -> None:
    """Servers are rejected before the first request, or when they get the first weights."""
    started.append(Started(tmp_path, ARCHITECTURE, "one", str(tmp_path / "socket"), *options))
    refused = running([f"unix:{tmp_path / 'socket'}"], tmp_path / "weights")
    with pytest.raises(RankError, match=f"(Usage|Rejected)Error: .*{message}"):
        ranks(1, f"{HERE}:served", refused)

"""Tests of requests to SGLang and of its replies. (tests/engines has a real server.)"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from slurmrl.config.schema.rollout import Address
from slurmrl.data.meta import SampledMasks
from slurmrl.errors import RunFailedError, UsageError
from slurmrl.models.architecture import ModelConfig
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.base import GenerationOptions, GenerationRequest, WeightVersion
from slurmrl.rollouts.generation.fitness import ServedModel
from slurmrl.rollouts.generation.http import HttpClient
from slurmrl.rollouts.generation.launch_sglang import tell_grids_apart
from slurmrl.rollouts.generation.server_kinds import weights_config
from slurmrl.rollouts.generation.sglang import (
    SglangDialect,
    digest_of,
    read_checksums,
    read_reply,
    request_body,
)
from slurmrl.rollouts.generation.sglang_requests import PiecewiseSampling, RoutedLayers
from slurmrl.rollouts.generation.weight_checks import Held, TensorPart
from tests.support.trials import ARCHITECTURE

INFO: dict[str, Any] = {
    "version": "0.5.20",
    "enable_custom_logit_processor": False,
    "device": "cpu",
    "max_req_input_len": 63,
    "skip_tokenizer_init": True,
    "architectures": ["Qwen2ForCausalLM"],
    "model_path": "/none",
}
VOCABULARY = 50
MODEL = ServedModel(architecture="Qwen2ForCausalLM", vocabulary=VOCABULARY)


def draw(**options: Any) -> GenerationRequest:
    settings = GenerationOptions(**{"max_new_tokens": 6, **options})
    return GenerationRequest(
        request_id="r", prompt=(1, 2), keys=(3,), seed=7, step=1, options=settings
    )


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


def reply(tokens: list[int], kind: str, version: str = "1.1", **finish: Any) -> dict[str, Any]:
    return {
        "output_ids": tokens,
        "text": letters(tokens),
        "meta_info": {
            "finish_reason": {"type": kind, **finish},
            "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}],
            "output_token_logprobs": [[-token / 10, token, None] for token in tokens],
        },
    }


class ScriptedServer(HttpClient):
    """A server that samples the following numbers, and pauses after two tokens."""

    def __init__(self, info: Mapping[str, Any] = INFO) -> None:
        super().__init__(Address("unix:/nowhere"))
        self.info = info
        self.asked: list[Mapping[str, Any]] = []
        self.version = "1.1"
        self.posted: list[str] = []
        self.bodies: list[tuple[str, Mapping[str, Any]]] = []
        self.busy = False
        """Whether a batch does not end."""
        self.begun = asyncio.Event()
        self._ended: asyncio.Event = asyncio.Event()

    async def get(self, path: str, *, timeout_s: float) -> object:
        return self.info

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None,
        bounded: bool = False,
    ) -> object:
        self.posted.append(path)
        self.bodies.append((path, body or {}))
        if path.startswith("/flush_cache") and self.busy:
            raise UsageError("HTTP status 400: there are pending requests")
        if path in ("/pause_generation", "/abort_request"):
            self._ended.set()
        if path != "/generate":
            return {"success": True, "ranks": []}
        assert body is not None
        for token in body["sampling_params"].get("logit_bias", {}):
            if int(token) >= VOCABULARY:  # what 0.5.20 says
                raise UsageError(f"logit_bias must has keys in [0, {VOCABULARY - 1}], got {token}.")
            return {}
        self.asked.append(body)
        self._ended = asyncio.Event()
        last, count = body["input_ids"][-1], body["sampling_params"]["max_new_tokens"]
        if count > 2 and len(self.asked) == 1:
            self.begun.set()
            await self._ended.wait()
            return reply([last + 1, last + 2], "abort")
        tokens = [last + number + 1 for number in range(count)]
        for end in range(1, count + 1):
            for stop in body["sampling_params"]["stop"]:
                if letters(tokens[:end]).endswith(stop):
                    return reply(tokens[:end], "stop", self.version, matched=stop)
        return reply(tokens, "length", self.version)


async def paused(settings: GenerationRequest) -> tuple[ScriptedServer, Completion]:
    """Return a sample that an update interrupts after two tokens."""
    server = ScriptedServer()
    dialect = SglangDialect(server, model=MODEL)
    await dialect.connect()
    drawing = asyncio.create_task(dialect.sample(settings))
    await server.begun.wait()
    await dialect.pause()
    await asyncio.sleep(0.01)
    assert len(server.asked) == 1, "nothing is requested of a paused server"
    server.version = "2.1"
    await dialect.resume()
    return server, await drawing


@pytest.mark.parametrize(
    ("stop", "asked", "tokens"),
    [
        ("ef", [["ef", "f"]], (3, 4, 5)),  # across the pause
        ("eh", [["eh", "h"], ["eh"]], (3, 4, 5, 6, 7, 8)),  # the rest does not follow
    ],
)
def test_stop_string_is_found_across_a_pause(
    stop: str, asked: list[list[str]], tokens: tuple[int, ...]
) -> None:
    """The server would not find a stop string that the pause cuts."""
    server, made = asyncio.run(paused(draw(stop_strings=(stop,))))
    assert [body["sampling_params"]["stop"] for body in server.asked] == [[stop], *asked]
    assert server.asked[1]["input_ids"] == [1, 2, 3, 4]
    assert made.tokens == tokens
    assert made.versions[:3] == ("1.1", "1.1", "2.1")
    assert made.finish == ("stop" if stop in letters(tokens) else "length")


def test_completion_paused_at_the_context_length_ends() -> None:
    """No tokens are left to request."""

    async def work() -> Completion:
        server = ScriptedServer({**INFO, "max_req_input_len": 4})
        dialect = SglangDialect(server, model=MODEL)
        await dialect.connect()
        asked = replace(draw(min_new_tokens=5), prompt=(1, 2))
        drawing = asyncio.create_task(dialect.sample(asked))
        await server.begun.wait()
        await dialect.pause()
        await dialect.resume()
        made = await drawing
        assert [body["sampling_params"]["min_new_tokens"] for body in server.asked] == [3, 1]
        return made

    made = asyncio.run(work())
    assert (made.tokens, made.finish) == ((3, 4, 5), "length")


def test_completion_cut_inside_a_character_begins_again() -> None:
    """A stop string may begin within this character."""
    drawing = PiecewiseSampling(draw(stop_strings=("é",)))
    made = Completion(tokens=(3,), logprobs=(-1.0,), versions=("1.1",), finish="aborted")
    assert drawing.add(replace(made, text="a\ufffd")) == "aborted"
    assert drawing.completion("aborted").tokens == (3,)
    assert drawing.rest() == drawing.sampling


def test_abort_ends_a_completion_even_if_the_server_is_paused() -> None:
    """The request returns the tokens sampled so far."""

    async def work() -> Completion:
        server = ScriptedServer()
        dialect = SglangDialect(server, model=MODEL)
        await dialect.connect()
        drawing = asyncio.create_task(dialect.sample(draw()))
        await server.begun.wait()
        await dialect.pause()
        await asyncio.sleep(0.01)
        await dialect.abort("r")
        return await asyncio.wait_for(drawing, 30)

    made = asyncio.run(work())
    assert (made.tokens, made.finish) == ((3, 4), "aborted")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"text": "a"}, "does not have SGLang's form"),
        (reply([3], "stop", matched=2), "ended a completion at 2"),
        ({**reply([3, 4], "length"), "output_ids": [3, 5]}, "2 tokens, .* token ids must match"),
        ({**reply([3, 4], "length"), "text": None}, "with stop strings has no text"),
    ],
)
def test_wrong_replies_are_rejected(answer: object, message: str) -> None:
    with pytest.raises(RunFailedError, match=message):
        read_reply("server", answer, draw(stop_token_ids=(9,), stop_strings=("x",)))


def masked(masks: list[list[int]]) -> dict[str, Any]:
    """Return a reply with these sampling masks."""
    answer = reply([3, 4], "length")
    logprobs = {"output_token_sampling_logprobs": [-0.1, -0.2]}
    more = {"output_token_sampling_mask": masks, **logprobs}
    return {**answer, "meta_info": {**answer["meta_info"], **more}}


def test_sampling_masks_are_requested_and_read_with_masked_probabilities() -> None:
    """Without masks, log-probabilities are relative to all tokens."""
    asked = draw(top_k=3, masks=True)
    body = request_body(asked)
    assert body["return_sampling_mask"]
    made = read_reply("server", masked([[9, 3, 5], [4]]), asked)[0]
    assert made.masks == SampledMasks(array("i", [3, 1]), array("i", [3, 5, 9, 4]))
    assert made.logprobs == (-0.1, -0.2)
    plain = draw(top_k=3)
    assert read_reply("server", masked([]), plain)[0].masks is None


@pytest.mark.parametrize("masks", [[], [[3]], [[3], [5, 6]], [[3], [4], [5]]])
def test_reply_with_a_wrong_number_of_sampling_masks_is_rejected(masks: list[list[int]]) -> None:
    with pytest.raises(RunFailedError, match=rf"{len(masks)} sampling masks"):
        read_reply("server", masked(masks), draw(top_k=3, masks=True))


def test_segments_of_a_completion_join_their_sampling_masks() -> None:
    drawing = PiecewiseSampling(draw(top_k=3, masks=True))
    for masks in ([[3, 9], [4]], [[5, 3], [4, 2]]):
        piece = read_reply("server", masked(masks), drawing.rest())
        drawing.add(*piece)
    masks = drawing.completion("length").masks
    assert masks == SampledMasks(array("i", [2, 1, 2, 2]), array("i", [3, 9, 4, 3, 5, 2, 4]))


ROUTED = RoutedLayers(layers=3, sparse=(0, 2), experts=5, per_token=2)


def routed(rows: object, answer: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a reply with these experts."""
    answer = answer or reply([3, 4], "length")
    text = base64.b64encode(np.array(rows, "<i4").tobytes()).decode()
    return {**answer, "meta_info": {**answer["meta_info"], "routed_experts": text}}


def experts_of(answer: dict[str, Any]) -> Any:
    asked = draw(experts=True)
    return read_reply("server", answer, asked, routed=ROUTED)[0].experts


def test_experts_are_read_only_for_layers_with_experts() -> None:
    """SGLang reports all layers, and no experts of the last token, which it did not process."""
    assert request_body(draw(experts=True))["return_routed_experts"]
    rows = [[[0, 1], [9, 9], [4, 2]], [[3, 1], [0, 0], [0, 4]], [[1, 0], [0, 0], [2, 3]]]
    found = experts_of(routed(rows))
    assert found.dtype == np.int16
    assert found.tolist() == [[0, 1, 4, 2], [3, 1, 0, 4], [1, 0, 2, 3], [-1, -1, -1, -1]]
    assert experts_of(reply([3], "abort")) is None
    plain = read_reply("server", routed(rows), draw())[0]
    assert plain.experts is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (reply([3, 4], "length"), "has no experts; start the server with --enable-return-routed"),
        (routed(np.ones((2, 3, 2))), "the experts of 4 tokens are not 3 rows of 2 in each of 3"),
        (routed([1, 2, 3]), "are not 3 rows"),
        (routed(np.zeros((3, 3, 2))), "are not 2 of the 5 experts"),
        (routed(np.full((3, 3, 2), [0, 5])), "are not 2 of the 5 experts"),
        (routed(np.full((3, 3, 2), [-1, 2])), "are not 2 of the 5 experts"),
        (
            {"output_ids": [3], "meta_info": {**reply([3], "stop")["meta_info"],
             "routed_experts": "not base64"}},
            "are not 2 rows",
        ),
        (
            {"output_ids": [3], "meta_info": {**reply([3], "stop")["meta_info"],
             "routed_experts": [[1, 2]]}},
            "does not have SGLang's form",
        ),
    ],
)  # fmt: skip
def test_experts_of_other_tokens_or_models_are_rejected(
    answer: dict[str, Any], message: str
) -> None:
    """Experts of a layer without a record are zeros, which are not two different experts."""
    with pytest.raises(RunFailedError, match=message):
        experts_of(answer)


def test_completion_takes_the_experts_of_its_last_segment() -> None:
    """The last segment has prefilled the tokens of the others."""
    drawing = PiecewiseSampling(draw(experts=True))
    rows = np.full((5, 3, 2), [0, 1])
    for answer in (reply([3, 4], "abort"), routed(rows, reply([3, 4], "length"))):
        drawing.add(*read_reply("server", answer, drawing.rest(), routed=ROUTED))
    experts = drawing.completion("length").experts
    assert experts is not None
    assert experts.shape == (6, 4)
    assert drawing.completion("aborted").experts is None


def test_experts_are_recorded_for_an_aborted_sample_with_stop_token() -> None:
    asked = draw(experts=True, stop_token_ids=(4,))
    rows = np.full((3, 3, 2), [0, 1])
    for answer in (routed(rows, reply([3, 4], "abort")), reply([3, 4], "abort")):
        drawing = PiecewiseSampling(asked)
        finish = drawing.add(*read_reply("server", answer, asked, routed=ROUTED))
        assert finish == "stop"
        lacks = answer["meta_info"].get("routed_experts") is None
        with pytest.raises(RunFailedError, match="has no experts") if lacks else nullcontext():
            experts = drawing.completion(finish).experts
            assert experts is not None
            assert experts.shape == (4, 4)


def test_model_without_experts_records_none() -> None:
    with pytest.raises(UsageError, match="the model has no experts to record"):
        asyncio.run(SglangDialect(ScriptedServer(), model=MODEL).sample(draw(experts=True)))


RECORDS = {"enable_return_routed_experts": True, "speculative_algorithm": None, "pp_size": 1}


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({}, "replay_experts needs a server with --enable-return-routed-experts"),
        ({**RECORDS, "enable_hierarchical_cache": True}, "with enable_hierarchical_cache True"),
        ({**RECORDS, "speculative_algorithm": "EAGLE"}, "experts for the wrong tokens"),
        (RECORDS, None),
    ],
)
def test_servers_without_correct_expert_records_are_rejected(
    info: Mapping[str, Any], message: str | None
) -> None:
    for needed in (False, True):
        model = replace(MODEL, experts=needed)
        refuses = pytest.raises(UsageError, match=message) if needed and message else nullcontext()
        with refuses:
            asyncio.run(SglangDialect(ScriptedServer({**INFO, **info}), model=model).connect())


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({**INFO, "version": "0.5.19"}, "SGLang 0.5.19 is too old; at least 0.5.20"),
        ({**INFO, "enable_custom_logit_processor": True}, "--enable-custom-logit-processor"),
    ],
)
def test_unsuitable_servers_are_rejected(info: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        asyncio.run(SglangDialect(ScriptedServer(info), model=MODEL).connect())


@pytest.mark.parametrize(
    ("architecture", "vocabulary", "message"),
    [
        ("Qwen2ForCausalLM", 50, None),
        ("LlamaForCausalLM", 50, "architecture.*Qwen2ForCausalLM.*belong to LlamaForCausalLM"),
        ("Qwen2ForCausalLM", 49, "must have 49 token ids"),
        ("Qwen2ForCausalLM", 51, "must have 51 token ids"),
    ],
)
def test_server_of_another_model_is_rejected_before_requests(
    architecture: str, vocabulary: int, message: str | None
) -> None:
    """An architecture or a vocabulary that differs from the weights' is named at once."""
    server = ScriptedServer()
    model = ServedModel(architecture=architecture, vocabulary=vocabulary)
    dialect = SglangDialect(server, model=model)
    if message is None:
        asyncio.run(dialect.connect())
    else:
        with pytest.raises(UsageError, match=message):
            asyncio.run(dialect.connect())
    assert server.asked == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "has layers=3, but the weights have 2"),
        ({"vocab_size": 40}, "has vocabulary=40, but the weights have 50"),
        ({}, None),
    ],
)
def test_server_of_another_model_size_is_rejected_if_visible(
    tmp_path: Path, changes: dict[str, int], message: str | None
) -> None:
    """The server would silently load the weights of a model with fewer layers."""
    sizes = {**ARCHITECTURE, "vocab_size": VOCABULARY, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **changes}))
    model = ServedModel.of(
        weights_config(ModelConfig.from_hf(sizes), "float32"), text=False, experts=False
    )
    server = ScriptedServer({**INFO, "model_path": str(tmp_path)})
    with pytest.raises(UsageError, match=message) if message else nullcontext():
        asyncio.run(SglangDialect(server, model=model).connect())


KEEPS: dict[str, Any] = {**INFO, "version": "0.5.22", "pp_size": 1, "disaggregation_mode": "null"}


@pytest.mark.parametrize(
    ("info", "least", "stale_cache", "modes"),
    [
        (INFO, 0, False, ["abort", "abort"]),
        ({**KEEPS, "version": "0.5.21"}, 0, False, ["abort", "abort"]),
        (KEEPS, 0, False, ["retract", "retract"]),
        ({**KEEPS, "version": "0.6.0"}, 0, False, ["retract", "retract"]),
        ({**KEEPS, "pp_size": 2}, 0, False, ["abort", "abort"]),
        ({**KEEPS, "enable_hierarchical_cache": True}, 0, False, ["abort", "abort"]),
        (KEEPS, 2, False, ["retract", "abort"]),
        (INFO, 2, True, ["abort", "in_place"]),
        (KEEPS, 2, True, ["retract", "in_place"]),
    ],
)
def test_pause_mode_depends_on_server_version_and_requests(
    tmp_path: Path, info: Mapping[str, Any], least: int, stale_cache: bool, modes: list[str]
) -> None:
    """A server with pause mode "retract" is idle immediately. Before the first update, its cache
    may belong to another run, so it is emptied. In a kept cache, only requests of the same version
    share pages. A paused server stays in its mode.
    """

    async def work() -> ScriptedServer:
        server = ScriptedServer({**info, "weight_version": "1.1"})
        dialect = SglangDialect(server, model=MODEL, stale_cache=stale_cache)
        await dialect.connect()
        version = WeightVersion(name="1.1", folder=tmp_path)
        await dialect.pause()
        await dialect.load(version)
        await dialect.resume()
        options = {"max_new_tokens": 9, "min_new_tokens": least}
        drawing = asyncio.create_task(dialect.sample(draw(**options)))
        await server.begun.wait()
        for _ in range(2):
            await dialect.pause()
        await dialect.load(version)
        await dialect.resume()
        await drawing
        return server

    server = asyncio.run(work())
    bodies = server.bodies
    assert [body["mode"] for path, body in bodies if path == "/pause_generation"] == [
        modes[0],
        *(2 * modes[1:]),
    ]
    flushed = [body["flush_cache"] for path, body in bodies if path.startswith("/update_weights")]
    assert flushed == [mode != "in_place" for mode in modes]
    waited = [path for path in server.posted if path.startswith("/flush_cache")]
    assert len(waited) == modes.count("abort")
    assert {body["extra_key"] for body in server.asked} == {"1.1" if stale_cache else None}


@pytest.mark.parametrize("masks", [False, True])
def test_request_aborted_while_waiting_has_no_masks(masks: bool) -> None:
    """The tokens are useless without their probabilities."""
    answer = reply([3, 4], "abort", message="Abort in waiting queue")
    made, _ = read_reply("server", answer, draw(top_k=3, masks=masks))
    tokens = made.tokens
    assert tokens == (() if masks else (3, 4))
    assert made.finish == "aborted"
    assert (made.masks is not None) == masks


@pytest.mark.parametrize("busy", [False, True])
def test_update_and_sleep_wait_until_no_batch_runs(tmp_path: Path, busy: bool) -> None:
    """During a batch, SGLang would exit or reject the update."""

    async def work() -> list[str]:
        server = ScriptedServer({**INFO, "weight_version": "2.1"})
        dialect = SglangDialect(server, model=MODEL)
        await dialect.connect()
        server.posted.clear()
        server.busy = busy
        for act in (dialect.load(WeightVersion(name="2.1", folder=tmp_path)), dialect.sleep()):
            with pytest.raises(RunFailedError, match="not idle") if busy else nullcontext():
                await act
        return server.posted

    idle = "/flush_cache?timeout=30"
    changes = ["/update_weights_from_disk", "/release_memory_occupation"]
    assert asyncio.run(work()) == ([idle, idle] if busy else [idle, changes[0], idle, changes[1]])


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        ({"device": "cuda"}, None),
        ({"device": "cuda", "tp_size": 4}, None),
        ({"device": "cpu", "attention_backend": "torch_native", "tp_size": 1}, None),
        ({"device": "cpu", "attention_backend": "torch_native", "tp_size": 2}, "another form"),
        ({"device": "cpu", "attention_backend": "intel_amx", "tp_size": 1}, "another form"),
        ({"device": "cuda", "quantization": "fp8"}, "quantizes"),
        ({"device": "cuda", "torchao_config": "int8wo"}, "quantizes"),
        ({"device": "cuda", "dp_size": 2}, "several servers"),
    ],
)
def test_servers_with_weights_in_another_format_are_not_checked(
    info: Mapping[str, Any], reason: str | None
) -> None:
    """The parameters differ from the files although the weights are right."""
    digest = digest_of(info)
    assert isinstance(digest, str) == (reason is not None)
    assert reason is None or reason in str(digest)


@pytest.mark.parametrize("version", ["0.5.20", "0.5.21"])
def test_checksums_omit_the_draft_model(version: str) -> None:
    """A server may have a draft model. From 0.5.21 on, a rank reports both models together."""
    place = {"tp_rank": 1, "tp_size": 2, "pp_rank": 0, "rank": 1}
    places = [{**place, "role": "target"}, {**place, "role": "draft"}]
    ranks: list[object] = [{"checksums": {"a": "1", "draft.a": "2"}, "parallelism_info": places}]
    if version == "0.5.20":
        ranks = [{"checksums": {"a": "1"}, "parallelism_info": place}]
    assert read_checksums("server", {"ranks": ranks}) == [Held(TensorPart(1, 2), {"a": "1"})]
    with pytest.raises(RunFailedError, match="does not have SGLang's form"):
        read_checksums("server", {"success": True})


class ScriptedImage:
    """An image of SGLang, whose hash is the hash of its pixels."""

    def __init__(self, pixels: int, *grid: int) -> None:
        self.pixels = pixels
        self.model_specific_data = {"image_grid_thw": np.array([grid])}
        self.hash: int | None = None
        self.pad_value: int | None = None

    def set_hash(self, value: int) -> None:
        self.hash = self.pad_value = value

    def set_pad_value(self) -> None:
        if self.pad_value is None:
            self.set_hash(self.pixels if self.hash is None else self.hash)


def test_images_with_equal_pixels_but_different_grids_differ_in_hash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Images of one color have equal pixels, but the encoder also reads the places of patches."""
    module: Any = ModuleType("sglang.srt.managers.schedule_batch")
    module.MultimodalDataItem = ScriptedImage
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(ScriptedImage, "set_pad_value", ScriptedImage.set_pad_value)
    tell_grids_apart()
    wide, tall, again = (ScriptedImage(7, *grid) for grid in ((1, 2, 4), (1, 4, 2), (1, 2, 4)))
    for image in (wide, tall, again, wide):  # SGLang asks for a hash more than once
        image.set_pad_value()
    assert wide.hash == wide.pad_value == again.hash != tall.hash

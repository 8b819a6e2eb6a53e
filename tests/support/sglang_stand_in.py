"""A server with the API of SGLang 0.5.20 that samples from transformers' model: ``python
sglang_stand_in.py ADDRESS --model-path FOLDER``, or in place of a Python with SGLang. ADDRESS is
the path of a Unix socket or a port of this host. Further options: ``--keys API,ADMIN``, ``--record
FILE`` (a line for each request), ``--mounted-as SUFFIX`` (of folders with weights), ``--dies-of
ERROR`` (at the first request that samples with weights), ``--says TYPE`` (the reported dtype of
weights).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from transformers import AutoConfig, AutoModelForCausalLM

ADMIN = (*("/pause_", "/continue_", "/abort_", "/update_", "/release_", "/resume_", "/flush_"),)
KEPT = 6
"""Number of tokens of the context that a prompt cannot use."""


class StandIn:
    def __init__(self, options: dict[str, str]) -> None:
        self.options = options
        self.folder = options["--model-path"]
        self.config = AutoConfig.from_pretrained(self.folder)
        self.model: Any = None
        """The model; None until weights have arrived."""
        self.version = "default"
        self.asleep = False
        self.running = asyncio.Event()
        self.running.set()
        self.aborts: dict[str, asyncio.Event] = {}

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/server_info", self.server_info)
        app.router.add_get("/model_info", self.model_info)
        for path in (self.generate, self.abort_request, self.pause_generation):
            app.router.add_post(f"/{path.__name__}", path)
        for path in (self.continue_generation, self.update_weights_from_disk):
            app.router.add_post(f"/{path.__name__}", path)
        for path in (self.release_memory_occupation, self.resume_memory_occupation):
            app.router.add_post(f"/{path.__name__}", path)
        app.router.add_post("/flush_cache", self.flush_cache)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[..., Any]) -> web.Response:
        if "--record" in self.options:
            with open(self.options["--record"], "a") as file:
                file.write(json.dumps([request.path, await request.text()]) + "\n")
        api, _, admin = self.options.get("--keys", "").partition(",")
        key = admin or api if request.path.startswith(ADMIN) else api
        if key and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        response: web.Response = await handler(request)
        return response

    async def server_info(self, request: web.Request) -> web.Response:
        positions = self.config.max_position_embeddings
        return web.json_response(
            {
                "version": "0.5.20",
                "enable_custom_logit_processor": False,
                "skip_tokenizer_init": "--skip-tokenizer-init" in self.options,
                "enable_memory_saver": "--enable-memory-saver" in self.options,
                "device": "cpu",
                "dtype": self.options.get("--says", "float32"),
                "max_req_input_len": positions - KEPT,
            }
        )

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": self.folder,
                "architectures": self.config.architectures,
                "weight_version": self.version,
            }
        )

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        sampling = body["sampling_params"]
        for token in sampling.get("logit_bias", {}):
            if int(token) >= self.config.vocab_size:
                return web.json_response({"error": f"logit_bias: {token}"}, status=400)
        if self.asleep:
            return web.json_response({"error": "no memory"}, status=500)
        await self.running.wait()
        if self.model is not None and "--dies-of" in self.options:
            die(self.options["--dies-of"])
        name = body.get("rid", "")
        aborted = self.aborts[name] = asyncio.Event()
        tokens, logprobs, versions = [], [], []
        generator = torch.Generator().manual_seed(sampling.get("sampling_seed", 0))
        matched = None
        while len(tokens) < sampling["max_new_tokens"] and not aborted.is_set() and matched is None:
            row = self._logprobs([*body["input_ids"], *tokens], sampling["temperature"])
            greedy = sampling.get("top_k") == 1 or not sampling["temperature"]
            drawn = row.argmax() if greedy else torch.multinomial(row.exp(), 1, generator=generator)
            tokens.append(int(drawn))
            logprobs.append([float(row[tokens[-1]]), tokens[-1], None])
            versions.append({"version": self.version, "start": len(tokens) - 1, "end": len(tokens)})
            if tokens[-1] in sampling.get("stop_token_ids", ()):
                matched = tokens[-1]
            await asyncio.sleep(0)
        kind = "stop" if matched is not None else "abort" if aborted.is_set() else "length"
        meta = {
            "finish_reason": {"type": kind, "matched": matched},
            "weight_versions": versions,
            "output_token_logprobs": logprobs,
        }
        return web.json_response({"output_ids": tokens, "meta_info": meta})

    @torch.no_grad()
    def _logprobs(self, tokens: list[int], temperature: float) -> torch.Tensor:
        if self.model is None:
            return torch.zeros(self.config.vocab_size).log_softmax(-1)
        logits = self.model(torch.tensor([tokens])).logits[0, -1].float()
        return (logits / (temperature or 1.0)).log_softmax(-1)

    def _abort(self, prefix: str) -> None:
        for name, aborted in self.aborts.items():
            if name.startswith(prefix):
                aborted.set()

    async def abort_request(self, request: web.Request) -> web.Response:
        self._abort((await request.json())["rid"])
        return web.json_response({})

    async def pause_generation(self, request: web.Request) -> web.Response:
        self.running.clear()
        self._abort("")
        return web.json_response({"status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        self.running.set()
        return web.json_response({"status": "ok"})

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        try:
            if self.asleep:
                raise RuntimeError("there is no memory for weights")
            model, report = AutoModelForCausalLM.from_pretrained(
                body["model_path"] + self.options.get("--mounted-as", ""),
                dtype=torch.float32,
                output_loading_info=True,
            )
            if report["missing_keys"] or report["unexpected_keys"]:
                raise ValueError(str(report))
        except (OSError, ValueError, RuntimeError) as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        self.model, self.folder = model.eval(), body["model_path"]
        self.version = body["weight_version"]
        return web.json_response({"success": True, "message": "Succeeded"})

    async def flush_cache(self, request: web.Request) -> web.Response:
        return web.Response(text="Cache flushed.")

    async def release_memory_occupation(self, request: web.Request) -> web.Response:
        self.asleep, self.model = True, None
        return web.json_response(None)

    async def resume_memory_occupation(self, request: web.Request) -> web.Response:
        self.asleep = False
        return web.json_response(None)


def die(error: str) -> None:
    """Exit like SGLang after a scheduler has raised an error."""
    try:
        raise RuntimeError(error)
    except RuntimeError:
        at = "[2026-11-23 09:00:00"
        print(f"{at} TP0] Scheduler hit an exception: {traceback.format_exc()}")
        print(f"{at}] Received sigquit from a child process. It usually means the child failed.")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def parsed(words: list[str]) -> dict[str, str]:
    """Return the options with their values. The key of the address is ``""``."""
    found = {"": next(word for word in words if not word.startswith("-") and ".py" not in word)}
    for word, value in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            found[word] = "" if value.startswith("--") else value
    return found


async def serve(options: dict[str, str]) -> None:
    torch.set_num_threads(1)
    runner = web.AppRunner(StandIn(options).app())
    await runner.setup()
    address = options[""]
    if address.isdigit():
        site: web.BaseSite = web.TCPSite(runner, "127.0.0.1", int(address))
    else:
        Path(address).unlink(missing_ok=True)
        site = web.UnixSite(runner, address)
    await site.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(parsed(sys.argv[1:])))

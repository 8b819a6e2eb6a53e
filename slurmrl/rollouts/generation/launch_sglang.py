"""Start SGLang's server on a Unix socket.

Usage: ``python -P launch_sglang.py SOCKET ARGUMENTS…``

The script runs in the environment of SGLang and imports nothing of slurmrl. A socket in a private
folder needs no API key and no port. All users of the host could read a key among SGLang's
arguments, and another process could take the port first.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import socket
import sys
from typing import Any

ARRAYS = "slurmrl-arrays:"
"""Prefix of a string that replaces an image in a request: JSON with the arrays of a prompt."""


def listen_on(path: str) -> None:
    """Let uvicorn listen on a Unix socket instead of the host and port that its caller sets."""
    import uvicorn

    configure = uvicorn.Config.__init__

    def configure_socket(self: Any, app: Any, **settings: Any) -> None:
        del settings["host"], settings["port"]
        configure(self, app, uds=path, **settings)

    uvicorn.Config.__init__ = configure_socket


def unused_port() -> int:
    """Return an unused TCP port. SGLang derives other ports from this port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class PageableMemory:
    """Replacement of CUDA's runtime for hosts without a GPU.

    To record the experts of tokens, SGLang asks the runtime to pin host memory, even on a CPU.
    """

    @staticmethod
    def cudaHostRegister(address: int, size: int, flags: int) -> int:  # noqa: N802
        return 0


def need_no_gpu() -> None:
    """Make SGLang compute checksums of its weights and record experts on a CPU.

    Versions before 0.5.23 try to synchronize with a GPU before checksums, even without a GPU. All
    versions ask CUDA for memory to record experts.
    """
    import torch

    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.cudart = PageableMemory


def read_arrays() -> None:
    """Let requests contain the arrays of images as strings; SGLang accepts only tensors."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    generate = TokenizerManager.generate_request

    def generate_request(self: Any, request: Any, *others: Any) -> Any:
        data = getattr(request, "image_data", None)
        if isinstance(data, list):
            request.image_data = [_as_tensors(each) for each in data]
        return generate(self, request, *others)

    TokenizerManager.generate_request = generate_request


def _as_tensors(image: Any) -> Any:
    text = getattr(image, "url", image)
    if not isinstance(text, str) or not text.startswith(ARRAYS):
        return image
    import numpy as np
    import torch

    made: dict[str, Any] = {"format": "processor_output"}
    for name, (dtype, shape, content) in json.loads(text.removeprefix(ARRAYS)).items():
        numbers = np.frombuffer(bytearray(base64.b64decode(content)), dtype)
        made[name] = torch.from_numpy(numbers.reshape(shape))
    return made


def tell_grids_apart() -> None:
    """Let the hash of an image depend on the grid of its patches.

    SGLang hashes only pixels. A white image of 2 x 4 patches would get the cached hidden states,
    keys and values of a white image of 4 x 2 patches.
    """
    from sglang.srt.managers.schedule_batch import MultimodalDataItem

    hash_pixels = MultimodalDataItem.set_pad_value

    def set_pad_value(self: Any) -> None:
        grid = self.model_specific_data.get("image_grid_thw")
        known = self.hash is not None or self.pad_value is not None
        hash_pixels(self)
        if grid is not None and not known:
            content = f"{self.hash} {grid.tolist()}".encode()
            digest = hashlib.blake2b(content, digest_size=8).digest()
            self.set_hash(int.from_bytes(digest, "big"))

    MultimodalDataItem.set_pad_value = set_pad_value


def main(path: str, arguments: list[str]) -> None:
    from sglang.launch_server import run_server
    from sglang.srt.entrypoints import http_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    listen_on(path)
    read_arrays()
    tell_grids_apart()
    http_server._freeze_gc_after_server_warmup = lambda _: None  # the function uses the port
    try:
        run_server(prepare_server_args([*arguments, "--port", str(unused_port())]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if "--device cpu" in " ".join(sys.argv):  # even in processes that SGLang starts
    need_no_gpu()
if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

"""Stand-ins for servers in separate processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.trials import REPOSITORY, wait_until

STAND_IN = Path(__file__).with_name("sglang_stand_in.py")


def python(folder: Path, record: Path | None = None, options: str = "") -> str:
    """Write a program that replaces a Python with SGLang. ``options``: further options as shell
    text.
    """
    folder.mkdir(exist_ok=True)
    program = folder / "python"
    more = f"{options} --record '{record}'" if record else options
    program.write_text(
        '#!/bin/sh\n[ "$1" = -c ] && exit  # has it the package?\n'
        f'exec env -u PYTHONWARNINGS "{sys.executable}" "{STAND_IN}" "$@" {more}\n'
    )
    program.chmod(0o700)
    return str(program)


def listens(address: str) -> bool:
    kind = socket.AF_INET if address.isdigit() else socket.AF_UNIX
    with socket.socket(kind) as probe:
        where: Any = ("127.0.0.1", int(address)) if address.isdigit() else address
        return probe.connect_ex(where) == 0


class Started:
    """A running stand-in."""

    def __init__(
        self,
        folder: Path,
        architecture: Mapping[str, object],
        name: str,
        address: str,
        *options: str,
    ) -> None:
        model_folder = folder / f"{name}-model"
        model_folder.mkdir(exist_ok=True)
        config = {**architecture, "architectures": ["Qwen2ForCausalLM"]}
        (model_folder / "config.json").write_text(json.dumps(config))
        self.record = folder / f"{name}.record"
        words = [address, "--model-path", str(model_folder), "--record", str(self.record), *options]
        environment = {
            name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"
        }
        with (folder / f"{name}.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(STAND_IN), *words],
                cwd=REPOSITORY,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_until(f"the server at {address}", lambda: listens(address))

    def count(self, path: str) -> int:
        return self.record.read_text().count(f'["{path}"')

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

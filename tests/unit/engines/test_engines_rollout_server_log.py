"""Tests of the errors that are found in logs of SGLang and vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmrl.rollouts.generation.process import (
    TAIL_BYTES,
    EndedStart,
    FailedStarts,
    ServerLog,
    last_error,
    read_end,
)

SGLANG = """\
[2026-11-23 09:00:00] server_args=ServerArgs(model_path='/m', device='cuda')
[2026-11-23 09:00:07 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/e/sglang/srt/managers/scheduler.py", line 3130, in run_scheduler_process
    scheduler = Scheduler(
                ^^^^^^^^^^
  File "/e/sglang/srt/model_executor/model_runner.py", line 88, in init_memory_pool
    raise RuntimeError(
RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.

[2026-11-23 09:00:07] Received sigquit from a child process. It usually means the child failed.
[2026-11-23 09:00:07] Rank 0 scheduler is dead. Please check if there are relevant logs.
Traceback (most recent call last):
  File "/e/sglang/srt/entrypoints/engine.py", line 400, in _launch_subprocesses
    data = reader.recv()
           ^^^^^^^^^^^^^
EOFError
"""
VLLM = """\
(APIServer pid=41) INFO 11-23 09:00:00 [api_server.py:1839] vLLM API server version 0.32.0
(EngineCore_DP0 pid=77) ERROR 11-23 09:00:09 [core.py:718] EngineCore failed to start.
(EngineCore_DP0 pid=77) ERROR 11-23 09:00:09 [core.py:718] Traceback (most recent call last):
(EngineCore_DP0 pid=77) ERROR 11-23 09:00:09 [core.py:718]   File "/e/core.py", line 709, in run
(EngineCore_DP0 pid=77) ERROR 11-23 09:00:09 [core.py:718]     engine_core = EngineCoreProc(*args)
(EngineCore_DP0 pid=77) ERROR 11-23 09:00:09 [core.py:718] ValueError: No available memory for the \
cache blocks.
(EngineCore_DP0 pid=77) Process EngineCore_DP0:
(EngineCore_DP0 pid=77) Traceback (most recent call last):
(EngineCore_DP0 pid=77)   File "/p/multiprocessing/process.py", line 314, in _bootstrap
(EngineCore_DP0 pid=77)     self.run()
(EngineCore_DP0 pid=77) ValueError: No available memory for the cache blocks.
(APIServer pid=41) Traceback (most recent call last):
(APIServer pid=41)   File "/e/vllm/v1/engine/utils.py", line 759, in wait_for_engine_startup
(APIServer pid=41)     raise RuntimeError("Engine core initialization failed. "
(APIServer pid=41) RuntimeError: Engine core initialization failed. See root cause above. Failed {}
"""
INVALID = """\
INFO 11-23 09:00:00 [config.py:10] reading
Traceback (most recent call last):
  File "/e/vllm/config.py", line 9, in <module>
    raise
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, unknown architecture [type=value_error]
    For further information visit https://errors.pydantic.dev
"""
FLAG = """\
usage: launch_server.py [-h] --model-path MODEL
launch_server.py: error: unrecognized arguments: --no-such-flag
"""
WARNED = """\
(APIServer pid=41) WARNING 11-23 09:00:00 [base.py:380] Chat template warmup failed
(APIServer pid=41) WARNING 11-23 09:00:00 [base.py:380] Traceback (most recent call last):
(APIServer pid=41) WARNING 11-23 09:00:00 [base.py:380]   File "/e/vllm/renderers/base.py", line 217
(APIServer pid=41) WARNING 11-23 09:00:00 [base.py:380]     raise ValueError(
(APIServer pid=41) WARNING 11-23 09:00:00 [base.py:380] ValueError: Tokenizer not available
(APIServer pid=41) INFO 11-23 09:00:00 [api_server.py:55] Starting vLLM server on unix:/s
"""
LOGGED = "ERROR 11-23 09:00:00 [a.py:1] no kernel for this GPU\nINFO 11-23 09:00:01 [a.py:2] bye\n"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            SGLANG,
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        ),
        (VLLM, "ValueError: No available memory for the cache blocks."),
        (
            INVALID,
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig "
            "Value error, unknown architecture [type=value_error] "
            "For further information visit https://errors.pydantic.dev",
        ),
        (FLAG, "launch_server.py: error: unrecognized arguments: --no-such-flag"),
        (WARNED, ""),
        ("[2026-11-23 09:00:00] [http_server] Error: logit_bias must has keys in [0, 15]\n", ""),
        (VLLM + WARNED, "ValueError: No available memory for the cache blocks."),
        (LOGGED, "ERROR 11-23 09:00:00 [a.py:1] no kernel for this GPU"),
        ("".join(SGLANG.splitlines(keepends=True)[10:]), "EOFError"),
        ("[2026-11-23 09:00:00] The server is fired up and ready to roll!\n", ""),
        ("", ""),
    ],
    ids=[
        "sglang",
        "vllm",
        "several lines",
        "flag",
        "warned",
        "refused",
        "failed and warned",
        "logged",
        "consequence",
        "none",
        "empty",
    ],
)
def test_log_error_comes_from_the_process_that_failed_first(text: str, error: str) -> None:
    assert last_error(text.splitlines()) == error


def test_only_the_end_of_the_log_of_a_start_is_read(tmp_path: Path) -> None:
    """Errors of an earlier start, or far above, are ignored. A missing log counts as empty."""
    path = tmp_path / "server.log"
    path.write_text(SGLANG)
    begin = path.stat().st_size
    with path.open("a") as file:
        file.write("ready\n\nserving\n")
    assert read_end(path, begin) == ServerLog(path, ("ready", "serving"))
    assert str(read_end(path, begin)) == f"its log is {path}, which ends with:\nready\nserving"
    assert str(read_end(path, 0)).endswith(f"--mem-fraction-static.; its log is {path}")
    with path.open("a") as file:
        file.write("served\n" * (TAIL_BYTES // len("served\n") + 1))
    assert read_end(path, 0).error == ""
    assert str(read_end(tmp_path / "gone", 0)) == f"its log is {tmp_path / 'gone'}"


@pytest.mark.parametrize(
    ("error", "of_the_host"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", False),
        ("ValueError: head size 4 is not supported", False),
        ("MemoryError", True),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/m'", True),
        ("ImportError: libcuda.so.1: cannot open shared object file", True),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", True),
        ("torch.distributed.DistNetworkError: the client socket has timed out", True),
    ],
)
def test_errors_are_classified_as_host_or_program_faults(error: str, of_the_host: bool) -> None:
    assert ServerLog(Path("log"), (), error).of_the_host == of_the_host


def test_errors_that_differ_only_in_numbers_are_equal() -> None:
    """Ports, addresses and free bytes differ from start to start."""
    kinds = {
        ServerLog(Path("log"), (), f"RuntimeError: 0x{number:x}: {number} bytes are missing").kind
        for number in (7, 3000, 65536)
    }
    assert len(kinds) == 1


def failed(*endings: EndedStart) -> FailedStarts:
    starts = FailedStarts(stable_s=60.0)
    for ending in endings:
        starts.add(ending)
    return starts


def test_server_is_abandoned_only_after_a_repeated_error_without_answers() -> None:
    same = EndedStart(reason="", error="E", served_s=100.0)
    assert failed(same, same, same).hopeless
    assert not failed(same, same).hopeless
    other = EndedStart(reason="", error="F", served_s=100.0)
    answered = EndedStart(reason="", error="E", served_s=100.0, asked=True, answered=True)
    unknown = EndedStart(reason="", served_s=100.0)
    for between in (other, answered, unknown):
        assert not failed(same, between, same, same).hopeless
        assert not failed(same, same, between).enough
        assert failed(between, same, same, same).hopeless
    assert not failed(unknown, unknown, unknown).hopeless


def test_long_server_start_that_answered_all_requests_counts_as_good() -> None:
    """A good start leaves only its own end in the count."""
    short = EndedStart(reason="")
    idle = EndedStart(reason="", served_s=60.0)
    silent = EndedStart(reason="", served_s=600.0, asked=True)
    busy = EndedStart(reason="", served_s=60.0, asked=True, answered=True)
    assert [failed(short, last).count for last in (short, idle, silent, busy)] == [2, 1, 2, 1]
    assert failed(short, silent, short).enough
    assert not failed(short, short, busy, short).enough

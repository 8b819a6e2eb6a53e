"""Host memory that torch allocates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(act: Callable[[], object]) -> int:
    """Return the peak increase of the bytes that torch's CPU allocator holds during ``act``. All
    tensors count, including those inside operators and of other threads.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        act()
    found: Any = seen.profiler
    events = [e for e in found.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.device_type() == torch.autograd.DeviceType.CPU:
            now += event.nbytes()
            peak = max(peak, now)
    return peak

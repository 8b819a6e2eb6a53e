"""Sequence lengths from which commands predict step times: means, and limits from the data."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slurmrl.plan.estimates.call_costs import MeanTokens
    from slurmrl.plan.settings import Settings

SYSTEM_PROMPT = 1024
"""Number of tokens of a long system prompt that a chat template adds to rows by default.
"""


def limit_key(settings: Settings) -> str:
    """Return the setting that limits the lengths of the rows."""
    name = "max_prompt_tokens" if settings.config.dataset.kind == "prompt" else "max_tokens"
    return f"dataset.{name}"


def limit_of_rows(settings: Settings) -> dict[str, int]:
    """Return the dotted key of a length limit, mapped to an upper bound of the rows' lengths.

    Return nothing if the configuration sets a limit, if the model limits the lengths anyway, or if
    the data or the model cannot be read.
    """
    from slurmrl.plan.estimates.shape import as_long_as_rows, lengths_of, shape_of

    config = settings.config
    lengths = lengths_of(config, settings.algorithm, shape_of(config.actor))
    key = limit_key(settings)
    if lengths is None or not lengths.assumed:
        return {}
    limited = as_long_as_rows(config, settings.algorithm).dataset
    found = getattr(limited, key.partition(".")[2])
    if found is None:
        return {}
    chats = any(part.is_chat for part in config.dataset.parts.values())
    return {key: min(found + SYSTEM_PROMPT * chats, lengths.longest - lengths.new_tokens)}


def assumed_lengths(settings: Settings) -> str:
    """Return advice if neither the configuration nor the data limits the lengths; else ""."""
    from slurmrl.plan.estimates.shape import lengths_of, shape_of

    config = settings.config
    lengths = lengths_of(config, settings.algorithm, shape_of(config.actor))
    if lengths is None or not lengths.assumed:
        return ""
    return f"set {limit_key(settings)} (without it, {lengths.longest} tokens are assumed)"


def limit_notes(settings: Settings, limit: dict[str, int]) -> list[str]:
    """Return a line with the assumed limit of lengths and its origin; none for a given limit.

    ``limit`` is the result of `limit_of_rows`, which ``settings`` already contain.
    """
    from slurmrl.plan.estimates.shape import lengths_of, shape_of

    if limit:
        return [f"{key}={value} (no row of the data is longer)" for key, value in limit.items()]
    config = settings.config
    lengths = lengths_of(config, settings.algorithm, shape_of(config.actor))
    if lengths is None or not lengths.assumed:
        return []
    most = lengths.longest - lengths.new_tokens
    return [f"{limit_key(settings)}={most} (the maximum for this model)"]


def mean_tokens(
    settings: Settings, prompt: float | None, response: float | None
) -> MeanTokens | None:
    """Return the mean lengths in tokens, by default half of the limits; None for unknown limits.

    Raises UsageError for a mean that exceeds its limit.
    """
    from slurmrl.errors import UsageError
    from slurmrl.plan.estimates.call_costs import MeanTokens
    from slurmrl.plan.estimates.shape import lengths_of, shape_of

    config = settings.config
    lengths = lengths_of(config, settings.algorithm, shape_of(config.actor))
    if lengths is None:
        return None
    most, new = lengths.longest - lengths.new_tokens, lengths.new_tokens
    for mean, what, limit in (
        (prompt, "prompts", most),
        (response, "completions", new or math.inf),
    ):
        if mean is not None and mean > limit:
            raise UsageError(f"a mean of {mean:g} tokens is too long: {what} have at most {limit}")
    return MeanTokens(
        most / 2 if prompt is None else prompt, new / 2 if response is None else response
    )


def calibration(name: str, root: str | None, hardware: str | None) -> tuple[float, float, str]:
    """Return the mean lengths of a trial, and a comparison of its measured and predicted seconds.

    ``hardware`` names a profile that replaces the trial's profile. Raises UsageError for a trial
    without lengths.
    """
    from slurmrl.desk import trials
    from slurmrl.desk.report.collecting import measured_calls
    from slurmrl.errors import UsageError

    paths = trials.find(trials.root_folder(root), name)
    found = measured_calls(paths, hardware)
    if found.mean is None:
        raise UsageError(f"--calibrate {name}: {found.predictions}")
    if not found.calls:
        return *found.mean, f"{paths.full_name}: no seconds of calls were measured"
    known = [call for call in found.calls if call.predicted_s is not None]
    if not known:
        return *found.mean, f"{paths.full_name}: no seconds were predicted: {found.predictions}"
    measured, predicted = (
        sum(seconds or 0.0 for seconds in values)
        for values in zip(*((call.seconds, call.predicted_s) for call in known), strict=True)
    )
    words = ", ".join(f"{one.name} {one.seconds / (one.predicted_s or 1):.2f}" for one in known)
    return *found.mean, (
        f"{paths.full_name}: {measured:.3g} s of calls were measured, {predicted:.3g} s predicted; "
        f"measured / predicted: {words}"
    )

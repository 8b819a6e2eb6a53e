"""Samples that weight updates interrupt, against the same samples without updates."""

from __future__ import annotations

import random
from collections.abc import Sequence

from slurmrl.rollouts.completions import Completion, Finish
from slurmrl.rollouts.generation.base import GenerationOptions, GenerationRequest
from slurmrl.rollouts.generation.sglang_requests import PiecewiseSampling

WORDS = (b"a", b"b", b"ab", b"ba", b"aab", b"c", b"bc", b"b\xe2\x80")
"""The last one ends within a character."""
PAUSES = [None, None, 0, 1, 2, 3, 4]
"""After how many tokens of a request an update comes; None: after its end."""
STOPS = ("ab", "aa", "bc", "abc", "aba", "cab", "bb")


def text(tokens: Sequence[int]) -> str:
    return b"".join(WORDS[token] for token in tokens).decode(errors="replace")


def uninterrupted(stream: Sequence[int], options: GenerationOptions) -> tuple[int, Finish]:
    """Return the number of the stream's tokens in a sample, and its finish reason."""
    for count in range(options.min_new_tokens + 1, options.max_new_tokens + 1):
        whole, before = text(stream[:count]), len(text(stream[: count - 1]))
        ends = range(before + 1, len(whole) + 1)
        if stream[count - 1] in options.stop_token_ids or any(
            whole[:end].endswith(stop) for stop in options.stop_strings for end in ends
        ):
            return count, "stop"
    return options.max_new_tokens, "length"


def answer(
    rest: Sequence[int], options: GenerationOptions, pause: int | None, chance: random.Random
) -> tuple[Completion, str]:
    """Return what SGLang samples of the stream for one request, with stop strings and pauses."""
    tokens: list[int] = []
    finish: Finish | None = None
    stop = ""
    while finish is None:
        count = len(tokens)
        if count == pause:
            tokens += rest[count : count + chance.randrange(2)]
            finish = "aborted"
            break
        tokens.append(rest[count])
        stop = next((each for each in options.stop_strings if each in text(tokens)), "")
        if stop or (tokens[-1] in options.stop_token_ids and count >= options.min_new_tokens):
            finish = "stop"
        elif len(tokens) >= options.max_new_tokens:
            finish = "length"
    drawn = tuple(tokens)
    made = Completion(
        tokens=drawn,
        logprobs=(0.0,) * len(drawn),
        versions=("1.1",) * len(drawn),
        finish=finish,
        text=text(drawn),
    )
    return made, stop


def test_segments_combine_to_the_result_of_one_request() -> None:
    """Updates may cut a completion anywhere: within overlapping stop strings, before the minimum
    number of tokens, within a character, and at the last token. Every request makes progress
    between updates.
    """
    pieces = 0
    for seed in range(4000):
        chance = random.Random(seed)
        most = chance.randrange(1, 12)
        least = chance.choice([0, 0, chance.randrange(most + 1)])
        options = GenerationOptions(
            max_new_tokens=most,
            min_new_tokens=least,
            stop_strings=tuple(chance.sample(STOPS, chance.randrange(3))),
            stop_token_ids=(5,) if least == 0 and chance.randrange(2) else (),
        )
        stream = [chance.randrange(len(WORDS)) for _ in range(20)]
        drawing = PiecewiseSampling(
            GenerationRequest(
                request_id=str(seed), prompt=(1,), keys=(0,), seed=1, step=1, options=options
            )
        )
        pauses = chance.choice([[None], PAUSES, PAUSES])
        finish: Finish | None = None
        uncut = 0
        while finish in (None, "aborted"):
            rest = drawing.rest()
            left = stream[len(drawing.tokens) :]
            finish = drawing.add(*answer(left, rest.options, chance.choice(pauses), chance))
            uncut = 0 if finish == "aborted" else uncut + 1
            assert uncut <= most, seed
        assert (len(drawing.tokens), finish) == uninterrupted(stream, options), seed
        assert list(drawing.tokens) == stream[: len(drawing.tokens)]
        pieces += len(drawing.pieces)
    assert pieces > 6000

"""Settings of generation. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from slurmrl.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Settings of generation."""

    max_new_tokens: int
    min_new_tokens: int = 0
    """Stop tokens are not drawn before this many new tokens."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    greedy: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    """Texts that end a completion after ``min_new_tokens``. The token that completes one is kept.
    Request engines support them, `generate` does not."""
    support: bool = False
    """Record the tokens that each token was drawn from: those that ``top_k`` and ``top_p`` left.
    Log-probabilities are under these then, also where they would be of all tokens."""
    experts: bool = False
    """Record the experts that each token was read by. Request engines do, `generate` does not."""

    def __post_init__(self) -> None:
        rules = (
            (self.max_new_tokens >= 1, "max_new_tokens must be at least 1"),
            (0 <= self.min_new_tokens <= self.max_new_tokens, "min_new_tokens must be at most max"),
            (self.temperature > 0, "temperature must be above 0 (use greedy for the most likely)"),
            (0 < self.top_p <= 1, "top_p must be above 0 and at most 1"),
            (self.top_k is None or self.top_k >= 1, "top_k must be at least 1"),
            (all(self.stop_strings), "stop_strings must not be empty texts"),
            (
                not self.support or (self.top_k is not None and not self.greedy),
                "support needs top_k, which bounds it, and draws that are not greedy",
            ),
        )
        broken = [rule for holds, rule in rules if not holds]
        if broken:
            raise UsageError(f"{self}: " + "; ".join(broken))

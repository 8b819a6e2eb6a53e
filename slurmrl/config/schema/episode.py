"""Episodes: how completions come about."""

from __future__ import annotations

import re
from typing import Any, Final

from pydantic import Field, model_validator

from slurmrl.config.schema.base import PositiveFloat, PositiveInt, Section, Word
from slurmrl.config.schema.reward import PartName

SINGLE_TURN: Final = "single_turn"
MULTI_TURN: Final = "multi_turn"
VERIFIERS: Final = "verifiers"
EARNS_NOTHING: Final = "tools"
"""The environment whose turns earn no rewards of their own."""
CALLS_IN_JSON: Final = "json"
"""The default of that environment's option `format`."""
OWN: Final = re.compile(r"[\w.]+:\w+")
"""The name of a user's own episode, environment or tool."""


class EnvironmentChoice(Section):
    """What answers the policy's turns."""

    name: Word
    """`tools` calls the tools that a turn asks for, `guess_number` is a game, or `FILE.py:Class` or
    `package.module:Class` of your own (docs/rollouts.md)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""


class ToolChoice(Section):
    """A tool that the policy may call."""

    name: Word | None = None
    """`calculator`, `python` (a sandbox), or `FILE.py:name` or `package.module:name` of your own
    function or class. Default: the name under which the policy calls it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""


class EpisodeSettings(Section):
    """How a completion comes about: by one turn of the policy, or by several with messages between
    them, on which the policy is not trained (docs/rollouts.md)."""

    name: Word = SINGLE_TURN
    """`single_turn`; `multi_turn`, with an `environment`; `verifiers`, an environment of that
    package; or `FILE.py:name` or `package.module:name` of your own function or class."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `verifiers` or of your own."""
    environment: EnvironmentChoice | None = None
    """What answers the policy's turns in `multi_turn`."""
    tools: dict[PartName, ToolChoice] = Field(default_factory=dict)
    """Tools by the names under which the policy calls them: `{calculator: {}}`."""
    max_turns: PositiveInt = 8
    """Turns of the policy in an episode. An episode that needs more ends unfinished."""
    max_tokens: PositiveInt | None = None
    """Tokens of an episode behind its prompt, the policy's and all others. Default: `max_turns`
    times `rollout.max_new_tokens`, which limits each turn."""
    timeout_s: PositiveFloat = 300.0
    """Seconds that an episode may spend outside the engine, in tools and environments. One that
    takes longer fails: it is not trained on, and its reward is 0."""
    concurrency: PositiveInt = 256
    """Episodes that each rank advances at the same time, and where the built-in decoder serves
    them, sequences that one call of the model extends."""
    cache_gib: PositiveFloat | None = None
    """Memory of each rank for keys and values, in GiB, where the built-in decoder serves episodes.
    When it is full, the sequence that came last waits, and its tokens are read again later.
    Default: four fifths of the GPU memory that is free when generation begins; on CPUs what the
    sequences need."""

    @property
    def has_turns(self) -> bool:
        """Whether completions may have several turns."""
        return self.name != SINGLE_TURN

    @property
    def cache_bytes(self) -> int | None:
        """``cache_gib`` in bytes."""
        return None if self.cache_gib is None else int(self.cache_gib * 2**30)

    @property
    def describes_tools(self) -> bool:
        """Whether chat templates may describe the tools. Templates ask for calls in JSON, so not
        where the environment reads another form. Environments of `verifiers` have their own tools.
        """
        environment = self.environment
        calls = environment is not None and environment.name == EARNS_NOTHING
        form = environment.options.get("format", CALLS_IN_JSON) if environment and calls else None
        return bool(self.tools) and form in (None, CALLS_IN_JSON) and self.name != VERIFIERS

    @property
    def own(self) -> dict[str, str]:
        """What the settings name as ``package.module:name``, by their keys."""
        named = {"name": self.name}
        if self.environment is not None:
            named["environment.name"] = self.environment.name
        named |= {f"tools.{key}.name": tool.name or key for key, tool in self.tools.items()}
        return {key: name for key, name in named.items() if OWN.fullmatch(name)}

    @model_validator(mode="after")
    def _uses_its_settings(self) -> EpisodeSettings:
        written = self.model_fields_set - {"name"}
        changed = [
            name
            for name, field in type(self).model_fields.items()
            if name in written
            and getattr(self, name) != field.get_default(call_default_factory=True)
        ]
        if not self.has_turns and changed:
            raise ValueError(
                f"{changed[0]} is not allowed with name: {SINGLE_TURN}, which has one turn and "
                f"nothing between; choose another name ({MULTI_TURN}, verifiers, module:name)"
            )
        if self.name == MULTI_TURN and self.environment is None:
            raise ValueError(f"environment is required with name: {MULTI_TURN}")
        if self.name != MULTI_TURN and self.environment is not None:
            raise ValueError(f"environment is not allowed with name: {self.name}")
        if self.name == MULTI_TURN and self.options:
            raise ValueError(f"options is not allowed with {MULTI_TURN}; use environment.options")
        return self

"""Datasets, and templates for their prompts and answers: ``Question: {prompt}``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, cast, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from slurmrl.config.schema.base import (
    OWN_CODE,
    HubPathText,
    IsHubPath,
    Line,
    PathText,
    PositiveFloat,
    PositiveInt,
    Section,
    Sequence,
    Word,
)
from slurmrl.errors import UsageError
from slurmrl.registry import near


def _check_template(text: str) -> str:
    Template.parse(text)
    return text


TemplateText = Annotated[str, AfterValidator(_check_template)]

OF_TYPES: Final[dict[str, tuple[str, ...]]] = {
    "answer_template": ("prompt_answer", "preference", "kto"),
    "chosen_key": ("preference",),
    "rejected_key": ("preference",),
    "max_pairs_per_prompt": ("preference",),
    "label_key": ("kto",),
    "messages_key": ("messages",),
}
"""Mapping from a setting to the dataset types that use it; all types use unlisted settings."""
SOURCE_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
BOTH: Final = "has both path and sources; move path into the sources"
FIRST_SETTINGS: Final = (
    "type",
    "prompt_template",
    "answer_template",
    "prompt_key",
    "answer_key",
    "id_key",
    "max_prompt_tokens",
    "max_tokens",
)
"""Settings that every fingerprint of a dataset includes (`Dataset.rules`)."""


def _check_source_name(name: str) -> str:
    if not SOURCE_NAME.fullmatch(name):
        raise ValueError("a source has a name of 1 to 64 letters, digits, '.', '_' or '-'")
    return name


SourceName = Annotated[str, AfterValidator(_check_source_name)]


BuiltIn = Literal["prompt", "prompt_answer", "messages", "preference", "kto"]


def _check_type(name: str) -> str:
    if name not in get_args(BuiltIn) and not OWN_CODE.fullmatch(name):
        raise ValueError(f"{near(name, list(get_args(BuiltIn)))}, or package.module:Class")
    return name


TypeName = Annotated[Word, AfterValidator(_check_type)]


def _check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name.strip():
        raise ValueError("must be the JSON schema of a tool: {function: {name: NAME, …}}")
    return tool


ToolSchema = Annotated[dict[str, Any], AfterValidator(_check_tool)]
OptionalPath = Annotated[Line, BeforeValidator(lambda path: path or ""), IsHubPath()]


class DataSource(Section):
    """One of several sources of a dataset.

    A key that is null has the value of the same key in `dataset`.
    """

    null_means: ClassVar[str] = "the value of the same key in `dataset`"

    path: HubPathText
    """File, folder, or dataset of the hub. Example: `gsm8k/train.jsonl`"""
    subset: Word | None = None
    """Subset of a dataset of the hub. Example: `main`"""
    split: Word | None = None
    """Split to read, for a folder with several splits. Example: `train`"""
    weight: PositiveFloat | None = None
    """Share of the items that come from this source, relative to the other weights. Set the weights
    of all sources or of none. Default: none; each epoch has each row of every source once. Example:
    `0.5`"""
    prompt_template: TemplateText | None = None
    r"""Template of a prompt. Example: `"Question: {question}\n"`"""
    answer_template: TemplateText | None = None
    """Template of an answer. Example: `" {answer}"`"""
    prompt_key: Word | None = None
    """Key of the prompt. Example: `question`"""
    answer_key: Word | None = None
    """Key of the answer. Example: `answer`"""
    messages_key: Word | None = None
    """Key of the conversation. Example: `conversations`"""
    id_key: Word | None = None
    """Key of a row's id. Example: `uuid`"""
    system_prompt: str | None = None
    """System message. Example: `Answer with a number.`"""


class Dataset(Section):
    """The rows of data on which a trial works.

    The rows are in JSONL, JSON or Parquet files, or in a folder that Hugging Face `datasets` has
    saved (docs/data.md). A key of a row may be nested: `reward_model.ground_truth` or
    `choices.0.text`.
    Example: `{type: prompt, path: train.jsonl, prompt_key: question}`
    """

    type: TypeName
    """Content of the rows.

    - `prompt`: prompts for generation, with reference answers for the reward.
    - `prompt_answer`, `messages`: pairs of prompt and answer, and conversations, for SFT.
    - `preference`: pairs of answers, for DPO and reward models.
    - `kto`: labeled answers, for KTO.
    - `FILE.py:Class` or `package.module:Class`: your own type (docs/data.md), which requires
      `like`.

    Example: `prompt`"""
    like: BuiltIn | None = None
    """Built-in type from which your own type is derived. Required for your own type, and not
    allowed for built-in types."""
    path: OptionalPath = ""
    """File or folder. `org/name` or `hf://org/name@revision` is a dataset of the Hugging Face hub,
    which slurmrl downloads when you submit. Required without `sources`.

    The first job tokenizes the dataset once per trial, into the run directory. Do not change the
    files during a trial. Example: `train.jsonl`"""
    subset: Word | None = None
    """Subset of a dataset of the hub that has several subsets. Default: none. Example: `main`"""
    sources: dict[SourceName, DataSource] = Field(default_factory=dict)
    """Several files or folders in place of `path`, by names of your choice. The id of a sample
    begins with the name: `math/17@0`. Example: `{math: {path: math.jsonl}, code: {path:
    code.jsonl}}`"""
    split: Word | None = None
    """Split to read, for a folder with several splits. Default: none. Example: `train`"""
    prompt_template: TemplateText = "{prompt}"
    r"""Template of a prompt: `{key}` inserts the value of that key, and `{{` and `}}` are literal
    braces. Every row must have every key, with a string as its value. Example: `"Question:
    {prompt}\nAnswer:"`"""
    answer_template: TemplateText = "{answer}"
    """Template of an answer, in the syntax of `prompt_template`. slurmrl appends the end-of-text
    token. Example: `" {answer}"`"""
    prompt_key: Word = "prompt"
    """Key of the value that replaces `{prompt}`. The value may be a list of messages instead of a
    string, which requires a chat template."""
    answer_key: Word = "answer"
    """Key of the value that replaces `{answer}`. The value may be a list of messages that begins
    with the assistant's message, which requires a chat template. With type `prompt`, the value is
    the reference answer for the reward: a string, which all rows or none must have."""
    chosen_key: Word = "chosen"
    """With type `preference`: key of the preferred answer, or of a list of preferred answers. Rows
    may also have the keys `pos_answers` and `neg_answers`. An answer may be a list of messages:
    the turns after the prompt, or the complete conversation. Messages require a chat template."""
    rejected_key: Word = "rejected"
    """With type `preference`: key of the answer that is not preferred, or of a list of such
    answers. Both lists have equal lengths; their first answers form a pair, then their second
    answers, and so on."""
    max_pairs_per_prompt: PositiveInt | None = None
    """With type `preference`: maximum number of pairs of a row; slurmrl uses the first pairs.
    `null` uses all pairs. Example: `4`"""
    label_key: Word = "label"
    """With type `kto`: key of the label, which is true for a desirable answer and false for an
    undesirable answer."""
    messages_key: Word = "messages"
    """With type `messages`: key of the conversation, a list of messages with `role` and `content`.
    """
    images_key: Word | None = None
    """Key of the images of a row: a list of paths, relative to the data file (docs/images.md). Also
    set this key if only messages have images, as parts `{type: image, image: PATH}`. Requires a
    chat template. Default: none; rows have no images. Example: `images`"""
    videos_key: Word | None = None
    """Key of a row's videos. A video is a path, relative to the data file, or a list of images
    (docs/images.md#videos). Also set this key if only messages have videos, as parts `{type: video,
    video: PATH}`. Requires a chat template. Default: no videos. Example: `videos`"""
    video_fps: PositiveFloat | None = None
    """Frames per second that the model reads from a video. A list of images has this rate. Default:
    from the files of the processor, else 2. Example: `1.0`"""
    video_frames: Annotated[int, Field(ge=2)] | None = None
    """Maximum number of frames that the model reads from a video, evenly spaced. Default: from
    the files of the processor, else 768. Example: `32`"""
    tools_key: Word = "tools"
    """Key of the tools (a list of JSON schemas) that the chat template describes to the model. Rows
    may lack this key."""
    tools: Sequence[ToolSchema] | None = None
    """JSON schemas of the tools that the chat template describes in rows without tools. `[]`
    describes none. Default: with type `prompt`, made from `rollout.episode.tools`
    (docs/rollouts.md); else none. Example: `[{function: {name: search}}]`"""
    chat_template: bool | PathText | None = None
    """Whether and how prompts become conversations. Type `messages` always applies a chat template.
    The trial's `config.yaml` holds the decision.

    - `true`: apply the tokenizer's chat template with the generation prompt.
    - `false`: use plain strings; reject messages.
    - a path: apply this Jinja file instead of the tokenizer's template.

    Default: true if the first row has messages; false if it has a string, and for your own type.
    Example: `true`"""
    chat_template_options: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template. Example: `{enable_thinking: false}`"""
    system_prompt: str | None = None
    """System message for conversations that have no system message. Requires a chat template.
    Default: none. Example: `Answer with a number.`"""
    id_key: Word = "id"
    """Key of a row's id, which every row must have. If the key is `id` and no row has it, line
    numbers are the ids."""
    max_prompt_tokens: PositiveInt | None = None
    """Maximum length of a prompt; longer rows are skipped. The number of skipped rows is reported
    at submission, in the log, and as the metric `rows_left_out`. `null` keeps all rows. Example:
    `1024`"""
    max_tokens: PositiveInt | None = None
    """Maximum length of prompt and answer together, or of the conversation with type `messages`;
    longer rows are skipped and reported. `null` keeps all rows. Example: `4096`"""
    shuffle: bool = True
    """Shuffle the rows again for each epoch, with the run's seed."""
    curriculum_key: Word | None = None
    """Key of a number that is the difficulty of a row. Each epoch has the rows in the order of
    their numbers, smallest first. `shuffle` shuffles rows with equal numbers. Default: none.
    Example: `difficulty`"""
    balanced_batches: bool = False
    """Order each epoch into batches of about equal numbers of tokens, the longest first, so that a
    batch that does not fit into memory fails early. Lengths count the tokens of the rows, without
    completions. `shuffle` changes which rows of equal length share a batch."""

    @model_validator(mode="after")
    def _one_form(self) -> Dataset:
        if (":" in self.type) != (self.like is not None):
            raise ValueError(
                f"type {self.type} needs the key like: the built-in base type of the class"
                if self.like is None
                else f"like needs your own type (package.module:Class), not {self.type}"
            )
        for name, kinds in OF_TYPES.items():
            default = type(self).model_fields[name].default
            if self.kind not in kinds and getattr(self, name) != default:
                raise ValueError(
                    f"{name} is not allowed with type {self.kind}, which does not use it; allowed "
                    f"with type: {', '.join(kinds)}"
                )
        if self.videos_key is None and (self.video_fps or self.video_frames):
            raise ValueError("video_fps and video_frames are not allowed without videos_key")
        if bool(self.path) == bool(self.sources):
            raise ValueError("needs a path, or sources" if not self.path else BOTH)
        weights = [source.weight is not None for source in self.sources.values()]
        if any(weights) and not all(weights):
            without = next(name for name, own in self.sources.items() if own.weight is None)
            raise ValueError(f"source '{without}' has no weight: set all weights or none")
        if self.curriculum_key is not None and self.balanced_batches:
            raise ValueError("curriculum_key and balanced_batches both order rows: use only one")
        if self.balanced_batches and any(weights):
            raise ValueError("balanced_batches needs whole epochs: remove the sources' weights")
        return self

    @property
    def parts(self) -> dict[str, Dataset]:
        """Mapping from a source's name to its dataset; the name is empty without sources."""
        if not self.sources:
            return {"": self}
        return {
            name: self.model_copy(
                update={**source.model_dump(exclude={"weight"}, exclude_none=True), "sources": {}}
            )
            for name, source in self.sources.items()
        }

    @property
    def title(self) -> str:
        """Paths of all sources, for messages."""
        return ", ".join(part.path for part in self.parts.values())

    @property
    def weights(self) -> tuple[float, ...]:
        """Weights of the sources; empty for sources without weights."""
        return tuple(each.weight for each in self.sources.values() if each.weight is not None)

    @property
    def kind(self) -> BuiltIn:
        """The built-in type, or the built-in type from which the user's own type is derived."""
        return self.like or cast(BuiltIn, self.type)

    @property
    def is_chat(self) -> bool:
        """Whether a chat template formats the rows."""
        return self.kind == "messages" or self.chat_template not in (None, False)

    @property
    def media_keys(self) -> dict[str, str]:
        """Mapping from the type of a message part to the key of the rows' images or videos."""
        keys = {"image": self.images_key, "video": self.videos_key}
        return {medium: key for medium, key in keys.items() if key is not None}

    def rules(self) -> dict[str, Any]:
        """Return the settings that determine how the rows are read, as JSON values.

        Omit newer settings that have their defaults, so that fingerprints in older commits stay
        valid. Also omit `chat_template: false`, the default of earlier versions.
        """
        plain = {"chat_template"} if self.chat_template is False else set()
        values = self.model_dump(mode="json", exclude={"path", "shuffle", *plain})
        fields = type(self).model_fields
        return {
            name: value
            for name, value in values.items()
            if name in FIRST_SETTINGS
            or getattr(self, name) != fields[name].get_default(call_default_factory=True)
        }


DOUBLING = "write {{ and }} for braces in the text"


@dataclass(frozen=True)
class Template:
    """A parsed template: literal strings, with a field between every two neighbors.

    ``literals`` has one entry more than ``fields``.
    """

    literals: tuple[str, ...]
    fields: tuple[str, ...]

    @staticmethod
    def parse(text: str) -> Template:
        """Parse a template, in which ``{name}`` is a field, and ``{{`` and ``}}`` are braces.

        Raises UsageError for an unbalanced brace, an empty name or a template without fields.
        """
        literals, fields, at = [""], [], 0
        while at < len(text):
            if text[at : at + 2] in ("{{", "}}"):
                literals[-1] += text[at]
                at += 2
            elif text[at] == "{":
                end = text.find("}", at)
                name = text[at + 1 : end]
                if end < 0 or "{" in name:
                    raise UsageError(f"the brace at {_place(text, at)} is not closed; {DOUBLING}")
                if not name.strip():
                    raise UsageError(f"the braces at {_place(text, at)} enclose no key; {DOUBLING}")
                fields.append(name)
                literals.append("")
                at = end + 1
            elif text[at] == "}":
                raise UsageError(f"the brace at {_place(text, at)} was not opened; {DOUBLING}")
            else:
                literals[-1] += text[at]
                at += 1
        if not fields:
            raise UsageError("has no {key}: every row would give the same prompt")
        return Template(tuple(literals), tuple(fields))

    def fill(self, values: Mapping[str, str]) -> str:
        """Return the template with the values of all fields. Braces in the values are literal."""
        parts = [self.literals[0]]
        for name, literal in zip(self.fields, self.literals[1:], strict=True):
            parts += [values[name], literal]
        return "".join(parts)


def _place(text: str, at: int) -> str:
    """Return the position of a character with its context, such as ``character 7 ('{x')``."""
    return f"character {at + 1} ({text[at : at + 12]!r})"

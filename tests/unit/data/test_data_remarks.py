"""Remarks about usable data that are probably wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slurmrl.config.schema import Dataset
from slurmrl.data.rows import Remarks
from slurmrl.data.tokenizer import load_tokenizer

CHARACTERS = Path(__file__).parents[3] / "examples" / "addition" / "tokenizer"
TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ END }}\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}assistant: {% endif %}"
ENDED = TURNS.replace("END", "eos_token") + PROMPT
UNENDED = TURNS.replace("{{ END }}", "") + PROMPT
BLOCKS = (
    "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}END{% endgeneration %}"
    "{{ eos_token }}{% endfor %}"
)
WITH_TOOLS = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + ENDED
SAID = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.fixture
def words() -> Any:
    """Return a tokenizer that joins one space to the next word, like GPT-2's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "T"), ("ĠT", "h"), ("ĠTh", "e"), ("T", "h"), ("Th", "e"), ("Ċ", "Ċ")]
    parts = [*alphabet, *(one + other for one, other in merges), "</s>"]
    ids = {part: place for place, part in enumerate(parts)}
    core = Tokenizer(models.BPE(ids, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")


def remarks(tokenizer: Any, config: Dataset, *rows: Any, tools: tuple[str, ...] = ()) -> list[str]:
    found = Remarks(config, rows, lambda: tokenizer)
    return [remark.message for remark in found.all(tools, lambda name: "")]


@pytest.mark.parametrize(
    ("end", "told"), [("", False), (" ", True), ("\n", False), ("\n\n", False), ("\n ", True)]
)
def test_trailing_space_gives_a_remark_if_the_tokenizer_joins_it(
    words: Any, end: str, told: bool
) -> None:
    config = Dataset(type="prompt", path="x", prompt_template=f"{{prompt}} Answer:{end}")
    found = remarks(words, config, {"prompt": "1+2?"}, {"prompt": "2+2?"})
    assert bool(found) == told
    if told:
        assert found[0].startswith("2 of the first 2 prompts end in white space")


def test_trailing_space_gives_no_remark_if_the_tokenizer_separates_it() -> None:
    config = Dataset(type="prompt_answer", path="x")
    tokenizer = load_tokenizer(CHARACTERS)
    assert not remarks(tokenizer, config, {"prompt": "1+2 ", "answer": "3"})


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (ENDED, False),
        (UNENDED, True),
        (BLOCKS.replace("END", "{{ eos_token }}"), False),
        (BLOCKS.replace("END", "{{ eos_token }}\n"), False),
        (BLOCKS.replace("END", ""), True),
    ],
)
@pytest.mark.parametrize("kind", ["messages", "prompt_answer", "preference"])
def test_missing_end_of_turn_gives_a_remark_if_turns_are_trained(
    words: Any, kind: Any, template: str, told: bool
) -> None:
    words.chat_template = template
    config = Dataset(type=kind, path="x", chat_template=True)
    found = remarks(words, config, {"messages": SAID})
    assert [("does not learn to stop" in each) for each in found] == [True] * told


def test_missing_end_of_turn_gives_no_remark_for_prompts(words: Any) -> None:
    words.chat_template = UNENDED
    assert not remarks(words, Dataset(type="prompt", path="x", chat_template=True), {"prompt": "a"})


@pytest.mark.parametrize("kind", ["messages", "prompt"])
def test_template_that_writes_the_date_gives_a_remark(words: Any, kind: Any) -> None:
    words.chat_template = "{{ strftime_now('%d %b %Y') }}" + ENDED
    config = Dataset(type=kind, path="x", chat_template=True)
    (found,) = Remarks(config, [{"prompt": "a"}], lambda: words).all([], str)
    assert (found.key, found.warning) == ("chat_template", False)
    assert "writes the date" in found.message


TOOL = {"type": "function", "function": {"name": "search", "description": "Search."}}


@pytest.mark.parametrize(
    ("settings", "row", "told"),
    [
        ({}, {"prompt": "1+2="}, True),
        ({}, {"prompt": "Use search(word) or add."}, False),
        ({}, {"prompt": "Research, address"}, True),
        ({"chat_template": True}, {"prompt": "Hi"}, True),
        ({"chat_template": True, "system_prompt": "Tools: search, add"}, {"prompt": "Hi"}, False),
        ({"chat_template": True}, {"prompt": "Call add.", "tools": [TOOL]}, False),
        ({"chat_template": True}, {"prompt": "Hi", "tools": [TOOL]}, True),
    ],
)
def test_tools_missing_in_all_prompts_give_a_remark(
    words: Any, settings: dict[str, Any], row: dict[str, Any], told: bool
) -> None:
    words.chat_template = WITH_TOOLS
    config = Dataset(type="prompt", path="x", **settings)
    found = remarks(words, config, row, tools=("search", "add"))
    assert len(found) == told
    if told:
        named = "'add'" if "tools" in row else "'search', 'add'"
        assert f"names the tool {named} of rollout.episode.tools" in found[0]


@pytest.mark.parametrize(
    ("template", "settings", "reason", "advice"),
    [
        (WITH_TOOLS, {}, "", "describe the tools in prompt_template"),
        (WITH_TOOLS, {"chat_template": True}, "", "in dataset.tools, the rows' tools or a system"),
        (
            WITH_TOOLS,
            {"chat_template": True},
            "no docstring",
            "can be made (no docstring)",
        ),
        (WITH_TOOLS, {"chat_template": True, "tools": []}, "no docstring", "the rows' tools or a"),
        (ENDED, {"chat_template": True}, "no docstring", "the chat template writes no tools"),
    ],
)
def test_advice_depends_on_the_reason_for_missing_tools(
    words: Any, template: str, settings: dict[str, Any], reason: str, advice: str
) -> None:
    words.chat_template = template
    config = Dataset(type="prompt", path="x", **settings)
    (found,) = Remarks(config, [{"prompt": "Hi"}], lambda: words).all(["add"], lambda _: reason)
    assert advice in found.message


def test_tools_described_by_the_dataset_give_no_remark(words: Any) -> None:
    words.chat_template = WITH_TOOLS
    config = Dataset(type="prompt", path="x", chat_template=True, tools=(TOOL,))
    assert not remarks(words, config, {"prompt": "Hi"}, tools=("search",))


@pytest.mark.parametrize(("texts", "told"), [(0, False), (1, True), (2, False)])
def test_text_rows_among_message_rows_give_a_remark(words: Any, texts: int, told: bool) -> None:
    words.chat_template = ENDED
    config = Dataset(type="prompt", path="x", chat_template=True)
    rows = [{"prompt": "Hi" if place < texts else SAID[:1]} for place in range(2)]
    found = remarks(words, config, *rows)
    assert [each[:33] for each in found] == ["1 of the first 2 rows have string"] * told

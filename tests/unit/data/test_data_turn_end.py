"""The token that ends a turn is trained, ends generation, and is exported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.schema import Config, Dataset, Evaluation
from slurmrl.data.chat import ChatTemplate, stop_ids
from slurmrl.data.encoder import Encoder
from slurmrl.data.tokenizer import load_tokenizer, train_bpe
from slurmrl.data.types import type_of_rows

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|end|>"]
HEADER = "{% for m in messages %}"
PROMPT = "{% endfor %}{% if add_generation_prompt %}"
CHATML = (
    HEADER + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    f"{PROMPT}<|im_start|>assistant\n{{% endif %}}"
)
DEFAULT_SYSTEM = (
    "{% if messages and messages[0].role != 'system' %}<|im_start|>system\nBe good<|im_end|>\n"
    "{% endif %}" + CHATML
)
NEEDS_A_MESSAGE = DEFAULT_SYSTEM.replace("messages and ", "")
THINKING = CHATML.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}",
)
NEXT_ROLE = HEADER + (
    "{% if m.role == 'tool' %}<|observation|>{% else %}<|{{ m.role }}|>{% endif %}\n"
    "{{ m.content }}{{ m.tool_calls[0].function.name if m.tool_calls }}"
    f"{PROMPT}<|assistant|>{{% endif %}}"
)
CLOSED = (  # as Phi-3's: a conversation without generation prompt ends with the end of text
    HEADER + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"
    f"{PROMPT}<|assistant|>\n{{% else %}}{{{{ eos_token }}}}{{% endif %}}"
)
LLAMA = HEADER + (
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
CALLED = (
    "{% if m.tool_calls %}<|observation|>{{ m.tool_calls[0].function | tojson }}<|observation|>"
    "{% else %}{{ m.content }}{% endif %}"
)
OWN_CALLS = CHATML.replace(  # as gpt-oss's
    "{{ m.content }}<|im_end|>\n",
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }} "
    "{{ m.tool_calls[0].function.arguments | tojson }}<|end|>"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}",
)
WRAPPED_CALLS = CHATML.replace("{{ m.content }}", CALLED)
PLAIN = HEADER + f"{{{{ m.role }}}}:\n{{{{ m.content }}}}\n{PROMPT}assistant:\n{{% endif %}}"
USER, SAID = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
TOOL = {"role": "tool", "content": "3"}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    train_bpe(["Hi Hello"], 280, tmp_path)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"additional_special_tokens": SPECIAL}
    path.write_text(json.dumps(settings))
    return load_tokenizer(tmp_path)


def marked(tokenizer: Any, template: str, *messages: Mapping[str, Any]) -> str:
    """Return the tokens of a conversation, with the targets in brackets."""
    tokenizer.chat_template = template
    config = Dataset(type="messages", path="rows.jsonl")
    (row,) = Encoder(config, tokenizer).conversations([(messages, None)])
    assert not isinstance(row, str), row
    (sequence,) = row
    text, at = "", 0
    for place, length in enumerate(sequence.runs):
        run = tokenizer.decode(sequence.tokens[at : at + length])
        text, at = text + (f"[{run}]" if place % 2 else run), at + length
    return text


@pytest.mark.parametrize(
    ("template", "before"),
    [
        (CHATML, "<|im_start|>assistant\n"),
        (DEFAULT_SYSTEM, "<|im_start|>system\nBe good<|im_end|>\n<|im_start|>assistant\n"),
        (NEEDS_A_MESSAGE, "<|im_start|>system\nBe good<|im_end|>\n<|im_start|>assistant\n"),
        (NEXT_ROLE, "<|assistant|>"),
        (CLOSED, "<|assistant|>\n"),
        (PLAIN, "assistant:\n"),
        (LLAMA, ""),
    ],
)
def test_conversation_trains_no_header_if_it_begins_with_the_assistant(
    tokenizer: Any, template: str, before: str
) -> None:
    text = marked(tokenizer, template, SAID, USER, SAID)
    assert text.partition("[")[0] == before
    assert text.count("Hello") == 2


def test_first_turn_is_trained_like_later_turns_if_template_opens_it(tokenizer: Any) -> None:
    """Text after the generation prompt belongs to the model's turn, even empty reasoning."""
    alone = marked(tokenizer, THINKING, SAID)
    assert alone == "<|im_start|>assistant\n[<think>\n\n</think>\n\nHello<|im_end|>]\n"
    assert marked(tokenizer, THINKING, USER, SAID).endswith(alone)


@pytest.mark.parametrize(
    ("template", "tokens", "by_next"),
    [
        (CHATML, ["<|im_end|>"], False),
        (THINKING, ["<|im_end|>"], False),
        (CLOSED, ["<|end|>"], False),
        (LLAMA, ["<|endoftext|>"], False),
        (NEXT_ROLE, ["<|user|>", "<|observation|>"], True),
        (PLAIN, [], False),
        ("{{ raise_exception('no') }}", [], False),
    ],
)
def test_end_of_a_turn_is_the_token_that_follows_its_content(
    tokenizer: Any, template: str, tokens: list[str], by_next: bool
) -> None:
    tokenizer.chat_template = template
    config = Dataset(type="messages", path="rows.jsonl")
    assert ChatTemplate(config, tokenizer).turn_end == (tuple(tokens), by_next)


@pytest.mark.parametrize(
    ("tools", "end", "between"),
    [
        ((), "<|im_end|>", "<|im_end|>\n<|im_start|>assistant\n"),
        (({"name": "add"},), "<|end|>", "<|end|>\n<|assistant|>\n"),
    ],
)
def test_end_of_turn_comes_from_the_tools_template_if_tools_exist(
    tokenizer: Any, tools: Any, end: str, between: str
) -> None:
    tokenizer.chat_template = {"default": CHATML, "tool_use": "{{ tools[0].name }}" + CLOSED}
    config = Dataset(type="prompt", path="rows.jsonl", chat_template=True, tools=tools)
    chat = ChatTemplate(config, tokenizer)
    assert chat.turn_end.tokens == (end,)
    assert chat.around_messages(["tool"])[-1] == between


def test_role_token_after_a_turn_is_trained_if_it_ends_the_turn(tokenizer: Any) -> None:
    text = marked(tokenizer, NEXT_ROLE, USER, CALL, TOOL, SAID, USER, SAID)
    first = "<|user|>Hi<|assistant|>[add<|observation|>]3<|assistant|>[Hello<|user|>]"
    assert text == f"{first}Hi<|assistant|>[Hello<|user|>]"
    assert marked(tokenizer, NEXT_ROLE, USER, CALL).endswith("[add<|observation|>]")
    twice = "<|user|>Hi<|assistant|>[Hello]<|assistant|>[Hello<|user|>]"
    assert marked(tokenizer, NEXT_ROLE, USER, SAID, SAID).replace("\n", "") == twice


def test_turn_is_trained_up_to_the_stop_token_of_generation(tokenizer: Any) -> None:
    expected = "<|user|>\nHi<|end|>\n<|assistant|>\n[Hello<|end|>]\n<|endoftext|>"
    assert marked(tokenizer, CLOSED, USER, SAID) == expected


def test_generation_stops_at_the_tokens_that_end_a_turn_in_every_template(
    tokenizer: Any, tmp_path: Path
) -> None:
    """A base model's end-of-text token may differ from its template's end-of-turn token."""
    tokenizer.chat_template = CHATML
    other = tmp_path / "other.jinja"
    other.write_text(NEXT_ROLE)
    config = Config.model_construct(
        dataset=Dataset(type="messages", path="rows.jsonl"),
        evaluation=Evaluation(
            dataset=Dataset(type="prompt", path="rows.jsonl", chat_template=str(other))
        ),
    )
    ends = ["<|endoftext|>", "<|im_end|>", "<|user|>", "<|observation|>"]
    assert tokenizer.convert_ids_to_tokens(stop_ids(config, tokenizer)) == ends


@pytest.mark.parametrize(
    ("template", "stops"),
    [
        (OWN_CALLS, ("<|im_end|>", "<|end|>")),
        (OWN_CALLS.replace("| tojson", ""), ("<|im_end|>", "<|end|>")),
        (WRAPPED_CALLS, ("<|im_end|>",)),
        (CLOSED.replace("{{ m.content }}", CALLED), ("<|end|>",)),
        (NEXT_ROLE, ("<|user|>", "<|observation|>")),
        (CHATML, ("<|im_end|>",)),
        (PLAIN, ()),
    ],
)
def test_generation_stops_at_the_token_that_ends_tool_calls(
    tokenizer: Any, template: str, stops: tuple[str, ...]
) -> None:
    """A token that closes a call does not end a turn."""
    tokenizer.chat_template = template
    config = Dataset(type="messages", path="rows.jsonl")
    assert ChatTemplate(config, tokenizer).stops == stops
    if template == OWN_CALLS:
        call = {"function": {"name": "add", "arguments": {"a": 1}}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        text = marked(tokenizer, template, USER, said, USER, SAID)
        assert '[add {"a": 1}<|end|>]<|im_start|>user' in text
        assert text.rstrip().endswith("[Hello<|im_end|>]")


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("{% generation %}", "{% endgeneration %}"),
        ("{%- generation -%}", "{%- endgeneration -%}"),
        ("{%generation%}", "{%endgeneration%}"),
        ("{%\n generation\t%}", "{% endgeneration %}"),
        ("{%+ generation %}", "{% endgeneration +%}"),
    ],
)
def test_generation_block_is_found_in_every_spelling(
    tokenizer: Any, opening: str, closing: str
) -> None:
    said = "{{ m.thought }}" + opening + "{{ m.content }}<|im_end|>" + closing
    template = CHATML.replace("{{ m.content }}<|im_end|>", said)
    text = marked(tokenizer, template, {**SAID, "thought": "Hm"})
    assert text.rstrip() == "<|im_start|>assistant\nHm[Hello<|im_end|>]"


@pytest.mark.parametrize("answer", ["Hello", "Hello<|endoftext|>", "Hello<|endoftext|>\n"])
def test_answer_ends_once_if_its_text_has_the_end_already(tokenizer: Any, answer: str) -> None:
    config = Dataset(type="prompt_answer", path="rows.jsonl")
    row = {"prompt": "Hi", "answer": answer}
    (found,) = type_of_rows(config).tokens([row], Encoder(config, tokenizer))
    assert not isinstance(found, str)
    assert tokenizer.decode(found[0].tokens) == "HiHello<|endoftext|>"
    assert found[0].runs[1] == len(tokenizer("Hello").input_ids) + 1


@pytest.mark.parametrize("end", ["<|im_end|>", "<|im_end|>\n", "<|endoftext|>", "<|im_end|>" * 2])
def test_turn_ends_once_if_its_content_has_the_end_already(tokenizer: Any, end: str) -> None:
    said = {"role": "assistant", "content": f"Hello{end}"}
    text = marked(tokenizer, CHATML, USER, said, USER)
    assert text == marked(tokenizer, CHATML, USER, SAID, USER)

"""Chat templates: prompts as the model sees them, and loss masks of conversations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.schema import Dataset
from slurmrl.data.sample import SequenceSample
from slurmrl.data.tokenizer import load_tokenizer, train_bpe
from slurmrl.errors import ConfigError
from tests.support.datasets import prepared, write_rows

CHATML = (
    "{%- if tools %}<|im_start|>tools\n{{ tools | map(attribute='name') | join(',') }}<|im_end|>\n"
    "{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REASONING = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>{{ m.reasoning }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GENERATION = (
    "{%- for m in messages %}{% if m.role == 'assistant' %}"
    "Bot:\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Bot:\n{% endif %}"
)
PARTS = CHATML.replace(
    "{{ m.content }}",
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}",
)
ONLY_PARTS = CHATML.replace(
    "{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}"
)
PICTURED = PARTS.replace(
    "{{ part.text", "{% if 'image' in part %}<image>{% else %}{{ part.text"
).replace("trim }}", "trim }}{% endif %}")
"""Like Qwen2-VL's template: each part with the key ``image`` is an image."""
COUNTING = "{{ messages | length }} {% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
JOINED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello\n"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you"},
]
THOUGHT = [TURNS[0], {**TURNS[1], "reasoning": "easy"}, TURNS[2], {**TURNS[3], "reasoning": "sad"}]


class Site:
    """A folder with a tokenizer and a file of rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        train_bpe(["Hello, Hi, Bye, assistant:Hello See you"] * 5, 290, folder)
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text())
        settings["additional_special_tokens"] = ["<|im_start|>", "<|im_end|>"]
        settings["bos_token"] = "<|im_start|>"
        path.write_text(json.dumps(settings))
        self.template(CHATML)

    def template(self, text: str) -> None:
        (self.folder / "chat_template.jinja").write_text(text)

    @property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.folder)

    def sample(self, *rows: Mapping[str, Any], **settings: Any) -> SequenceSample:
        path = write_rows(self.folder, *rows)
        config = Dataset(**{"type": "messages", "path": path, **settings})
        made = prepared(config, self.tokenizer, self.folder / "data")
        return made.sample([(0, row) for row in range(made.size)])

    def marked(self, sample: SequenceSample) -> str:
        """Return the text of the first sequence, with its targets in brackets."""
        return self.all_marked(sample)[0]

    def all_marked(self, sample: SequenceSample) -> list[str]:
        """Return the texts of all sequences, with their targets in brackets."""
        ids = iter(sample.tensor("input_ids").tolist())
        mask = iter(sample.tensor("prompt_mask").tolist())
        lengths = [length for item in sample.lengths["input_ids"] for length in item]
        return [self._marked([(next(ids), next(mask)) for _ in range(each)]) for each in lengths]

    def _marked(self, tokens: Sequence[tuple[int, bool]]) -> str:
        text, tokenizer = "", self.tokenizer
        before = True
        for token, context in tokens:
            text += {(True, False): "[", (False, True): "]"}.get((before, context), "")
            text, before = text + tokenizer.decode([token]), context
        return text + ("" if before else "]")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_assistant_turns_including_end_token_are_targets(site: Site) -> None:
    """The tokens equal the result of the tokenizer's own chat template."""
    sample = site.sample({"messages": TURNS}, system_prompt="Be kind")
    assert site.marked(sample) == (
        "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n[Hello\n<|im_end|>]\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n[See you<|im_end|>]\n"
    )
    plain = [{"role": "system", "content": "Be kind"}, *TURNS]
    expected = site.tokenizer.apply_chat_template(plain, return_dict=False)
    assert sample.tensor("input_ids").tolist() == expected


@pytest.mark.parametrize(
    ("own", "named"),
    [({}, "add"), ({"tools": None}, "add"), ({"tools": [{"name": "f"}]}, "f"), ({"tools": []}, "")],
)
def test_rows_without_tools_get_the_tools_of_the_dataset(
    site: Site, own: dict[str, Any], named: str
) -> None:
    schema = {"name": "add", "parameters": {"type": "object"}}
    rows = [{"prompt": "Hi", **own}, {"prompt": "Bye", "tools": [{"name": "f"}]}]
    sample = site.sample(*rows, type="prompt", chat_template=True, tools=[schema])
    shown = f"<|im_start|>tools\n{named}<|im_end|>\n" if named else ""
    assert site.tokenizer.decode(sample.tensor("prompt_ids")) == (
        f"{shown}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "<|im_start|>tools\nf<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("template", "text"),
    [(CHATML, " Hi, you"), (PARTS, "Hi,you"), (ONLY_PARTS, " Hi, you")],
    ids=["strings", "both", "parts"],
)
def test_text_parts_reach_every_template(site: Site, template: str, text: str) -> None:
    """A template without support for parts gets a string."""
    site.template(template)
    parts = [{"type": "text", "text": " Hi,"}, {"type": "text", "text": " you"}]
    turns = [{"role": "user", "content": parts}]
    shown = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    prompts = site.sample({"prompt": turns}, type="prompt", chat_template=True)
    assert site.tokenizer.decode(prompts.tensor("prompt_ids")) == shown
    answer = [{"type": "text", "text": "Bye"}]
    sample = site.sample({"messages": [*turns, {"role": "assistant", "content": answer}]})
    assert site.marked(sample) == f"{shown}[Bye<|im_end|>]\n"


def test_null_keys_of_parts_do_not_change_the_text(site: Site) -> None:
    """Rows from tables have them: all objects of a column have the same keys."""
    site.template(PICTURED)
    parts = [{"type": "text", "text": "Hi", "image": None}]
    asked = {"role": "user", "content": parts}
    sample = site.sample({"messages": [asked, {"role": "assistant", "content": parts}]})
    shown = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert site.marked(sample) == f"{shown}[Hi<|im_end|>]\n"
    prompts = site.sample({"prompt": [asked]}, type="prompt", chat_template=True)
    assert site.tokenizer.decode(prompts.tensor("prompt_ids")) == shown


def test_system_message_tools_and_weights_of_a_row_take_precedence(site: Site) -> None:
    turns = [{"role": "system", "content": "S"}, *TURNS]
    turns[2] = {**TURNS[1], "weight": 0}
    row = {"chat": {"turns": turns}, "functions": [{"name": "search"}]}
    keys = {"messages_key": "chat.turns", "tools_key": "functions"}
    sample = site.sample(row, system_prompt="Be kind", **keys)
    text = site.marked(sample)
    assert text.startswith("<|im_start|>tools\nsearch<|im_end|>\n<|im_start|>system\nS<|im_end|>\n")
    assert "Be kind" not in text
    assert text.count("[") == 1
    assert "[See you<|im_end|>]" in text


def test_mask_is_right_if_the_template_drops_earlier_reasoning(site: Site) -> None:
    site.template(REASONING)
    text = site.marked(site.sample({"messages": THOUGHT}))
    assert text.count("[Hello\n<|im_end|>]\n<|im_start|>user") == 1
    assert text.endswith("[<think>sad</think>See you<|im_end|>]\n")


def test_generation_blocks_of_a_template_are_targets(site: Site) -> None:
    """Also covers a template from a file, and ``weight``."""
    path = site.folder / "other.jinja"
    path.write_text(GENERATION)
    text = site.marked(site.sample({"messages": TURNS}, chat_template=str(path)))
    assert text == "user: Hi\nBot:\n[Hello\n<|im_end|>]\nuser: Bye\nBot:\n[See you<|im_end|>]\n"
    skipped = [*TURNS[:3], {**TURNS[3], "weight": 0}]
    text = site.marked(site.sample({"messages": skipped}, chat_template=str(path)))
    assert text == "user: Hi\nBot:\n[Hello\n<|im_end|>]\nuser: Bye\nBot:\nSee you<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (COUNTING, "no correct loss mask for message 2 .* changes the text before the message"),
        (JOINED, "the token ' See' contains both context and the assistant's turn"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "the chat template rejects the conversation: roles must alternate",
        ),
        ("{{ messages[9].content }}", "the chat template rejects the conversation: "),
    ],
)
def test_templates_without_a_correct_mask_are_rejected(
    site: Site, template: str, message: str
) -> None:
    site.template(template)
    with pytest.raises(ConfigError, match=rf"rows\.jsonl:1: {message}"):
        site.sample({"messages": [{"role": "user", "content": "Hi"}, TURNS[3]]})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("Hi", 'must be a list of messages, but is a string ("Hi")'),
        ([], "must be a list of messages, but is a list ([])"),
        (TURNS[:1], "has no message of the assistant to learn from"),
        ([*TURNS, {"role": "user"}], "message 5 has neither 'content' nor 'tool_calls'"),
        ([*TURNS, {"content": "x"}], "message 5 must have a 'role'"),
        ([{"role": "user", "content": 3}, *TURNS], "message 1 has a 'content' that must be a str"),
        (["x"], "message 1 must be an object with 'role' and 'content', but is a string (\"x\")"),
        ([{**TURNS[1], "weight": 0.5}], "message 1 has 'weight' a number (0.5): allowed are 0"),
        (
            [TURNS[0], {**TURNS[1], "train": False}],
            "message 2 has 'train' false: write \"weight\": 0",
        ),
        ([{**TURNS[1], "trainable": 0}], "message 1 has 'trainable' 0: write"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "message 1 has a part that is not"),
    ],
)
def test_invalid_conversations_are_named_with_their_line(
    site: Site, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        site.sample({"messages": TURNS}, {"messages": value})
    (problem,) = caught.value.problems
    assert problem.where.endswith("rows.jsonl:2")
    assert problem.key == "messages"
    assert problem.message.startswith(message)


def test_train_key_is_accepted_on_untrained_messages(site: Site) -> None:
    rows = [{"messages": [{**TURNS[0], "train": False}, {**TURNS[1], "train": True}]}]
    rows += [{"messages": [*TURNS[:2], {**TURNS[3], "train": False, "weight": 0}]}]
    assert len(site.sample(*rows).ids) == 2


@pytest.mark.parametrize("key", ["tool_calls", "function_call"])
def test_row_whose_tool_call_the_template_drops_is_rejected(site: Site, key: str) -> None:
    """Otherwise only the end of the turn would be trained."""
    call = {"name": "add", "arguments": '{"a": 1}'}
    said = {"role": "assistant", "content": "", key: [call] if key == "tool_calls" else call}
    with pytest.raises(ConfigError) as caught:
        site.sample({"messages": [TURNS[0], said]})
    (problem,) = caught.value.problems
    assert "the chat template leaves out the tool call 'add' of message 2" in problem.message


def test_prompts_have_generation_prompt_and_one_begin_token(site: Site) -> None:
    rows = [
        {"prompt": "Hi", "answer": "x", "tools": [{"name": "f"}]},
        {"prompt": TURNS[:3], "answer": "y"},
    ]
    sample = site.sample(*rows, type="prompt", chat_template=True, system_prompt="Be kind")
    tokenizer = site.tokenizer
    system = {"role": "system", "content": "Be kind"}
    first = tokenizer.apply_chat_template(
        [system, TURNS[0]], tools=rows[0]["tools"], add_generation_prompt=True, return_dict=False
    )
    second = tokenizer.apply_chat_template(
        [system, *TURNS[:3]], add_generation_prompt=True, return_dict=False
    )
    assert sample.tensor("prompt_ids").tolist() == [*first, *second]
    assert sample.lengths == {"prompt_ids": [[len(first)], [len(second)]]}
    assert sample.metadata["prompt"] == ["Hi", "Bye"], "the reward's prompt has no template"
    assert sample.metadata["row"] == rows


def test_prompt_is_rejected_if_it_ends_with_the_assistant_or_fills_a_template(site: Site) -> None:
    settings: dict[str, Any] = {"type": "prompt", "chat_template": True}
    with pytest.raises(ConfigError, match=r"prompt: ends with a message of the.*; remove"):
        site.sample({"prompt": TURNS}, **settings)
    with pytest.raises(ConfigError, match="prompt: must be a string: messages are not inserted"):
        site.sample({"prompt": TURNS[:1]}, prompt_template="Q: {prompt}", **settings)


def test_answer_becomes_the_assistant_turn(site: Site) -> None:
    row = {"prompt": "Hi", "answer": "Hello"}
    sample = site.sample(row, type="prompt_answer", chat_template=True, prompt_template="{prompt}!")
    assert site.marked(sample) == (
        "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n[Hello<|im_end|>]\n"
    )


USER, SAID, THEN = TURNS[0], TURNS[1], TURNS[2]
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("Yes", "No"))
ASKED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
GIVEN = [f"{ASKED}[{text}<|im_end|>]\n" for text in ("Yes", "No")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi", "chosen": "Yes", "rejected": "No"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "Hi", "chosen": [GOOD], "rejected": "No"},
        {"prompt": [USER], "chosen": [[GOOD]], "rejected": [[BAD]]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "Hi ", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
)
def test_answers_of_a_pair_may_be_lists_of_messages(site: Site, row: dict[str, Any]) -> None:
    """All conversational forms of TRL give the same tokens. Only the answer is a target."""
    sample = site.sample(row, type="preference", chat_template=True)
    assert site.all_marked(sample) == GIVEN
    ids = sample.tensor("input_ids").tolist()[: sample.lengths["input_ids"][0][0]]
    assert ids == site.tokenizer.apply_chat_template([USER, GOOD], return_dict=False)


def test_earlier_turns_of_the_assistant_are_context_and_later_ones_targets(site: Site) -> None:
    history, later = [USER, SAID, THEN], [GOOD, THEN, GOOD]
    pair = {"chosen": [*history, *later], "rejected": [*history, BAD]}
    chosen, rejected = site.all_marked(site.sample(pair, type="preference", chat_template=True))
    assert (chosen.count("["), rejected.count("[")) == (2, 1)
    assert "assistant\nHello\n<|im_end|>" in chosen
    for kind, more in (("prompt_answer", {}), ("kto", {"label": True})):
        rows = [
            {"prompt": history, "answer": later, **more},
            {"prompt": [USER], "answer": [BAD], **more},
        ]
        marked = site.all_marked(site.sample(*rows, type=kind, chat_template=True))
        assert marked[0] == chosen
        assert marked[-2 if kind == "kto" else -1] == GIVEN[1]
    assert marked[1].startswith(chosen[: chosen.index("[")]), "the mismatched answer has its prompt"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": [GOOD], "rejected": [BAD]}, "prompt: is missing; the line has the keys"),
        ({"chosen": [USER, GOOD], "rejected": "No"}, "chosen: is a whole conversation, but 'rej"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "chosen: and 'rejected' are the same"),
        (
            {"chosen": [USER, GOOD], "rejected": [THEN, BAD]},
            "chosen: first differs from 'rejected' in message 1, which must be an assistant",
        ),
        (
            {"prompt": [THEN], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "chosen: and 'rejected' do not begin with the messages of the prompt",
        ),
        (
            {"prompt": "Bye", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "prompt: is in none of the messages with which 'chosen' and 'rejected' begin",
        ),
        ({"prompt": "Hi", "chosen": [USER], "rejected": [USER]}, "must end with a message of the"),
        (
            {"prompt": "Hi", "chosen": [[GOOD], [{"role": "assistant"}]], "rejected": ["a", "b"]},
            "chosen: answer 2 message 1 has neither 'content' nor 'tool_calls'",
        ),
    ],
)
def test_incomparable_pairs_of_messages_are_named(
    site: Site, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        site.sample(row, type="preference", chat_template=True)
    assert message in str(caught.value)


def test_messages_need_a_chat_template_and_no_other_template(site: Site) -> None:
    row = {"prompt": "Hi", "answer": [GOOD], "chosen": [GOOD], "rejected": [BAD], "label": True}
    for kind in ("preference", "kto", "prompt_answer"):
        with pytest.raises(ConfigError, match=r"set dataset\.chat_template to true"):
            site.sample(row, type=kind)
        with pytest.raises(ConfigError, match="not inserted into answer_template"):
            site.sample(row, type=kind, chat_template=True, answer_template="{answer}!")
    with pytest.raises(ConfigError, match="must begin with a message of the assistant"):
        site.sample({**row, "answer": [USER, GOOD]}, type="kto", chat_template=True)


def test_template_options_and_text_change_the_data_fingerprint(site: Site) -> None:
    path = site.folder / "t.jinja"
    path.write_text("{{ mood }} {{ messages[0].content }}")
    settings: dict[str, Any] = {"type": "prompt", "chat_template": str(path)}
    settings["chat_template_options"] = {"mood": "Hello"}
    row = {"prompt": "Hi"}
    ids = site.sample(row, **settings).tensor("prompt_ids").tolist()
    assert site.tokenizer.decode(ids) == "Hello Hi"
    path.write_text("{{ messages[0].content }}")
    ids = site.sample(row, **settings).tensor("prompt_ids").tolist()
    assert site.tokenizer.decode(ids) == "Hi"


def test_tokenizer_without_template_is_rejected(site: Site) -> None:
    (site.folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"chat_template: the tokenizer .* has no chat template"):
        site.sample({"messages": TURNS})

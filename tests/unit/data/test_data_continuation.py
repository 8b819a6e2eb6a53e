"""A text after a context has the same tokens as inside a longer text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slurmrl.config.schema import Dataset
from slurmrl.data.encoder import Continuations, Encoder
from slurmrl.data.tokenizer import load_tokenizer
from slurmrl.data.types import type_of_rows
from slurmrl.desk.inspector import token_ids
from slurmrl.rollouts.policy import Dialogue

SPECIAL = ["<unk>", "<s>", "</s>", "[INST]"]
SPACED = ["first", "always", "prepend"]
"""The kinds that add a space at the beginning of each text."""
BYTES = Path(__file__).parents[3] / "examples" / "addition" / "tokenizer"
CHATML = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
COLONS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def llama(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama's. ``kind``: the places where it adds a space."""
    parts = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    parts += [chr(code) for code in range(33, 127)] + ["▁"]
    merges = [("a", "n"), ("an", "d"), ("▁", "an"), ("▁an", "d"), ("▁", "a"), ("i", "s")]
    merges += [("▁", "is"), ("s", "t"), (":", "▁")]
    words = {part: place for place, part in enumerate([*parts, *(a + b for a, b in merges)])}
    core = Tokenizer(models.BPE(words, merges, unk_token="<unk>", byte_fallback=True))
    if kind == "prepend":
        spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        core.normalizer = normalizers.Sequence(spaces)
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=kind == "always")
    strip = decoders.Strip(" ", 1, 0)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    core.decoder = decoders.Sequence(steps)
    core.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def plain(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def answer_ids(tokenizer: Any, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    config = Dataset(type="prompt_answer", path="rows.jsonl")
    row = {"prompt": prompt, "answer": answer}
    ((sequence,),) = type_of_rows(config).tokens([row], Encoder(config, tokenizer))
    size = sequence.runs[0]
    return list(sequence.tokens[:size]), list(sequence.tokens[size:-1])


@pytest.mark.parametrize(
    "answer", ["3", " 3", "and", " and", "\nand", "\n\n3", ")and", "é", "a  b"]
)
@pytest.mark.parametrize("kind", [*SPACED, "never"])
def test_answer_has_its_tokens_from_the_joint_tokenization(kind: str, answer: str) -> None:
    tokenizer = llama(kind)
    prompt, made = answer_ids(tokenizer, "what is", answer)
    assert [*prompt, *made] == plain(tokenizer, f"what is{answer}")


@pytest.mark.parametrize("kind", SPACED)
def test_answers_with_and_without_leading_space_differ(kind: str) -> None:
    answers = [answer_ids(llama(kind), "1+2=", answer)[1] for answer in ("3", " 3")]
    assert answers[0] != answers[1]


@pytest.mark.parametrize("kind", SPACED)
def test_try_reward_passes_the_token_ids_that_a_model_would_generate(
    kind: str, tmp_path: Path
) -> None:
    tokenizer = llama(kind)
    tokenizer.save_pretrained(tmp_path)
    expected = [[*answer_ids(tokenizer, "1+2=", "3")[1], tokenizer.eos_token_id]]
    assert token_ids(str(tmp_path), ["3"]) == expected


@pytest.mark.parametrize("answer", ["3", " 3", "and"])
@pytest.mark.parametrize("kind", [*SPACED, "never"])
def test_answer_after_a_special_token_is_tokenized_like_a_first_word(
    kind: str, answer: str
) -> None:
    tokenizer = llama(kind)
    prompt, made = answer_ids(tokenizer, "hi[INST]", answer)
    assert [*prompt, *made] == plain(tokenizer, f"hi[INST]{answer}")


@pytest.mark.parametrize("template", [CHATML, COLONS])
@pytest.mark.parametrize("kind", [*SPACED, "never"])
def test_episode_messages_have_the_tokens_of_the_conversation(kind: str, template: str) -> None:
    tokenizer = llama(kind)
    tokenizer.chat_template = template
    dialogue = Dialogue(Dataset(type="prompt", path="x", chat_template=True), tokenizer)
    said = [{"role": "user", "content": "hi"}]
    more = [{"role": "tool", "content": "and"}, {"role": "user", "content": "3 and"}]
    before, rest = (
        tokenizer.apply_chat_template(part, add_generation_prompt=True, tokenize=False)
        for part in (said, more)
    )
    context = plain(tokenizer, f"{before}so")
    pairs = [(each["role"], each["content"]) for each in more]
    added = dialogue.messages(pairs, context[-1], turn=True)
    end = "</s>" if template == CHATML else ""
    assert [*context, *added] == plain(tokenizer, f"{before}so{end}\n{rest}")


@pytest.mark.parametrize("kind", SPACED)
def test_tool_output_without_template_continues_the_turn(kind: str) -> None:
    tokenizer = llama(kind)
    dialogue = Dialogue(Dataset(type="prompt", path="x"), tokenizer)
    context = plain(tokenizer, "so is")
    added = dialogue.messages([("tool", "and"), ("user", " 3")], context[-1], turn=True)
    assert [*context, *added] == plain(tokenizer, "so isand 3")
    assert not set(range(len(SPECIAL))) & set(dialogue.encode("a</s><s>b"))


@pytest.mark.parametrize("literal", [False, True])
@pytest.mark.parametrize("text", ["3", " 3", "\n\n3", ")+", "", "<|endoftext|>1"])
def test_byte_level_tokenizer_gives_the_tokens_of_the_separate_text(
    text: str, literal: bool
) -> None:
    tokenizer = load_tokenizer(BYTES)
    alone = tokenizer(text, add_special_tokens=False, split_special_tokens=literal).input_ids
    for after in (None, tokenizer.eos_token_id, 5):
        assert Continuations(tokenizer).ids([text], [after], literal=literal) == [alone]

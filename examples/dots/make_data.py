"""Make this folder's data: pictures of one to four dots, and the numbers of dots.

    python examples/dots/make_data.py

A picture has 4 x 4 cells of 4 x 4 pixels with at most one dot each. Held-out pictures with several
dots do not occur in ``train.jsonl``. ``tokenizer`` also contains the settings of Qwen3-VL's
processor.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

FOLDER = Path(__file__).parent
CELLS, CELL = 4, 4
MOST = 4
ROWS = {"train": 240, "heldout": 60}
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}="
    "{{ message.content }}<|im_end|>{% elif message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}" + PLACEHOLDER + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def draw(cells: list[int], path: Path) -> None:
    image = Image.new("L", (CELLS * CELL, CELLS * CELL), 255)
    for cell in cells:
        row, column = divmod(cell, CELLS)
        image.paste(0, (column * CELL, row * CELL, column * CELL + 3, row * CELL + 3))
    image.save(path, optimize=True)


def main() -> None:
    random.seed(0)
    pictures = FOLDER / "pictures"
    pictures.mkdir(exist_ok=True)
    seen: set[tuple[int, ...]] = set()
    for name, count in ROWS.items():
        lines = []
        while len(lines) < count:
            number = len(lines) % MOST + 1
            cells = sorted(random.sample(range(CELLS**2), number))
            if tuple(cells) in seen and number > 1:
                continue
            seen.add(tuple(cells))
            path = f"pictures/{'-'.join(map(str, cells))}.png"
            draw(cells, FOLDER / path)
            row = {"prompt": "dots", "images": [path], "answer": str(number)}
            lines.append(json.dumps(row) + "\n")
        (FOLDER / f"{name}.jsonl").write_text("".join(lines))
    words = ["<|pad|>", "dots", "=", *map(str, range(1, MOST + 1))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<|pad|>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        extra_special_tokens=TOKENS,
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(FOLDER / "tokenizer")
    size = {"shortest_edge": 256, "longest_edge": 256}
    processor = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    processor.save_pretrained(FOLDER / "tokenizer")
    path = FOLDER / "tokenizer" / "preprocessor_config.json"
    values = {**json.loads(path.read_text()), "processor_class": "Qwen3VLProcessor"}
    path.write_text(json.dumps(values, indent=2) + "\n")


if __name__ == "__main__":
    main()

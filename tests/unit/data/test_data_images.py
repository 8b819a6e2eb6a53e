"""Rows with images: their forms, their tokens, and the problems that name them."""

from __future__ import annotations

import base64
import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from PIL import ExifTags, Image, ImageOps
from pyarrow import parquet
from transformers import AutoProcessor

from slurmrl.config.schema import Dataset
from slurmrl.data import image_files
from slurmrl.data.rows import DatasetRows, Remarks
from slurmrl.data.sample import SequenceSample, pictures_of
from slurmrl.data.tokenizer import load_tokenizer
from slurmrl.errors import ConfigError, CorruptFileError, UnreadableInputError
from slurmrl.tensors.pictures import read
from tests.support.datasets import prepared, write_rows
from tests.support.picture_models import draw, write_processor

PARTS: list[dict[str, Any]] = [
    {"type": "text", "text": "Is "},
    {"type": "image", "image": "b.png"},
    {"type": "text", "text": " like "},
    {"type": "image", "image": "a.png"},
]
TEXT = "Is <image> like <image>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_processor(tmp_path, "gemma3")
    draw(tmp_path / "a.png", 2)
    draw(tmp_path / "b.png", 5, (40, 24))
    return tmp_path


def sample(folder: Path, kind: str, *rows: dict[str, Any]) -> SequenceSample:
    path = write_rows(folder, *rows, name=kind)
    config = Dataset(type=kind, path=path, images_key="images", chat_template=True)
    made = prepared(config, load_tokenizer(folder), folder / f"data-{kind}")
    return made.sample([(0, number) for number in range(len(rows))])


def parts(made: SequenceSample, key: str) -> list[list[Any]]:
    lengths = [length for row in made.lengths[key] for length in row]
    return [each.tolist() for each in made.tensor(key).split(lengths)]


def as_table(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a message in the form of Arrow tables, in which all parts have all keys."""
    return [{"role": "user", "content": [{"image": None, "text": None, **p} for p in content]}]


def test_prompts_of_all_types_have_tokens_and_pixels_of_the_processor(folder: Path) -> None:
    said = [{"role": "user", "content": PARTS}]
    bare = [{"type": each["type"]} if each["type"] == "image" else each for each in PARTS]
    made = sample(
        folder,
        "prompt",
        {"prompt": TEXT, "images": ["b.png", "a.png"]},
        {"prompt": said},
        {"prompt": [{"role": "user", "content": bare}], "images": ["b.png", "a.png"]},
        {"prompt": "Is  like ", "images": ["b.png", "a.png"]},
        {"prompt": "No image"},
        {"prompt": as_table(bare), "images": ["b.png", "a.png"]},
    )
    processor: Any = AutoProcessor.from_pretrained(folder, backend="pil")
    shown = [Image.open(folder / name).convert("RGB") for name in ("b.png", "a.png")]
    chat = [{"role": "user", "content": bare}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True)
    wanted = processor(images=shown, text=[text], add_special_tokens=False)
    found, paths = parts(made, "prompt_ids"), pictures_of(made)
    assert found[0] == found[1] == found[2] == found[5] == list(wanted["input_ids"][0])
    assert paths[0] == paths[1] == paths[2] == paths[3] == paths[5]
    assert found[3] != found[0], "images without a place come first"
    assert paths[4] == ""
    pictures = read(Path(paths[0]))
    np.testing.assert_array_equal(pictures.arguments["pixel_values"], wanted["pixel_values"])
    assert pictures.tokens == 8
    names = [[path.name for path in sorted(folder.glob("data-prompt/*/pictures/*/*"))]]
    assert names == [[Path(paths[0]).name]], "equal pictures are one file"


def test_answers_after_images_are_the_targets(folder: Path) -> None:
    said = [
        {"role": "user", "content": PARTS},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": [{"type": "image", "image": "a.png"}]},
        {"role": "assistant", "content": "Two"},
    ]
    answers = sample(folder, "prompt_answer", {"prompt": said[:1], "answer": "No."})
    talks = sample(folder, "messages", {"messages": said})
    tokenizer = load_tokenizer(folder)
    for made, wanted in ((answers, "No.<|im_end|>"), (talks, "No.<|im_end|>Two<|im_end|>")):
        (ids,), (context,) = parts(made, "input_ids"), parts(made, "prompt_mask")
        targets = [token for token, read_ in zip(ids, context, strict=True) if not read_]
        assert tokenizer.decode(targets) == wanted
    assert read(Path(pictures_of(talks)[0])).tokens == 12


def test_image_mark_stays_text_in_answers_and_next_to_image_parts(folder: Path) -> None:
    html = {"prompt": "Show it.", "answer": "Use the <image> or <video> element."}
    made = sample(folder, "prompt_answer", html)
    assert html["answer"] in load_tokenizer(folder).decode(made.tensor("input_ids"))
    content = [PARTS[1], {"type": "text", "text": "Not <image>."}]
    made = sample(folder, "prompt", {"prompt": [{"role": "user", "content": content}]})
    assert "Not <image>." in load_tokenizer(folder).decode(made.tensor("prompt_ids"))


@pytest.mark.parametrize(
    ("row", "key", "message"),
    [
        ({"images": ["https://a.b/c.png"]}, "images", "is a URL; download it"),
        ({"images": ["data:image/png;base64,AAAA"]}, "images", "is a URL; download it"),
        ({"images": ["no.png"]}, "images", r"image 1 \('no.png'\) cannot be read: .*no.png"),
        ({"images": ["a.png", "text.txt"]}, "images", "image 2 .*is not an image"),
        ({"images": ["wide.png"]}, "images", "has 40 x 30 pixels; at most 1000 are allowed"),
        ({"images": ["heavy.png"]}, "images", "MiB; at most"),
        ({"images": ["vast.png"]}, "images", "has too many pixels; at most 1000"),
        ({"images": ["a\0.png"]}, "images", "cannot be read: embedded null byte"),
        ({"images": ["\ud800.png"]}, "images", r"\\ud800.png'\) cannot be read: .*surrogates"),
        ({"images": ["lfs.png"]}, "images", "is a pointer of Git LFS"),
        ({"images": ["a.png"], "prompt": "<image_soft_token>"}, "", "stands for an image: remove"),
        ({"images": [], "prompt": "<image>"}, "", "has 0 images, but .* has <image>"),
        ({"images": None, "prompt": "<image>"}, "", "has 0 images, but .* has <image>"),
        ({"prompt": "Is it <image>?"}, "", "has 0 images, but .* has <image>"),
        ({"images": [3]}, "images", "has an image 1 that must be the path of a file"),
        ({"images": ["cut.png"]}, "", "an image .*'cut.png'.* is damaged"),
        ({"images": ["flipped.png"]}, "", "an image .*'flipped.png'.* is damaged"),
        ({"images": ["a.png"], "prompt": "<image> <image>"}, "", "has more image parts"),
        ({"images": ["a.png", "b.png"], "prompt": "<image>"}, "", "no place for 1 of them"),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}]},
         "prompt", "image 1 .*x.png.* cannot be read"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "", "more image parts"),
        ({"prompt": [{"role": "user", "content": [{"type": "video"}]}]},
         "prompt", "has a video: set videos_key"),
        ({"images": ["a.png"], "videos": [["a.png"]]}, "videos", "without videos_key: set it"),
        ({"images": ["a.png"], "audio": ["a.wav"]}, "audio", "slurmrl reads no sounds"),
    ],
)  # fmt: skip
def test_unusable_image_is_a_problem_of_its_row(
    folder: Path, row: dict[str, Any], key: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preparation finds all problems. The checks of a submission find those of ``images_key``."""
    monkeypatch.setattr(image_files, "LARGEST_PIXELS", 1000)
    monkeypatch.setattr(image_files, "LARGEST_FILE", 100_000)
    (folder / "text.txt").write_text("no image")
    (folder / "lfs.png").write_text("version https://git-lfs.github.com/spec/v1")
    Image.new("RGB", (40, 30)).save(folder / "wide.png")
    if "vast.png" in str(row):  # it takes long
        Image.new("1", (14_000, 14_000)).save(folder / "vast.png")
    noise = np.random.default_rng(0).integers(0, 256, (200, 200, 3), np.uint8)
    Image.fromarray(noise).save(folder / "heavy.png")
    whole = (folder / "b.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "flipped.png").write_bytes(whole[:-13] + bytes([whole[-13] ^ 1]) + whole[-12:])
    good = {"prompt": "How many?", "images": ["a.png"]}
    path = write_rows(folder, good, {"prompt": "How many?", **row})
    config = Dataset(type="prompt", path=path, images_key="images", chat_template=True)
    with pytest.raises(ConfigError, match=message) as raised:
        prepared(config, load_tokenizer(folder), folder / "data")
    (problem,) = raised.value.problems
    assert (problem.where, problem.key) == (f"{path}:2", key)
    if key:
        with pytest.raises(ConfigError, match=message):
            DatasetRows(config)


@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("open", errno.EIO),
        ("decode", errno.EIO),
        ("open", errno.ESHUTDOWN),  # Lustre evicted the client
        ("open", errno.ENOTCONN),  # a FUSE file system has stopped
    ],
)
def test_temporary_image_error_is_not_reported_as_problem_of_row(
    folder: Path, place: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job reads the image again, perhaps on another host."""

    def fail(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    module, name = (Image, "open") if place == "open" else (ImageOps, "exif_transpose")
    monkeypatch.setattr(module, name, fail)
    path = write_rows(folder, {"prompt": "How many?", "images": ["a.png"]})
    config = Dataset(type="prompt", path=path, images_key="images", chat_template=True)
    with pytest.raises(
        UnreadableInputError, match=rf"a\.png cannot be read: {os.strerror(number)}"
    ):
        prepared(config, load_tokenizer(folder), folder / "data")


def test_images_without_images_key_are_a_problem(folder: Path) -> None:
    path = write_rows(folder, {"prompt": [{"role": "user", "content": PARTS}]})
    with pytest.raises(ConfigError, match="has an image: set images_key"):
        DatasetRows(Dataset(type="prompt", path=path, chat_template=True))


def test_damaged_prepared_images_are_an_error_and_prepared_again(folder: Path) -> None:
    row = {"prompt": "How many?", "images": ["a.png"]}
    path = Path(pictures_of(sample(folder, "prompt", row))[0])
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match="is damaged; the next incarnation prepares"):
        read(path)
    read(Path(pictures_of(sample(folder, "prompt", row))[0]))


def test_rows_of_prepared_data_contain_no_pixels(folder: Path) -> None:
    made = sample(folder, "prompt", {"prompt": "How many?", "images": ["a.png"]})
    rows = next(folder.glob("data-prompt/*/rows.bin")).read_bytes()
    assert len(rows) < 1000
    assert base64.b64encode((folder / "a.png").read_bytes()) not in rows
    assert made.metadata["row"][0]["images"] == ["a.png"]


def test_image_columns_are_read_without_keeping_their_pixels(folder: Path) -> None:
    """Parquet files of the library ``datasets`` have the content of each image."""
    content = {"bytes": (folder / "a.png").read_bytes(), "path": "a.png"}
    rows = [{"prompt": "How many <image>?", "image": content, "answer": "2"}]
    path = str(folder / "rows.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    config = Dataset(type="prompt", path=path, images_key="image", chat_template=True)
    found = prepared(config, load_tokenizer(folder), folder / "data").sample([(0, 0)])
    wanted = sample(folder, "prompt", {"prompt": "How many <image>?", "images": ["a.png"]})
    assert parts(found, "prompt_ids") == parts(wanted, "prompt_ids")
    assert Path(pictures_of(found)[0]).name == Path(pictures_of(wanted)[0]).name
    assert found.metadata["row"][0]["image"] == {"path": "a.png"}
    assert DatasetRows(config).scored([0]) == found.metadata["row"], "as a submission tries it"
    with pytest.raises(ConfigError, match="holds images: set images_key to image, or drop"):
        DatasetRows(Dataset(type="prompt", path=path, chat_template=True))
    broken = {**content, "bytes": content["bytes"][:20]}
    parquet.write_table(pyarrow.Table.from_pylist([{**rows[0], "image": [broken]}]), path)
    with pytest.raises(ConfigError, match=r"image 1 \('a.png'\) is not an image"):
        DatasetRows(config)


def test_photo_is_rotated_according_to_its_exif_tag(tmp_path: Path) -> None:
    """Cameras store rotated pixels, and viewers turn them."""
    photo = Image.new("RGB", (20, 10), "white")
    tags = photo.getexif()
    tags[ExifTags.Base.Orientation] = 6
    photo.save(tmp_path / "photo.jpg", exif=tags)
    assert image_files.load_image(tmp_path, "photo.jpg").size == (10, 20)


def test_damage_after_the_pixels_of_a_png_image_is_ignored(tmp_path: Path) -> None:
    """Pillow decodes all pixels of these files."""
    draw(tmp_path / "a.png", 2)
    whole = (tmp_path / "a.png").read_bytes()
    shown = np.asarray(image_files.load_image(tmp_path, "a.png"))
    note = b"\0\0\0\x03tEXta\0b" + b"oops"
    for cut in (whole[:-12], whole[:-12] + note + whole[-12:]):
        (tmp_path / "b.png").write_bytes(cut)
        np.testing.assert_array_equal(image_files.load_image(tmp_path, "b.png"), shown)


def test_pixels_of_16_bits_are_scaled_and_pixels_of_32_bits_rejected(tmp_path: Path) -> None:
    """Pillow would show all values above 255 as white."""
    values = np.arange(4, dtype=np.uint16).reshape(2, 2) * 0x4000
    Image.fromarray(values).save(tmp_path / "scan.png")
    shown = np.asarray(image_files.load_image(tmp_path, "scan.png"))
    assert shown[..., 0].tolist() == [[0, 64], [128, 192]]
    Image.fromarray(values.astype(np.float32)).save(tmp_path / "floats.tif")
    with pytest.raises(image_files.ImageError, match=r"\('floats.tif'\) has 32 bits per value"):
        image_files.load_image(tmp_path, "floats.tif")


def test_wrong_images_key_gives_a_remark(folder: Path) -> None:
    """A misspelled key would train without the images."""
    row = {"prompt": "How many?", "images": ["a.png"]}
    path = write_rows(folder, row)
    for key, wanted in (("image", ["images_key"]), ("images", [])):
        config = Dataset(type="prompt", path=path, images_key=key, chat_template=True)
        remarks = Remarks(config, DatasetRows(config).records.rows, lambda: load_tokenizer(folder))
        found = [each for each in remarks.all((), str) if each.key == "images_key"]
        assert [each.key for each in found] == wanted
        assert all("'image' or in a message" in each.message for each in found)
        assert all("did you mean 'images'?" in each.message for each in found)


def test_rows_with_images_are_compared_with_the_positions(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first rows are processed, because processing images is slow."""
    monkeypatch.setattr("slurmrl.data.rows.IMAGE_ROWS", 2)
    long = {"prompt": "Many? " * 50, "images": ["a.png"]}
    path = write_rows(folder, {"prompt": "How many?", "images": ["a.png"]}, long, long)
    config = Dataset(type="prompt", path=path, images_key="images", chat_template=True)
    found = DatasetRows(config).count_long(load_tokenizer(folder), 250)
    assert found == (0, 1, 351, False)


def test_dropped_row_leaves_no_images_on_disk(folder: Path) -> None:
    """Rows that are dropped for their length have the largest images."""
    row = {"prompt": "How many?", "images": ["a.png"]}
    path = write_rows(folder, {"prompt": "Many? " * 50, "images": ["b.png"]}, row)
    config = Dataset(
        type="prompt", path=path, images_key="images", chat_template=True, max_prompt_tokens=100
    )
    made = prepared(config, load_tokenizer(folder), folder / "data").sample([(0, 0)])
    files = sorted((folder / "data").glob("*/pictures/*/*"))
    assert [str(file) for file in files] == pictures_of(made)

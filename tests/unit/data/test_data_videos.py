"""Rows with videos: their forms, frames and tokens, and the problems that name them."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata, load_video

from slurmrl.config.schema import Dataset
from slurmrl.data import image_files
from slurmrl.data.image_files import ImageError
from slurmrl.data.image_sources import ImageFiles, images_of
from slurmrl.data.picture_encoder import load_processor
from slurmrl.data.rows import DatasetRows, Remarks
from slurmrl.data.sample import SequenceSample, pictures_of
from slurmrl.data.tokenizer import load_tokenizer
from slurmrl.errors import ConfigError, MissingDependencyError
from slurmrl.tensors.pictures import PictureInputs, read
from tests.support.datasets import prepared, write_rows
from tests.support.picture_models import draw, write_processor, write_video

FRAMES = ["0.png", "1.png", "2.png"]
FAMILIES = ("qwen2_5_vl", "qwen3_vl")
ONE = 0x10000
"""One as a number of a matrix in mp4 files."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(tmp_path, "qwen3_vl")


def folder_of(path: Path, family: str) -> Path:
    write_processor(path, family)
    for dots, name in enumerate(FRAMES):
        draw(path / name, dots)
    return path


def sample(folder: Path, *rows: dict[str, Any], kind: str = "prompt", **more: Any) -> Any:
    path = write_rows(folder, *rows, name=kind)
    config = dataset(path, type=kind, **more)
    made = prepared(config, load_tokenizer(folder), folder / f"data-{kind}")
    return made.sample([(0, number) for number in range(len(rows))])


def dataset(path: str, **more: Any) -> Dataset:
    base = {"type": "prompt", "images_key": "images", "videos_key": "videos"}
    return Dataset(path=path, chat_template=True, **{**base, **more})


def tokens(made: SequenceSample) -> list[list[int]]:
    lengths = [length for row in made.lengths["prompt_ids"] for length in row]
    return [each.tolist() for each in made.tensor("prompt_ids").split(lengths)]


def inputs(made: SequenceSample, number: int = 0) -> PictureInputs:
    return read(Path(pictures_of(made)[number]))


def test_all_forms_of_a_video_have_the_same_tokens_and_pixels(folder: Path) -> None:
    part = {"type": "video"}
    said = [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]
    named = [{"role": "user", "content": [{**part, "video": FRAMES}, said[0]["content"][1]]}]
    made = sample(
        folder,
        {"prompt": "<video>What?", "videos": [FRAMES]},
        {"prompt": "What?", "videos": [FRAMES]},
        {"prompt": said, "videos": [FRAMES]},
        {"prompt": named},
        {"prompt": "What?"},
    )
    found, paths = tokens(made), pictures_of(made)
    assert found[0] == found[1] == found[2] == found[3] != found[4]
    assert paths[0] == paths[1] == paths[2] == paths[3] != paths[4] == ""
    assert inputs(made).tokens == 0
    assert inputs(made).videos > 0


def test_images_and_videos_keep_their_places(folder: Path) -> None:
    """If a row names no places, images come before videos."""
    first = {"images": ["1.png"], "videos": [FRAMES]}
    made = sample(
        folder,
        {"prompt": "<image><video>What?", **first},
        {"prompt": "What?", **first},
        {"prompt": "<video><image>What?", **first},
    )
    found, paths = tokens(made), pictures_of(made)
    assert found[0] == found[1] != found[2]
    assert paths[0] == paths[1] == paths[2]
    arguments = inputs(made).arguments
    assert {"pixel_values", "pixel_values_videos", "video_grid_thw"} < arguments.keys()
    assert inputs(made).tokens > 0 < inputs(made).videos


@pytest.mark.parametrize(("family", "grids"), [("qwen2_5_vl", [[2, 6, 10]]), ("qwen3_vl", None)])
def test_frames_have_the_pixels_and_times_of_the_processor(
    family: str, grids: Any, tmp_path: Path
) -> None:
    """Values of torchvision's resizing, which rounds to whole numbers of 8 bits.

    A rate changes the times, not the pixels.
    """
    folder = folder_of(tmp_path, family)
    row = {"prompt": "What?", "videos": [FRAMES]}
    slow = sample(folder, row, video_fps=1.0)
    usual = sample(folder, row)
    pixels = [inputs(each).arguments["pixel_values_videos"] for each in (slow, usual)]
    np.testing.assert_array_equal(*pixels)
    if family == "qwen3_vl":
        texts = [load_tokenizer(folder).decode(tokens(each)[0]) for each in (slow, usual)]
        assert "<0.5 seconds>" in texts[0]
        assert "<0.2 seconds>" in texts[1]
        return
    seconds = [inputs(each).arguments["second_per_grid_ts"].tolist() for each in (slow, usual)]
    assert seconds == [[2.0], [1.0]]
    assert tokens(slow) == tokens(usual)
    assert inputs(usual).arguments["video_grid_thw"].tolist() == [[2, 4, 6]]


def test_long_list_of_frames_is_thinned_out(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "qwen2_5_vl")
    rows = [{"prompt": "What?", "videos": [each]} for each in (FRAMES * 4, ["0.png", "0.png"])]
    made = sample(folder, *rows, video_frames=3)
    assert inputs(made).arguments["video_grid_thw"][0][0] == 1
    made = sample(folder, *rows, video_frames=4)
    assert inputs(made).arguments["video_grid_thw"][0][0] == 2
    assert inputs(made, 1).arguments["video_grid_thw"][0][0] == 1
    listed = list(images_of(next((folder / "data-prompt").iterdir())))
    assert sorted(listed) == ["0.png"], "frames 0, 3, 6 and 9"


@pytest.mark.parametrize(("name", "stored"), [("a.mp4", 40), ("a.mkv", 0), ("a.avi", 40)])
def test_frames_are_the_same_if_a_format_does_not_store_their_number(
    name: str, stored: int, tmp_path: Path
) -> None:
    av = pytest.importorskip("av")
    write_video(tmp_path / name, frames=40, rate=10)
    with av.open(str(tmp_path / name)) as container:
        assert container.streams.video[0].frames == stored
        frames = [each.to_ndarray(format="rgb24") for each in container.decode(video=0)]
    files = ImageFiles()
    found = image_files.load_video(tmp_path, name, lambda total, rate: [0, 7, total - 1], files)
    assert (found.total, found.rate) == (40, 10.0)
    np.testing.assert_array_equal(found.frames, [frames[0], frames[7], frames[39]])


@pytest.mark.parametrize("family", FAMILIES)
def test_file_has_the_frames_that_the_processor_chooses(family: str, tmp_path: Path) -> None:
    pytest.importorskip("av")
    folder = folder_of(tmp_path, family)
    write_video(folder / "a.mp4", frames=40, rate=10)
    made = sample(folder, {"prompt": "What?", "videos": ["a.mp4"]})
    settings = dataset(str(folder / "prompt"))
    processor = load_processor(load_tokenizer(folder), settings).video_processor
    places = {
        "qwen2_5_vl": [0, 5, 10, 15, 20, 25, 30, 35],
        "qwen3_vl": [0, 6, 11, 17, 22, 28, 33, 39],
    }[family]  # of transformers with torchvision
    assert processor.choose(40, 10.0) == places
    frames, known = load_video(str(folder / "a.mp4"), sample_indices_fn=lambda **_: places)
    assert (known.total_num_frames, known.fps) == (40, 10.0)
    found = image_files.load_video(folder, "a.mp4", processor.choose, ImageFiles())
    np.testing.assert_array_equal(found.frames, frames)
    assert inputs(made).arguments["video_grid_thw"][0][0] == 4
    few = sample(folder, {"prompt": "What?", "videos": ["a.mp4"]}, video_frames=4)
    assert inputs(few).arguments["video_grid_thw"][0][0] == 2


def test_frames_are_chosen_as_by_transformers(folder: Path) -> None:
    settings = dataset(str(folder / "prompt"), video_frames=9, video_fps=3.0)
    own = load_processor(load_tokenizer(folder), settings).video_processor
    for total in range(2, 60):
        known = VideoMetadata(total_num_frames=total, fps=7.0)
        wanted = Qwen3VLVideoProcessor.sample_frames(own, known, fps=3.0)
        assert own.choose(total, 7.0) == wanted.tolist()
        assert len(own.choose(total, None)) == min(total, 9)


@pytest.mark.parametrize(
    ("row", "key", "message"),
    [
        ({"videos": ["https://a.b/c.mp4"]}, "videos", "video 1 .*is a URL; download it"),
        ({"videos": ["no.mp4"]}, "videos", r"video 1 \('no.mp4'\) cannot be read"),
        ({"videos": ["text.txt"]}, "videos", "is not a video that PyAV can read"),
        ({"videos": ["0.png"]}, "", "has 1 frames at rate .*: list its frames"),
        ({"videos": [["0.png"]]}, "videos", "video 1 has 1 frames; at least 2"),
        ({"videos": [["0.png", "no.png"]]}, "videos", "video 1 frame 2 .*no.png.* cannot be read"),
        ({"videos": [["0.png", "big.png"]]}, "", "has frames of different sizes"),
        ({"videos": [3]}, "videos", "has a video 1 that must be the path of a file or a list"),
        ({"videos": ["cut.mp4"]}, "", "a video .*cut.mp4.* is damaged"),
        ({"videos": ["sound.wav"]}, "videos", "has no video stream"),
        ({"videos": [], "prompt": "<video>"}, "", "has 0 videos, but the conversation has <video>"),
        ({"videos": [FRAMES], "prompt": "<video><video>"}, "", "has more video parts"),
        ({"videos": [FRAMES, FRAMES], "prompt": "<video>"}, "", "no place for 1 of them"),
        ({"videos": [FRAMES], "prompt": "<|video_pad|>"}, "", "number of videos passed"),
        ({"audio": "a.wav", "videos": [FRAMES]}, "audio", "slurmrl reads no sounds"),
        ({"prompt": [{"role": "user", "content": [{"type": "video", "video": 3}]}]},
         "prompt", "has a video that must be the path"),
        ({"prompt": [{"role": "user", "content": [{"type": "video", "video": FRAMES, "fps": 1}]}]},
         "prompt", "has a video with 'fps', which slurmrl does not read: set video_fps"),
    ],
)  # fmt: skip
def test_unusable_video_is_a_problem_of_its_row(
    folder: Path, row: dict[str, Any], key: str, message: str
) -> None:
    av = pytest.importorskip("av")
    (folder / "text.txt").write_text("no video")
    draw(folder / "big.png", 1, (48, 16))
    if "cut.mp4" in str(row):
        write_video(folder / "whole.mp4", frames=40, rate=10)
        write_video(folder / "cut.mp4", frames=40, rate=10, damaged=True)
        sizes = {(folder / name).stat().st_size for name in ("whole.mp4", "cut.mp4")}
        assert len(sizes) == 1
    with av.open(str(folder / "sound.wav"), "w") as sound:
        sound.add_stream("pcm_s16le", rate=8000)
        sound.start_encoding()
    path = write_rows(folder, {"prompt": "What?", "videos": [FRAMES]}, {"prompt": "What?", **row})
    config = dataset(path)
    with pytest.raises(ConfigError, match=message) as raised:
        prepared(config, load_tokenizer(folder), folder / "data")
    (problem,) = raised.value.problems
    assert (problem.where, problem.key) == (f"{path}:2", key)
    if key:
        with pytest.raises(ConfigError, match=message):
            DatasetRows(config)


def test_images_may_be_in_a_column_that_is_named_after_videos(folder: Path) -> None:
    path = write_rows(folder, {"prompt": "What?", "videos": FRAMES})
    rows = DatasetRows(dataset(path, images_key="videos", videos_key=None))
    assert len(rows.records.rows) == 1


def test_images_column_is_rejected_without_images_key(folder: Path) -> None:
    path = write_rows(folder, {"prompt": "What?", "videos": [FRAMES], "images": ["0.png"]})
    with pytest.raises(ConfigError, match="images: is not read without images_key"):
        DatasetRows(dataset(path, images_key=None))


@pytest.mark.parametrize("key", ["chosen", "rejected"])
def test_video_in_any_message_needs_videos_key(folder: Path, key: str) -> None:
    """The template would write a placeholder without a video."""
    said = [{"role": "assistant", "content": [{"type": "video", "video": "a.mp4"}]}]
    row = {"prompt": "What?", "chosen": "Yes", "rejected": "No", key: said}
    path = write_rows(folder, row)
    with pytest.raises(ConfigError, match="has a video: set videos_key"):
        DatasetRows(Dataset(type="preference", path=path, chat_template=True))


def test_file_without_decoder_is_rejected_and_frames_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    (folder / "a.mp4").write_bytes(b"video")
    path = write_rows(folder, {"prompt": "What?", "videos": ["a.mp4"]})
    with pytest.raises(MissingDependencyError, match="need the package av: pip install av"):
        DatasetRows(dataset(path))
    assert inputs(sample(folder, {"prompt": "What?", "videos": [FRAMES]})).videos


def test_frame_of_a_file_that_ends_early_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("av")
    write_video(tmp_path / "a.mp4", frames=4, rate=10)
    with pytest.raises(ImageError, match="has no frame 10 of 4: it is damaged, or"):
        image_files.load_video(tmp_path, "a.mp4", lambda *_: [0, 9], ImageFiles())


def test_frames_that_a_cut_has_hidden_are_not_counted(tmp_path: Path) -> None:
    """A cut without new encoding keeps the frames from the last key frame on, and hides them."""
    av = pytest.importorskip("av")
    write_video(tmp_path / "a.mp4", frames=12, rate=10)
    path = str(tmp_path / "b.mp4")
    with av.open(str(tmp_path / "a.mp4")) as source, av.open(path, "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                early = round(0.5 / packet.time_base)
                packet.stream, packet.pts, packet.dts = (
                    stream,
                    packet.pts - early,
                    packet.dts - early,
                )
                target.mux(packet)
    whole, cut = (
        image_files.load_video(tmp_path, name, lambda total, _: range(total), ImageFiles())
        for name in ("a.mp4", "b.mp4")
    )
    assert (whole.total, cut.total) == (12, 7)
    np.testing.assert_array_equal(cut.frames, whole.frames[5:])


def test_video_is_rotated_as_its_file_states(tmp_path: Path) -> None:
    """Phones store the frames of portrait videos in landscape form."""
    pytest.importorskip("av")
    write_video(tmp_path / "a.mp4", frames=4, rate=10)
    content = bytearray((tmp_path / "a.mp4").read_bytes())
    identity = struct.pack(">9i", ONE, 0, 0, 0, ONE, 0, 0, 0, ONE << 14)
    turn = struct.pack(">9i", 0, ONE, 0, -ONE, 0, 0, 48 * ONE, 0, ONE << 14)  # right is down
    at = content.index(identity, content.index(b"tkhd"))
    content[at : at + len(turn)] = turn
    (tmp_path / "b.mp4").write_bytes(content)
    plain, turned = (
        image_files.load_video(tmp_path, name, lambda *_: [0, 1], ImageFiles()).frames
        for name in ("a.mp4", "b.mp4")
    )
    np.testing.assert_array_equal(turned[0], np.rot90(plain[0], -1))


def test_changed_frame_or_file_changes_the_fingerprint(folder: Path) -> None:
    row = {"prompt": "What?", "videos": [FRAMES]}
    path = write_rows(folder, row)
    tokenizer, config = load_tokenizer(folder), dataset(path)
    before = prepared(config, tokenizer, folder / "one").fingerprint
    draw(folder / "1.png", 4)
    assert prepared(config, tokenizer, folder / "two").fingerprint != before


def test_wrong_videos_key_gives_a_remark(folder: Path) -> None:
    path = write_rows(folder, {"prompt": "What?", "clips": [FRAMES]})
    config = dataset(path, images_key=None)
    remarks = Remarks(config, DatasetRows(config).records.rows, lambda: load_tokenizer(folder))
    found = [each.key for each in remarks.all((), str) if each.key.endswith("s_key")]
    assert found == ["videos_key"]


def test_video_settings_need_videos_key() -> None:
    with pytest.raises(ValueError, match="not allowed without videos_key"):
        Dataset(type="prompt", path="rows.jsonl", video_frames=4)

"""Tiny random models that read images, and processors; all are made when needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

END, PAD = "<|im_end|>", "<|endoftext|>"
QWEN_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
GEMMA_TOKENS = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
}
GEMMA4_TOKENS = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "video_token": "<|video|>",
}
GLM_TOKENS = {
    "image_token": "<|image|>",
    "video_token": "<|video|>",
    "image_start_token": "<|begin_of_image|>",
    "image_end_token": "<|end_of_image|>",
    "video_start_token": "<|begin_of_video|>",
    "video_end_token": "<|end_of_video|>",
}
INTERN_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}IMAGE{% elif p.type == 'video' %}VIDEO"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}


def write_tokenizer(folder: Path, tokens: dict[str, str], placeholder: str) -> dict[str, int]:
    """Write a tokenizer of bytes; return the ids of its special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    video = placeholder.replace(QWEN_TOKENS["image_token"], QWEN_TOKENS["video_token"])
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=["<|im_start|>"],
        extra_special_tokens=tokens,
        chat_template=TEMPLATE.replace("IMAGE", placeholder).replace("VIDEO", video),
    )
    made.save_pretrained(folder)
    known: dict[str, int] = made.get_vocab()
    return known


def write_processor(folder: Path, family: str) -> dict[str, Any]:
    """Write the tokenizer and the processor of a family. Return a config for its models."""
    if family in FAMILIES:
        return FAMILIES[family](folder)
    if family == "gemma3":
        ids = write_tokenizer(folder, GEMMA_TOKENS, GEMMA_TOKENS["boi_token"])
        Gemma3ImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
        values = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
        (folder / "processor_config.json").write_text(json.dumps(values))
        tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
        return {
            "model_type": family,
            "text_config": {"model_type": "gemma3_text", **TEXT, "vocab_size": len(ids)}
            | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
            "vision_config": {
                "model_type": "siglip_vision_model",
                **tower,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 4,
            },
            "mm_tokens_per_image": 4,
            "image_token_index": ids[GEMMA_TOKENS["image_token"]],
            "boi_token_index": ids[GEMMA_TOKENS["boi_token"]],
            "eoi_token_index": ids[GEMMA_TOKENS["eoi_token"]],
        }
    start, pad, end = (QWEN_TOKENS[f"{n}_token"] for n in ("vision_start", "image", "vision_end"))
    ids = write_tokenizer(folder, QWEN_TOKENS, start + pad + end)
    size = {"shortest_edge": 64, "longest_edge": 1024}
    Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=size).save_pretrained(folder)
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}.get(family, "Qwen3VL")
    name_processor(folder, f"{name}Processor")
    tower = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
    if family.startswith("qwen3"):
        tower |= {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}
        tower |= {"num_position_embeddings": 16}
        tower |= {"deepstack_visual_indexes": [0]} if "vl" in family else {}
    elif family == "qwen2_5_vl":
        tower |= {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}
        tower |= {"window_size": 16, "fullatt_block_indexes": [1]}
    else:
        tower |= {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    interleaved = {"mrope_interleaved": True} if family.startswith("qwen3") else {}
    more: dict[str, Any] = {"rope_parameters": {**ROPE, **interleaved}}
    if family.endswith("moe"):
        more |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    if family.startswith("qwen3_5"):
        more |= {"layer_types": ["linear_attention", "full_attention"], **LINEAR}
        more |= {"head_dim": 32}
        more["rope_parameters"] |= {"partial_rotary_factor": 0.25}
        more |= {"shared_expert_intermediate_size": 16} if "moe" in family else {}
    return {
        "model_type": family,
        "text_config": {"model_type": f"{family}_text", **TEXT, "vocab_size": len(ids)} | more,
        "vision_config": {"model_type": family, **tower},
        **{f"{n}_token_id": ids[QWEN_TOKENS[f"{n}_token"]] for n in ("image", "video")},
        **{f"vision_{n}_token_id": ids[QWEN_TOKENS[f"vision_{n}_token"]] for n in ("start", "end")},
    }


def write_served_processor(folder: Path, family: str) -> dict[str, Any]:
    """Do the same as `write_processor`, with model sizes that servers support on CPUs."""
    values = write_processor(folder, family)
    text, tower = values["text_config"], values["vision_config"]
    text |= {"hidden_size": 128, "head_dim": 32}  # Qwen2.5-VL divides by the number of heads
    if "mrope_section" in text.get("rope_parameters", {}):
        text["rope_parameters"] |= {"mrope_section": [8, 4, 4]}
        tower |= {"out_hidden_size": 128}
    tower |= {"hidden_size": 64, "intermediate_size": 128}
    if family == "qwen2_5_vl":  # SGLang supports only the released patch sizes.
        tower |= {"patch_size": 14, "window_size": 56}
        size = {"shortest_edge": 4 * 784, "longest_edge": 8 * 784}
        Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, size=size).save_pretrained(folder)
        name_processor(folder, "Qwen2_5_VLProcessor")
    return values


def write_gemma4(folder: Path) -> dict[str, Any]:
    ids = write_tokenizer(folder, GEMMA4_TOKENS, GEMMA4_TOKENS["image_token"])
    Gemma4ImageProcessorPil(
        patch_size=4, pooling_kernel_size=2, max_soft_tokens=70
    ).save_pretrained(folder)
    name_processor(folder, "Gemma4Processor")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    return {
        "model_type": "gemma4",
        "text_config": {"model_type": "gemma4_text", **TEXT, "vocab_size": len(ids)}
        | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
        | {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": len(ids)}
        | {"global_head_dim": 8, "use_bidirectional_attention": "vision"},
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            **heads,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
        "audio_config": {
            "model_type": "gemma4_audio",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "subsampling_conv_channels": [8, 4],
            "output_proj_dims": 16,
        },
        **{f"{name}_id": ids[token] for name, token in GEMMA4_TOKENS.items()},
    }


def write_glm4v(folder: Path, family: str = "glm4v") -> dict[str, Any]:
    start, pad, end = (GLM_TOKENS[f"image{part}_token"] for part in ("_start", "", "_end"))
    ids = write_tokenizer(folder, GLM_TOKENS, start + pad + end)
    size = {"shortest_edge": 64, "longest_edge": 2048}
    newer = family == "glm46v"
    kind = Glm46VImageProcessorPil if newer else Glm4vImageProcessorPil
    kind(patch_size=4, merge_size=2, size=size).save_pretrained(folder)
    name_processor(folder, "Glm46VProcessor" if newer else "Glm4vProcessor")
    tower = {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "image_size": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    parts = "glm4v_moe" if family == "glm4v_moe" else "glm4v"
    return {
        "model_type": family,
        "text_config": {"model_type": f"{parts}_text", **TEXT, "vocab_size": len(ids)}
        | {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}, "pad_token_id": None}
        | (experts if parts == "glm4v_moe" else {}),
        "vision_config": {
            "model_type": f"{parts}_vision",
            "depth": 2,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            **tower,
        },
        **{f"{name}_id": ids[token] for name, token in GLM_TOKENS.items()},
    }


def write_llava(folder: Path) -> dict[str, Any]:
    ids = write_tokenizer(folder, {"image_token": "<image>"}, "<image>")
    side = {"height": 16, "width": 16}
    LlavaImageProcessorPil(size={"shortest_edge": 16}, crop_size=side).save_pretrained(folder)
    values = {"processor_class": "LlavaProcessor", "patch_size": 4}
    more = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    (folder / "processor_config.json").write_text(json.dumps({**values, **more}))
    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return {
        "model_type": "llava",
        "text_config": {"model_type": "llama", **TEXT, "vocab_size": len(ids)},
        "vision_config": {
            "model_type": "clip_vision_model",
            **tower,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        },
        "image_token_index": ids["<image>"],
        "image_seq_length": 16,
        "tie_word_embeddings": False,
    }


def write_internvl(folder: Path) -> dict[str, Any]:
    ids = write_tokenizer(folder, INTERN_TOKENS, INTERN_TOKENS["context_image_token"])
    images = GotOcr2ImageProcessorPil(
        size={"height": 16, "width": 16}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    images.save_pretrained(folder)
    values = {"processor_class": "InternVLProcessor", "image_seq_length": 4}
    (folder / "processor_config.json").write_text(json.dumps(values))
    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    return {
        "model_type": "internvl",
        "text_config": {"model_type": "qwen2", **TEXT, "vocab_size": len(ids)},
        "vision_config": {
            "model_type": "internvl_vision",
            **tower,
            "num_attention_heads": 2,
            "image_size": [16, 16],
            "patch_size": [4, 4],
        },
        "image_token_id": ids[INTERN_TOKENS["context_image_token"]],
        "image_seq_length": 4,
        "tie_word_embeddings": False,
    }


FAMILIES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "gemma4": write_gemma4,
    **{name: partial(write_glm4v, family=name) for name in ("glm4v", "glm4v_moe", "glm46v")},
    "internvl": write_internvl,
    "llava": write_llava,
}


def name_processor(folder: Path, name: str) -> None:
    """Name the class of the processor in its file."""
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "processor_class": name}))


def draw(path: Path, dots: int, size: tuple[int, int] = (24, 16)) -> None:
    """Draw a picture of black dots on white."""
    image = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(image)
    for dot in range(dots):
        x, y = 6 * (dot % 4) + 1, 6 * (dot // 4) + 1
        pen.ellipse((x, y, x + 3, y + 3), fill="black")
    image.save(path)


def write_video(path: Path, frames: int, rate: int, *, damaged: bool = False) -> None:
    """Write a video of a dot that moves; ``damaged``: a part of its data is overwritten."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(frames):
            image = Image.new("RGB", (64, 48), "white")
            ImageDraw.Draw(image).ellipse((number, 9, number + 9, 18), fill="black")
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
    if damaged:
        content = bytearray(path.read_bytes())
        middle = content.index(b"mdat") + 300
        content[middle : middle + 400] = bytes(400)
        path.write_bytes(content)

"""Construction and loading of transformers' models, and properties that configs do not state."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from slurmrl.config.schema.roles import VISION
from slurmrl.errors import UsageError
from slurmrl.fsio import inputs
from slurmrl.models.architecture import Head
from slurmrl.models.hf import as_tensor, is_finite
from slurmrl.models.hf_config import MODULE, HFConfig, constants_refusal
from slurmrl.models.model_tensors import (
    FLOATS,
    HARMLESS,
    not_finite,
    not_tied,
    open_folder,
    read_headers,
    same_values,
)
from slurmrl.models.parallel.linear import Linear
from slurmrl.tensors.checkpoint.manifest import is_pinned
from slurmrl.tensors.layout import Box, Index, TensorSpec

POSITIONS = re.compile(r"posit|\bwpe\b")
OTHER = re.compile(r"vision|visual|image|audio|relative")
"""Pattern of the position embeddings that do not limit the length of text."""
LABELS: Mapping[Head, dict[str, int]] = {"lm": {}, "value": {"num_labels": 1}}
"""Mapping from a head to config fields that it needs."""


def _stated(config: HFConfig) -> dict[str, Any]:
    """Return a config's fields for transformers. Decode special numbers, which files encode."""
    values = PreTrainedConfig._decode_special_floats(deepcopy(dict(config.values)))
    return {name: value for name, value in values.items() if name not in ("model_type", VISION)}


def tensor_specs(config: HFConfig, head: Head) -> tuple[dict[str, Index], dict[str, TensorSpec]]:
    """Return mappings from `HFModel` names to shapes of parameters and to specs of constants.

    No weights are made. Raises UsageError if transformers cannot build the model.
    """
    model = sketch(config, head)
    stored = model.state_dict().keys()
    shapes = {MODULE + name: tuple(each.shape) for name, each in model.named_parameters()}
    constants = {
        MODULE + name: TensorSpec(tuple(each.shape), str(each.dtype).removeprefix("torch."))
        for name, each in model.named_buffers()
        if name in stored
    }
    return shapes, constants


def require_trainable(values: Mapping[str, Any], head: Head) -> None:
    """Raise UsageError if the model of a ``config.json`` object cannot be trained."""
    config = HFConfig.from_hf(values)
    if reason := constants_refusal(config.model_type, tensor_specs(config, head)[1]):
        raise UsageError(reason)


def misfits(values: Mapping[str, Any], head: Head, source: Path) -> tuple[list[str], list[str]]:
    """Return the reason why a folder's files do not fill the model of a ``config.json`` object.

    Also return the tensors of the files that the model does not use.

    Read only the headers of files, and the tensors that the config ties. Pinned checkpoints and
    quantized folders are not checked.
    """
    if is_pinned(source) or values.get("quantization_config"):
        return [], []
    report: dict[str, Any] = {}
    try:
        model = sketch(HFConfig.from_hf(values), head)
        with suppress(ImportError, AttributeError, TypeError):  # Loaders differ between releases.
            report = _report(model, source)
        if report:
            _require_filled(model, report, source)
    except MemoryError:
        raise
    except UsageError as error:
        return [str(error)], []
    except Exception as error:  # noqa: BLE001 - transformers' loader may raise any exception
        return [f"transformers cannot load the weights: {type(error).__name__}: {error}"], []
    tensors = open_folder(source)
    known = tensors.specs().keys()
    ties = [(a, b) for a, b in model.all_tied_weights_keys.items() if a in known and b in known]
    wrong = [f"{source}: {not_tied(*tie)}" for tie in ties if not same_values(tensors, *tie)]
    unused = report.get("unexpected_keys", ())
    return wrong, sorted(name for name in unused if not name.endswith(HARMLESS))


def _report(model: Any, source: Path) -> dict[str, Any]:
    """Return transformers' report for a folder's tensors, loaded into a model without weights.

    The public loader maps whole files as writable memory, which the inspector's limit counts, and
    needs accelerate to load tensors without memory. Releases may change the private loader.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter
    from transformers.modeling_utils import LoadStateDictConfig

    conversions: Any = get_model_conversion_mapping(model)
    for each in conversions:
        if isinstance(each, WeightConverter):
            each.force_cpu = False
    load = LoadStateDictConfig(
        ignore_mismatched_sizes=True,
        device_map={"": torch.device("meta")},
        dtype=torch.float32,
        weight_mapping=conversions,
    )
    headers, _ = read_headers(source)
    state = {name: torch.empty(spec.shape, device="meta") for name, spec in headers.items()}
    report, _ = model._load_pretrained_model(model, state, None, load)
    found: dict[str, Any] = model._finalize_model_loading(model, load, report).to_dict()
    return found


def task_of(config: HFConfig, head: Head) -> Any:
    """Return transformers' auto class for models of a config with this head.

    For a family without a class for text only, and for a config with `VISION`, return the class
    that also reads images.
    """
    if head == "value":
        return AutoModelForSequenceClassification
    model_type = config.model_type
    text = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and VISION not in config.values
    both = not text and model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForImageTextToText if both else AutoModelForCausalLM


def sketch(config: HFConfig, head: Head) -> PreTrainedModel:
    """Return a model without weights. Raises UsageError if transformers cannot build the model."""
    try:
        with torch.device("meta"):
            return make_model(config, head, None, 0, torch.float32)
    except UsageError:
        raise
    except Exception as error:  # transformers' classes may raise any exception.
        reason = f"{type(error).__name__}: {error}"
        message = f"transformers cannot build a {config.model_type} model: {reason}"
        raise UsageError(message) from error


def make_model(
    config: HFConfig, head: Head, source: Path | None, seed: int, dtype: torch.dtype
) -> PreTrainedModel:
    try:
        if source is not None:
            with inputs.reading(source):
                model, fresh = _loaded(config, head, source, dtype)
            _require_finite(model, source)
        else:
            stated = {**_stated(config), **LABELS[head]}
            settings = _without_dropout(AutoConfig.for_model(config.model_type, **stated))
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)  # leaves the GPU's generators unseeded
                model = task_of(config, head).from_config(settings, dtype=dtype)
            fresh = True
    except UsageError:
        raise
    except (ValueError, KeyError, OSError) as error:
        reason = str(error).partition(" Should contain one of")[0]  # Omit the list of families.
        message = f"transformers cannot build a {config.model_type} model: {reason}"
        raise UsageError(message) from error
    if head == "value" and fresh and hasattr(model, "score"):
        nn.init.zeros_(model.score.weight)  # The values of a new critic start at zero.
    made: PreTrainedModel = model
    for module in made.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
    _limit_time_steps(made)
    experts = (p for name, p in made.named_parameters() if ".experts." in name and p.dim() == 3)
    if any(size % 8 for p in experts for size in p.shape[1:]):
        # Grouped products need rows of 16 bytes. gpt_oss's loop fails on shared experts.
        made.set_experts_implementation("batched_mm" if config.model_type == "gpt_oss" else "eager")
    return made


def _limit_time_steps(model: PreTrainedModel) -> None:
    """Apply the minimum time step of Mamba 2 layers in passes over one token, too.

    transformers applies the minimum only in longer passes, so sampled tokens would have other
    probabilities than in training. softplus is monotonic: max(softplus(x + bias), least) is
    softplus(max(x, softplus^-1(least) - bias) + bias).
    """

    def limited(layer: Any, _: nn.Module, __: Any, projected: Tensor) -> Tensor:
        if projected.shape[-2] > 1:
            return projected
        before, steps = projected.tensor_split([-layer.num_heads], dim=-1)
        least = math.log(math.expm1(layer.time_step_limit[0])) - layer.dt_bias
        return torch.cat([before, torch.maximum(steps, least.to(steps.dtype))], dim=-1)

    for layer in model.modules():
        if getattr(layer, "time_step_limit", (0,))[0] > 0 and not hasattr(layer, "mup_vector"):
            cast(nn.Module, layer.in_proj).register_forward_hook(partial(limited, layer))


def _loaded(config: HFConfig, head: Head, source: Path, dtype: torch.dtype) -> tuple[Any, bool]:
    """Return the model of a folder, and whether its files lack a value head.

    While a pinned checkpoint is loaded, its weights are in memory twice.

    Raises UsageError if transformers would initialize or untie parameters except this head.
    """
    task, settings = task_of(config, head), AutoConfig.from_pretrained(source, **LABELS[head])
    options = {"config": _without_dropout(settings), "dtype": dtype, "output_loading_info": True}
    options |= {"ignore_mismatched_sizes": True}  # The report lists mismatched sizes.
    if is_pinned(source):
        tensors = open_folder(source)
        state = {
            name: as_tensor(tensors.read(name, Box.whole(spec.shape)), spec.dtype)
            for name, spec in tensors.specs().items()
        }
        with torch.device("meta"):
            kind: Any = type(task.from_config(settings, dtype=dtype))
        model, report = kind.from_pretrained(None, state_dict=state, **options)
    else:
        model, report = task.from_pretrained(source, **options)
    _require_filled(model, report, source)
    return model, "score.weight" in report["missing_keys"]


def _require_filled(model: Any, report: Mapping[str, Any], source: Path) -> None:
    """Raise UsageError if, by transformers' report, a folder does not fill the model."""
    missing, tied = report["missing_keys"], model.get_expanded_tied_weights_keys(True)
    wrong = [f"the files lack {name}" for name in missing if not name.startswith("score.")]
    wrong += [f"{n} has shape {[*a]} instead of {[*b]}" for n, a, b in report["mismatched_keys"]]
    wrong += [not_tied(n, tied[n]) for n in tied.keys() - model.all_tied_weights_keys.keys()]
    wrong += [
        f"{name} is {spec.dtype}, but only weights that are not quantized are trained"
        for name, spec in open_folder(source).specs().items()
        if spec.dtype not in FLOATS and name not in report["unexpected_keys"]
        if name.endswith("weight") or spec.dtype.startswith(("F8", "I8"))
    ]
    if wrong:
        more = f", and {len(wrong) - 1} more problems" if len(wrong) > 1 else ""
        raise UsageError(f"{source} does not match its config.json: {min(wrong)}{more}")


def _require_finite(model: PreTrainedModel, source: Path) -> None:
    """Raise UsageError if a parameter has NaN or infinite values, or a stored constant has NaN.

    Constants of masks may be infinite. ``source`` is the model's folder.
    """
    parameters = dict(model.named_parameters())
    for name, values in model.state_dict().items():
        if is_finite(values) or (name not in parameters and not values.isnan().any()):
            continue
        known = open_folder(source).specs()
        # If files use another name or stack the parameter, check all tensors.
        names = [name] if name in known else sorted(known)
        raise UsageError(
            not_finite(source, names)
            or f"{source}: '{name}' has values that are too large for {values.dtype}; use another "
            "dtype"
        )


def reject_dropout(model: nn.Module) -> None:
    """Raise UsageError for dropout that the config does not control.

    (Recomputation does not restore random states.)
    """
    dropout = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    ]
    if dropout:
        raise UsageError(
            f"{type(model).__name__} has dropout that no field of its config turns off "
            f"({dropout[0]}), so old and new policies would be evaluated on different models"
        )


def count_positions(model: nn.Module) -> int | None:
    """Return the number of positions of the smallest position embedding; None if there is none.

    Rows that some families reserve at the start do not count: an ``offset``, or the rows up to the
    padding token.
    """
    tables = [
        table.num_embeddings - int(getattr(table, "offset", 0)) - _padding_rows(table)
        for name, table in model.named_modules()
        if isinstance(table, nn.Embedding) and POSITIONS.search(name) and not OTHER.search(name)
    ]
    return min(tables, default=None)


def _padding_rows(table: nn.Embedding) -> int:
    return 0 if table.padding_idx is None else table.padding_idx + 1


def _without_dropout(settings: Any) -> Any:
    """Disable all dropout, because old and new policies must be evaluated on the same model."""
    for name, value in settings.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(settings, name, 0.0)
    return settings


FACTOR = 2.0**10
"""Factor of the test logits. A power of two scales exactly; a large factor reveals caps."""


@torch.no_grad()
def only_multiplies(model: Any) -> bool:
    """Return whether logits are only the product of hidden states and the output layer's weight.

    Logits may have no bias, cap or scale. Configs do not state this, so try a few tokens. Return
    False if the pass fails. ``model`` is a ``PreTrainedModel`` on the CPU.
    """
    head, body = model.get_output_embeddings(), model.base_model
    if not isinstance(head, nn.Linear) or head.bias is not None or body is model:
        return False
    ids = torch.arange(min(4, head.out_features))[None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    head_inputs: list[Tensor] = []

    def amplify(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        head_inputs.append(inputs[0])
        return output * FACTOR

    handle = head.register_forward_hook(amplify)
    try:
        states, logits = body(**given).last_hidden_state, model(**given).logits
    except Exception:  # noqa: BLE001 - the model's code may need a GPU or other arguments
        return False
    finally:
        handle.remove()
    return (
        len(head_inputs) == 1
        and _equal(head_inputs[0], states)
        and _equal(logits, head(states) * FACTOR)
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether shapes and values are equal; dtypes may differ."""
    return one.shape == other.shape and bool((one == other).all())

"""What a server needs to load a model of transformers."""

from __future__ import annotations

from dataclasses import replace

from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_files import file_form


def complete(config: HFConfig) -> HFConfig:
    """Return a config for servers, which need the class and the size of the vocabulary.

    If transformers runs only the language model of a family, it is the config of the language
    model.

    Raises UsageError if transformers does not know the family, or computes tensors of its files.
    """
    form = file_form(config, "lm")
    more = {"vocab_size": form.vocab_size, "tie_word_embeddings": form.tied}
    values = {**form.values, **more}
    model_type = str(values["model_type"])
    return replace(config, model_type=model_type, values=values, embedding=form.embedding)

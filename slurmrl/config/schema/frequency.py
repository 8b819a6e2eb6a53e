"""Periodic actions: checkpoints, log lines."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator

from slurmrl.config.schema.base import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Word,
)


def _check_variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("must be the name of an environment variable, not the secret itself")
    return name


def _check_tracking_uri(uri: str) -> str:
    """The secret of a server must not stand in files that others may read."""
    parts = urlsplit(uri)
    if "@" in parts.netloc and parts.scheme in ("http", "https"):
        raise ValueError(
            "holds a user's name or password; set MLFLOW_TRACKING_USERNAME and"
            " MLFLOW_TRACKING_PASSWORD in cluster.variables_file instead"
        )
    known = ("http", "https", "file", "databricks", *DATABASES)
    if not uri.startswith("/") and parts.scheme.partition("+")[0] not in known:
        raise ValueError("must be a URL (https://…) or an absolute path")
    return uri


DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
VariableName = Annotated[Word, AfterValidator(_check_variable)]
ExportDtype = Literal["auto", "source", "float32", "bfloat16", "float16"]
ExportForm = Literal["merged", "adapter"]


class Checkpoint(Section):
    """When the run commits, and what it keeps. It always commits at its end."""

    every_steps: PositiveInt | None = 10
    """Steps between commits; null disables commits by steps."""
    every_seconds: PositiveFloat | None = None
    """Seconds between commits. The run commits at the end of a step."""
    every_epochs: PositiveInt | None = None
    """Epochs of the dataset between commits."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_every_steps: PositiveInt | None = None
    """Also keep, permanently, each checkpoint whose step is a multiple of this."""
    asynchronous: bool = True
    """Continue training while a checkpoint is written. Each rank first copies its weights and
    optimizer state to host memory, which needs as much memory again. A job waits for its last
    checkpoint."""
    export_at_end: bool = True
    """Export the trained actor in Hugging Face format when the run finishes after a step."""
    export_dtype: ExportDtype = "auto"
    """Data type of exported weights; `slurmrl export --dtype` overrides it. `source` gives each
    tensor its type in the folder `<role>.path`; for a new model, the `dtype` of its `architecture`,
    or float32. `auto` is `source` if at least 90 % of the training's update survives its rounding,
    else float32. Checkpoints are always in float32."""
    export_form: ExportForm = "merged"
    """What an actor with `lora` is exported as; `slurmrl export --form` overrides it. `merged` is a
    whole model, which transformers and `trial:` paths load; `adapter` is a folder for PEFT with the
    adapters alone, to be loaded onto the model of `actor.path`."""


class Wandb(Section):
    """Logging of metrics to Weights & Biases (requires the wandb package)."""

    project: Word
    """Name of the project."""
    mode: Literal["offline", "online"] = "offline"
    """`offline` writes files for a later `wandb sync`."""


class Mlflow(Section):
    """Logging of metrics to MLflow (requires the mlflow-skinny package, or mlflow)."""

    experiment: Word
    """Name of the experiment."""
    tracking_uri: Annotated[Word, AfterValidator(_check_tracking_uri)] | None = None
    """URL of a tracking server, as `https://mlflow.example.org`, or an absolute path of a folder.
    Default: the folder `mlflow/` in the run directory. A server's user, password or token are
    variables of `cluster.variables_file` (`MLFLOW_TRACKING_USERNAME`, …)."""

    @property
    def is_database(self) -> bool:
        """Whether the library itself must access a database."""
        scheme = (self.tracking_uri or "").partition(":")[0].partition("+")[0]
        return scheme in DATABASES


class Logging(Section):
    """Logs and outputs besides `metrics.jsonl`."""

    every_steps: PositiveInt | None = 1
    """Steps between progress lines in the log; `metrics.jsonl` has every step."""
    every_seconds: PositiveFloat | None = None
    """Seconds between progress lines. They are written at the end of a step."""
    every_epochs: PositiveInt | None = None
    """Epochs of the dataset between progress lines."""
    tensorboard: bool = False
    """Also write TensorBoard event files to `tensorboard/` of the run directory (requires the
    tensorboard package)."""
    wandb: Wandb | None = None
    """Also log metrics to Weights & Biases."""
    mlflow: Mlflow | None = None
    """Also log metrics to MLflow."""
    output_mib: PositiveInt = 64
    """Maximum size in MiB of the output in `logs/` of one host's processes over all attempts; the
    master has the same limit of its own. The newest output is kept. Sizes are checked every few
    seconds, so a file may exceed the limit for that long."""
    samples: NonNegativeInt = 4
    """Number of completions per step, and per evaluation, that each rank writes to `samples/`,
    rounded up to all completions of a prompt. With `sft`, of rows that it trains on, in the first
    10 steps and in every 100th."""
    sample_tokens: NonNegativeInt = 256
    """Number of tokens of each of them to write with their advantages, log-probabilities and weight
    versions, which `slurmrl report` shows; 0 writes none."""
    report: bool = True
    """Write `report.html`, as `slurmrl report` does, when the run has finished or failed."""


class Notify(Section):
    """Notices at the end of a trial."""

    webhook: VariableName | None = None
    """Name of the environment variable that holds the URL to which a JSON object is posted when the
    trial has finished or failed. The variable is one of `cluster.variables_file`; compute nodes
    must reach the URL."""

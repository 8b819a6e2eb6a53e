"""``slurmrl train-tokenizer``."""

from __future__ import annotations

from pathlib import Path

import click

from slurmrl.cli import completion
from slurmrl.cli.options import examples

VOCABULARY = 2048
LEAST = 258
"""One token for each byte, and the two special ones."""


@click.command(
    "train-tokenizer",
    epilog=examples(
        "slurmrl train-tokenizer train.jsonl --key prompt --key answer --output tokenizer",
        "slurmrl train-tokenizer a.jsonl b.parquet --key text --vocabulary 8192 --output tokenizer",
    ),
)
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE..."
)
@click.option(
    "--key",
    "keys",
    multiple=True,
    required=True,
    metavar="KEY",
    help="Key of the rows whose text is used. Repeatable.",
)
@click.option(
    "--vocabulary",
    type=click.IntRange(min=LEAST),
    default=VOCABULARY,
    show_default=True,
    metavar="N",
    help="Most tokens.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FOLDER",
    shell_complete=completion.folders,
    help="New folder for the tokenizer.",
)
def train_tokenizer(
    files: tuple[Path, ...], keys: tuple[str, ...], vocabulary: int, output: Path
) -> int:
    """Train a tokenizer on the texts of datasets: byte-level BPE, in Hugging Face form.

    For models that are trained from nothing (actor.architecture); a model with weights has one.
    """
    from slurmrl.data.tokenizer import make_tokenizer

    make_tokenizer(files, keys, vocabulary, output)
    click.echo(f"tokenizer of at most {vocabulary} tokens in {output}")
    return 0

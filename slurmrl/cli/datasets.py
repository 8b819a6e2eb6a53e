"""Commands about data before a trial: data, try-reward, train-tokenizer."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmrl.cli.options import common, complete_folders, examples, json_option, overrides_argument
from slurmrl.display.terminal import table

if TYPE_CHECKING:
    from slurmrl.desk.inspection import DataCounts, DataReport, DataSample, Tried


ROWS = 3
TITLES = ("source", "rows", "too long", "tokens", "trained on", "longest", "path")
MARKS = ("⟦", "⟧")
"""Marks around trained tokens in output without colors."""
REWARD_ROWS = 8
SHOWN_CHARACTERS = 40
VOCABULARY = 2048
LEAST = 258
"""Minimum vocabulary: one token for each byte, and two special tokens."""


@click.group()
def data() -> None:
    """Show and check the data of a configuration as the model sees it."""


@data.command(
    epilog=examples(
        "slurmrl data show sft.yaml",
        "slurmrl data show grpo.yaml --rows 1 dataset.chat_template=true",
    )
)
@click.argument("config", type=click.Path(path_type=Path))
@overrides_argument
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    default=ROWS,
    show_default=True,
    metavar="N",
    help="Number of rows of each source, from the first.",
)
@json_option
@common
def show(
    config: Path, overrides: tuple[str, ...], rows: int, as_json: bool, root: str | None
) -> int:
    """Print some samples of CONFIG as the model sees them, with all special tokens.

    Tokens that are trained on are green, or between ⟦ and ⟧ where there are no colors.
    """
    report = _report(config, overrides, root)
    for sample in report.samples(rows):
        if as_json:
            click.echo(json.dumps(asdict(sample)))
        else:
            _print(sample)
    report.finish()
    return 0


@data.command(epilog=examples("slurmrl data check sft.yaml", "slurmrl data check sft.yaml --json"))
@click.argument("config", type=click.Path(path_type=Path))
@overrides_argument
@json_option
@common
def check(config: Path, overrides: tuple[str, ...], as_json: bool, root: str | None) -> int:
    """Read and tokenize all data of CONFIG as its run does, and list the unusable lines.

    The exit code is 2 if a line is unusable.
    """
    report = _report(config, overrides, root)
    counts = list(report.counts())
    if as_json:
        for each in counts:
            click.echo(json.dumps(asdict(each)))
    elif counts:
        click.echo("\n".join(table([TITLES, *map(_row, counts)])))
        _warn(counts)
    report.finish()
    return 0


def _report(config: Path, overrides: tuple[str, ...], root: str | None) -> DataReport:
    from slurmrl.desk import trial_code, trials
    from slurmrl.desk.inspection import DataReport
    from slurmrl.desk.trial_checks import Code, described
    from slurmrl.plan.settings import load_settings

    settings = load_settings(
        config, overrides, root=trials.chosen_root(root), planning=True, data=True
    )
    found = trial_code.find_own_code(settings)
    code = Code(paths=found.paths)
    return DataReport(described(settings, code), code)


def _row(counts: DataCounts) -> tuple[str, ...]:
    numbers = (counts.rows, counts.left_out, counts.tokens, counts.targets, counts.longest)
    return (counts.source, *map(str, numbers), counts.path)


def _warn(counts: list[DataCounts]) -> None:
    for each in counts:
        if each.equal_pairs:
            what = "pairs have equal chosen and rejected answers, from which nothing is learned"
            click.echo(f"warning: {each.source}: {each.equal_pairs} {what}", err=True)
        for remark in each.remarks:
            click.echo(f"warning: {each.source}: {remark}", err=True)


def _print(sample: DataSample) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(f"{sample.where}  id {sample.id}", style="bold"))
    for runs in sample.sequences:
        text = Text()
        for run in runs:
            opening, closing = MARKS if run.target and console.color_system is None else ("", "")
            text.append(f"{opening}{run.text}{closing}", style="green" if run.target else "")
        targets = sum(run.tokens for run in runs if run.target)
        total = sum(run.tokens for run in runs)
        console.print(text)
        console.print(Text(f"{total} tokens, {targets} of them trained on", style="dim"))
    console.print()


@click.command(
    epilog=examples(
        "slurmrl try-reward grpo.yaml",
        r"slurmrl try-reward grpo.yaml --completion 'so it is \boxed{72}'",
        "slurmrl try-reward grpo.yaml --completions samples.jsonl --rows 100",
    )
)
@click.argument("config", type=click.Path(path_type=Path))
@overrides_argument
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of rows, from the first. Default: "
    f"{REWARD_ROWS}; 1 with --completion; all lines of a --completions file.",
)
@click.option(
    "--completion",
    "completions",
    multiple=True,
    metavar="TEXT",
    help="Score this completion. Repeatable. Default: score the answer of each row.",
)
@click.option(
    "--completions",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Score the completions of a JSONL file, such as 'slurmrl samples --json' prints. Each "
    "object has the keys completion and id; without id, the objects follow the order of the rows.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit.",
)
@json_option
@common
def try_reward(
    config: Path,
    overrides: tuple[str, ...],
    rows: int | None,
    completions: tuple[str, ...],
    file: Path | None,
    timeout: float,
    as_json: bool,
    root: str | None,
) -> int:
    """Score some completions with the reward of CONFIG and print scores and times.

    The reward runs in a separate process on this machine, without Slurm, models or a GPU.
    """
    from slurmrl.desk import inspection as trying
    from slurmrl.desk import trial_code
    from slurmrl.desk.inspection import Selection
    from slurmrl.desk.trials import chosen_root
    from slurmrl.plan.settings import load_settings

    if file is not None and completions:
        raise click.UsageError("--completion and --completions exclude each other")
    settings = load_settings(
        config, overrides, root=chosen_root(root), scheduler="local", planning=True, data=True
    )
    code = trial_code.find_own_code(settings)
    data = trying.RewardData(settings)
    default = None if file is not None else 1 if completions else REWARD_ROWS
    path = None if file is None else str(file.absolute())
    tried = trying.try_reward(data, Selection(rows or default, completions, path), code, timeout)
    click.echo(json.dumps(_object(tried)) if as_json else _text(tried, data.reward.title))
    return 0


def _object(tried: Tried) -> dict[str, object]:
    """Return the object that ``--json`` prints.

    The object is ``{"items": [{"line", "id", "completion", "answer", "score"}, …], "mean": …,
    "stats": …, "made_s": …, "scored_s": …}``.
    """
    return {**asdict(tried), "mean": _mean(tried)}


def _mean(tried: Tried) -> float | None:
    """Return the mean of the scores; None if no completion has a score."""
    scores = [item.score for item in tried.items if item.score is not None]
    return sum(scores) / len(scores) if scores else None


def _number(score: float | None, form: str) -> str:
    return "none" if score is None else format(score, form)


def _text(tried: Tried, name: str) -> str:
    rows = [
        (str(item.line), _number(item.score, "g"), _short(item.completion), _short(item.answer))
        for item in tried.items
    ]
    stats = "".join(f", {key} {value:.4g}" for key, value in tried.stats.items())
    return "\n".join(
        [
            *table([("LINE", "SCORE", "COMPLETION", "ANSWER"), *rows]),
            f"{name}: mean {_number(_mean(tried), '.4g')} of {len(rows)} completions{stats}",
            f"{tried.scored_s:.2f} s to score them, {tried.made_s:.2f} s to import the reward",
        ]
    )


def _short(text: str) -> str:
    """Return the string on one line; cut its beginning if it is long: the answer is at the end."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else f"…{line[-SHOWN_CHARACTERS:]}"


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
    help="Key of the rows whose text the tokenizer learns from. Repeatable.",
)
@click.option(
    "--vocabulary",
    type=click.IntRange(min=LEAST),
    default=VOCABULARY,
    show_default=True,
    metavar="N",
    help="Maximum size of the vocabulary, in tokens.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FOLDER",
    shell_complete=complete_folders,
    help="New folder for the tokenizer.",
)
def train_tokenizer(
    files: tuple[Path, ...], keys: tuple[str, ...], vocabulary: int, output: Path
) -> int:
    """Train a byte-level BPE tokenizer on datasets and write it in Hugging Face format.

    Use the tokenizer for models that are trained from scratch (actor.architecture). A pretrained
    model has a tokenizer already.
    """
    from slurmrl.data.tokenizer import make_tokenizer

    make_tokenizer(files, keys, vocabulary, output)
    click.echo(f"wrote a tokenizer of at most {vocabulary} tokens to {output}")
    return 0

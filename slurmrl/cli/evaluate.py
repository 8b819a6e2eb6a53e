"""``slurmrl eval``."""

from __future__ import annotations

from pathlib import Path

import click

from slurmrl.cli import completion
from slurmrl.cli.options import common, examples, submitting
from slurmrl.cli.start import carry_out_all


@click.command(
    "eval",
    epilog=examples(
        "slurmrl eval grpo.yaml --checkpoint grpo/1",
        "slurmrl eval grpo.yaml --checkpoint grpo/1@40 rollout.n=16 --detach",
    ),
)
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--checkpoint",
    required=True,
    metavar="TRIAL[@STEP]|PATH",
    shell_complete=completion.trials_or_files,
    help="The model: a checkpoint of a trial (default: its newest), the folder of a model, or "
    "hf://org/name.",
)
@click.option(
    "--suite",
    "suites",
    multiple=True,
    metavar="NAME",
    help="A suite of CONFIG's evaluation; may be repeated. Default: all of them.",
)
@submitting
@click.option("--new", is_flag=True, help="Start a new trial under the next free name.")
@common
def evaluate(
    config: Path,
    checkpoint: str,
    suites: tuple[str, ...],
    overrides: tuple[str, ...],
    scheduler: str | None,
    wait: bool | None,
    as_json: bool,
    dry_run: bool,
    no_check: bool,
    check_timeout: float,
    new: bool,
    root: str | None,
) -> int:
    """Evaluate a checkpoint of CONFIG's model in a trial of its own, also while that trains.

    CONFIG is the configuration that trains the model, whose `evaluation` section is used, on all
    rows of its dataset, or one of algorithm evaluate. Overrides are those of algorithm evaluate:
    rollout.n=16, dataset.path=FILE, trial=NAME. experiment=NAME is that of the training, if it was
    submitted with one.

    The trial is EXPERIMENT-eval/CHECKPOINT; of an evaluation with suites, each has a trial
    EXPERIMENT-eval/CHECKPOINT-SUITE. The same command again continues what was interrupted.
    """
    from slurmrl.desk.evaluating import choose_suites, evaluation_of, of_evaluation
    from slurmrl.desk.proposal import propose
    from slurmrl.desk.trials import chosen_root
    from slurmrl.errors import UsageError

    chosen = choose_suites(config, suites)
    if len(chosen) > 1 and any(override.startswith("trial=") for override in overrides):
        raise UsageError("trial=NAME is for one suite: each has a trial of its own; add --suite")
    proposals = [
        propose(
            *(config, of_evaluation(overrides)),
            root=root,
            scheduler=scheduler,
            new=new,
            derive=evaluation_of(checkpoint, chosen_root(root), suite),
        )
        for suite in chosen
    ]
    check_s = None if no_check else check_timeout
    return carry_out_all(proposals, check_s=check_s, dry_run=dry_run, wait=wait, as_json=as_json)

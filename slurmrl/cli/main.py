"""Entry point of ``slurmrl``. Commands import slow modules only when they need them."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import click

from slurmrl import __version__, env
from slurmrl.errors import ConfigError, EnvironmentFailure, SlurmrlError
from slurmrl.fsio.calls import set_private_umask
from slurmrl.registry import near, resolve

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

INTERRUPTED = 130
ENVIRONMENT = 3
BROKEN_PIPE = 141
"""Exit code after the reader has closed the pipe: 128 + SIGPIPE, as in shells."""


class Command(NamedTuple):
    reference: str
    help: str


COMMANDS = {
    "init": Command("slurmrl.cli.site:init", "Write a first configuration, or a site profile."),
    "examples": Command("slurmrl.cli.site:list_examples", "List or copy the examples."),
    "docs": Command("slurmrl.cli.explain:docs", "Show the documentation."),
    "submit": Command("slurmrl.cli.submit:submit", "Check a configuration and start its trial."),
    "eval": Command("slurmrl.cli.submit:evaluate", "Evaluate a checkpoint in a separate trial."),
    "bundle": Command(
        "slurmrl.cli.site:bundle", "Make one archive for a cluster without a network."
    ),
    "explain": Command(
        "slurmrl.cli.explain:explain", "Explain a key of the configuration, or list its sections."
    ),
    "plan": Command(
        "slurmrl.cli.planning:plan", "Show which ranks would run where, without submitting."
    ),
    "search": Command(
        "slurmrl.cli.searching:search", "Search for the layouts with which a step is fastest."
    ),
    "profile-cluster": Command(
        "slurmrl.cli.site:profile_cluster", "Measure the hardware for plan and search."
    ),
    "simulate": Command(
        "slurmrl.cli.simulating:simulate", "Simulate a whole trial: queue, failures and steps."
    ),
    "try-reward": Command(
        "slurmrl.cli.datasets:try_reward", "Score some completions with a configuration's reward."
    ),
    "data": Command(
        "slurmrl.cli.datasets:data", "Show and check a configuration's data as the model sees it."
    ),
    "status": Command("slurmrl.cli.trial_status:status", "Show the state of trials."),
    "plot": Command("slurmrl.cli.charts:plot", "Plot metrics of trials in the terminal."),
    "samples": Command("slurmrl.cli.logs:samples", "Print completions and their rewards."),
    "compare": Command(
        "slurmrl.cli.charts:compare", "Compare the settings and metrics of two trials."
    ),
    "report": Command(
        "slurmrl.cli.charts:report", "Write an HTML file about trials: curves, timeline, samples."
    ),
    "events": Command("slurmrl.cli.logs:events", "Print the events of a trial in order."),
    "checkpoints": Command(
        "slurmrl.cli.saved_models:checkpoints", "List and verify a trial's checkpoints."
    ),
    "weights": Command(
        "slurmrl.cli.saved_models:weights", "List and verify the weight versions of a trial."
    ),
    "export": Command(
        "slurmrl.cli.saved_models:export", "Export a checkpoint's model in Hugging Face format."
    ),
    "logs": Command("slurmrl.cli.logs:logs", "Print the output of a trial's processes."),
    "stacks": Command("slurmrl.cli.control:stacks", "Print the Python stacks of a running trial."),
    "stop": Command("slurmrl.cli.control:stop", "Stop a trial at the next step, with a commit."),
    "cancel": Command("slurmrl.cli.control:cancel", "Cancel a trial and its jobs at once."),
    "rm": Command("slurmrl.cli.control:rm", "Remove trials with all their files."),
    "resume": Command("slurmrl.cli.control:resume", "Continue a trial from its last commit."),
    "scale": Command("slurmrl.cli.control:scale", "Change how many rollout tasks of a trial run."),
    "doctor": Command("slurmrl.cli.site:doctor", "Check whether trials can run here."),
    "train-tokenizer": Command(
        "slurmrl.cli.datasets:train_tokenizer", "Train a tokenizer on datasets."
    ),
    "completion": Command(
        "slurmrl.cli.options:completion", "Print the completion script of your shell."
    ),
}

REMOVED = {
    "graph": "slurmrl plan CONFIG --graph shows the calls of a step",
    "names": "slurmrl status TRIAL shows the processes of a trial and their heartbeats",
}
"""Mapping from a command of earlier releases to its replacement."""
BEGINNING = """\b
Begin with:
  slurmrl init site          once on a cluster: partition, account, folder of runs
  slurmrl init grpo          a configuration with its data and reward
  slurmrl plan grpo.yaml     what would run where
  slurmrl explain KEY        meaning, default and unit of a configuration key
  slurmrl submit grpo.yaml   start it
  slurmrl status             state and progress

Exit codes: 0 success, 1 the run failed, 2 usage or configuration error, 3 environment error, 130
interrupted."""


class Invocation:
    """A call of the command line: its arguments and the options that all commands have."""

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self.arguments = arguments
        self.debug = False
        self.profile: str | None = None
        """Name of the profile that ``--profile`` selects; None without the option."""


class LazyGroup(click.Group):
    """Imports a command's module only when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        command: click.Command | None = resolve(entry.reference) if entry else None
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in REMOVED:
            raise click.UsageError(f"the command '{name}' was removed: {REMOVED[name]}", ctx)
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            raise click.UsageError(f"no command '{name}'; {near(name, list(COMMANDS))}", ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a command's name without importing the commands, unlike Click's method."""
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=entry.help)
            for name, entry in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=BEGINNING
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda ctx, parameter, asked: _print_version(ctx) if asked else None,
    help="Show the version and the commit, then exit.",
)
def cli() -> None:
    """RL post-training of language models as plain Slurm batch jobs."""


def _print_version(ctx: click.Context) -> None:
    """Print the version, with the commit of the checkout or of the build if it is known."""
    from slurmrl.desk import provenance

    commit = provenance.commit_of_package()
    click.echo(f"slurmrl {__version__}{f' (commit {commit})' if commit else ''}")
    ctx.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: this process's arguments) and return its exit code."""
    set_private_umask()  # Slurm creates the batch log with the umask of sbatch's caller
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The terminal's encoding may lack characters of a file.
        sys.stdout.reconfigure(errors="backslashreplace")
    invocation = Invocation(list(sys.argv[1:] if arguments is None else arguments))
    try:
        return _invoke(invocation)
    except click.ClickException as error:
        error = _advised(error)
        error.show()
        return _told(error.format_message(), error.exit_code, invocation)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output at exit, which would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except SlurmrlError as error:
        shown = (_of_directory() if _lacks_relative_file(error) else None) or error
        return _report(shown, shown.exit_code, invocation)
    except OSError as error:
        return _report(_of_directory() or error, ENVIRONMENT, invocation)


def _invoke(invocation: Invocation) -> int:
    """Call the command without ``cli.main``, which maps some errors to its own exit codes."""
    asked = env.COMPLETE.get()
    if asked:
        return _complete(asked)
    args = list(invocation.arguments)
    try:
        with cli.make_context("slurmrl", args, obj=invocation) as context:
            code = cli.invoke(context)
    except click.exceptions.Exit as done:  # --help and --version
        code = done.exit_code
    sys.stdout.flush()
    return code if isinstance(code, int) else 0


def _advised(error: click.ClickException) -> click.ClickException:
    """Return the error with advice if an unknown option may be a setting (``--rollout.n=4``)."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return error
    name, takes = error.option_name, [each.name for each in error.ctx.command.params]
    if "overrides" not in takes or (error.possibilities and "." not in name):
        return error
    advice = f"A setting is written without dashes: {name.lstrip('-')}=VALUE"
    return click.UsageError(f"No such option '{name}'. {advice}", error.ctx)


def _complete(asked: str) -> int:
    """Answer a shell that requests completions of a command line."""
    from click.shell_completion import shell_complete

    return shell_complete(cli, {"obj": Invocation()}, "slurmrl", env.COMPLETE.name, asked)


def _lacks_relative_file(error: BaseException | None) -> bool:
    """Return whether the cause of an error is a missing file with a relative path."""
    while error is not None and not isinstance(error, FileNotFoundError):
        error = error.__cause__
    return error is not None and not os.path.isabs(str(error.filename))


def _of_directory() -> SlurmrlError | None:
    """Return an error if the current directory was removed; None if it exists."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return EnvironmentFailure("the current directory was removed: cd to another directory")
    return None


def _report(error: Exception, code: int, invocation: Invocation) -> int:
    if invocation.debug:
        import traceback

        traceback.print_exception(error)
    else:
        click.echo(f"Error: {_message(error)}", err=True)
    return _told(_message(error), code, invocation)


def _told(message: str, code: int, invocation: Invocation) -> int:
    """Print an error as JSON to standard output with ``--json``; return the exit code."""
    if "--json" in invocation.arguments:
        import json

        click.echo(json.dumps({"error": message, "exit_code": code}))
    return code


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if not isinstance(error, ConfigError):
        return str(error)
    count = len(error.problems)
    head = f"{count} problem{'s' if count > 1 else ''} in the configuration"
    return head + "".join(f"\n  {problem}" for problem in error.problems)


if __name__ == "__main__":
    sys.exit(main())

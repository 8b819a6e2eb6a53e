"""``slurmrl try-reward``: real rewards in real child processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurmrl.cli.main import main
from slurmrl.desk import trial_code
from slurmrl.errors import ConfigError
from slurmrl.plan.settings import load_settings
from tests.support.trials import REPOSITORY, ppo_config

REWARD = """
from beside import POINTS


def judge(prompts, completions, rows, *, points=POINTS):
    print("judging", rows[0]["answer"])
    return [points * (completion == row["answer"]) for completion, row in zip(completions, rows)]


def one(prompts, completions, rows):
    return [1.0]


def raises(prompts, completions, rows):
    return [completions[0]["text"]]


def token(prompts, completions, rows):
    import os
    return [float(os.environ.get("TOKEN", 0)) + ("SECRET" in os.environ) for _ in completions]


def asks(prompts, completions, rows, *, token_ids, indices, siblings, sample_ids, step, evaluation):
    print(token_ids, indices, siblings, sample_ids, step, evaluation)
    return [float(len(tokens)) for tokens in token_ids]


def exits(prompts, completions, rows):
    raise SystemExit(0)


class Unready:
    def __init__(self):
        open("/nowhere/weights")


class Unlicensed:
    def __init__(self):
        raise SystemExit("no license")


def hangs(prompts, completions, rows):
    while True:
        pass
"""
ROWS = [{"prompt": f"{n} + {n} =", "answer": str(2 * n)} for n in range(12)]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a configuration with its data and reward in its folder, and use it from
    another folder.
    """
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "mine.py").write_text(REWARD)
    (tmp_path / "beside.py").write_text("POINTS = 2\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    values = ppo_config(
        dataset={"type": "prompt", "path": "rows.jsonl"},
        evaluation=None,
        reward={"name": "mine:judge"},
        root=str(tmp_path / "runs"),
    )
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(values))
    return path


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["try-reward", *arguments])
    captured = capfd.readouterr()
    return code, captured.out, captured.err


def tried(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = run(capfd, *arguments, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_reward_scores_the_answers_of_the_first_rows(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capfd, str(config), "reward.options.points=3")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == ["LINE", "SCORE", "COMPLETION", "ANSWER"]
    assert lines[8].split() == ["8", "3", "14", "14"]
    assert lines[9] == "mine:judge: mean 3 of 8 completions"
    assert "judging 0" in err, "what the reward prints is seen, and is no result"
    assert not (config.parent / "runs").exists()


def test_only_needed_rows_are_read(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A data file may have gigabytes. The invalid line after row 7 is an error only if
    it is read.
    """
    path = config.with_name("rows.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:7], "no JSON\n", *lines[7:]]))
    assert len(tried(capfd, str(config), "--rows", "7")["items"]) == 7
    samples = config.with_name("samples.jsonl")
    samples.write_text('{"id": "3@0", "completion": "4"}\n')
    assert tried(capfd, str(config), "--completions", str(samples))["items"][0]["line"] == 3
    code, _, err = run(capfd, str(config), "--rows", "8")
    assert (code, "rows.jsonl:8: not JSON" in err) == (2, True)


def test_reward_gets_its_requested_arguments(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The arguments equal the first step of a run.

    Completions of a row are siblings, even in a pool.
    """
    texts = ["--rows", "2", "--completion", "12", "--completion", "345"]
    for pool in ("null", "{processes: 1}"):
        changes = ["reward.name=mine:asks", f"reward.pool={pool}"]
        code, out, err = run(capfd, str(config), *changes, *texts, "--json")
        assert code == 0, err
        assert [item["score"] for item in json.loads(out)["items"]] == [3.0, 4.0, 3.0, 4.0]
        assert "[0, 1, 0, 1]" in err or "[1] [['12', '345']] ['2@0'] 1 False" in err, err


def test_completions_of_a_file_are_matched_with_their_rows(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ids of a run's completions also contain the epoch. A row may have several completions."""
    samples = config.with_name("samples.jsonl")
    lines = [{"id": "4@1", "completion": "6"}, {"id": "4@1", "completion": "7"}]
    samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = tried(capfd, str(config), "--completions", str(samples))
    assert [(one["line"], one["score"]) for one in found["items"]] == [(4, 2.0), (4, 0.0)]
    samples.write_text(json.dumps({"completion": "0"}) + "\n" + json.dumps({"id": 99}) + "\n")
    code, _, err = run(capfd, str(config), "--completions", str(samples))
    assert code == 2
    assert "samples.jsonl:2: completion: must be a string" in err


def test_completion_of_file_has_no_answer_if_truncated(
    config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    samples = tmp_path / "samples.jsonl"
    lines = [{"completion": "It is 0.", "finished": finished} for finished in (True, False)]
    samples.write_text("".join(json.dumps({"id": "1", **line}) + "\n" for line in lines))
    arguments = (str(config), "reward={name: math}", "--completions", str(samples))
    assert [item["score"] for item in tried(capfd, *arguments)["items"]] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("mine:one", 2, "reward mine:one returned 1 scores for 8 completions"),
        ("mine:jugde", 2, "mine has no 'jugde'; did you mean 'judge'"),
        ("mien:judge", 2, "there is no module 'mien'"),
        ("mine:raises", 1, "reward 'mine:raises' failed, see above"),
        ("mine:exits", 2, "the reward ends the process: SystemExit: 0 (mine.py:29)"),
        ("mine:Unready", 2, "'mine:Unready': FileNotFoundError: [Errno 2] No such file"),
        ("mine:Unlicensed", 2, "'mine:Unlicensed': SystemExit: no license (mine.py:39)"),
        ("mine:hangs", 1, "took longer than 1 s; raise the limit with --timeout"),
    ],
)
def test_try_reward_reports_a_problem_in_one_message(
    config: Path, capfd: pytest.CaptureFixture[str], name: str, code: int, message: str
) -> None:
    limit = ["--timeout", "1"] if name == "mine:hangs" else []
    found, out, err = run(capfd, str(config), f"reward.name={name}", *limit)
    assert (found, out) == (code, "")
    assert message in err
    assert ("Traceback" in err) == (name == "mine:raises")


def test_reward_runs_in_the_environment_of_a_run(
    config: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward must not use variables of the shell that jobs do not inherit."""
    monkeypatch.setenv("SECRET", "x")
    tokens = config.with_name("tokens")
    tokens.touch(mode=0o600)
    tokens.write_text("TOKEN=5\n")
    changes = ["reward.name=mine:token", f"cluster.variables_file={tokens}"]
    found = tried(capfd, str(config), *changes, "--rows", "1")
    assert found["mean"] == 5.0


def test_torch_is_not_imported(config: Path) -> None:
    program = (
        "import sys; from slurmrl.cli.main import main; "
        f"code = main(['try-reward', {str(config)!r}]); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


OWN_TYPE = """
import torch

from slurmrl.data.types.prompt import Prompts


class Sums(Prompts):
    def convert(self, row):
        return {"prompt": f"{row['a']} + {row['a']} =", "answer": str(2 * row["a"])}
"""


def test_reward_scores_rows_of_a_custom_dataset_type(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The child imports the module, which may import torch. Its errors name the row."""
    config.with_name("sums.py").write_text(OWN_TYPE)
    rows = config.with_name("rows.jsonl")
    rows.write_text("".join(json.dumps({"a": number}) + "\n" for number in range(3)))
    own = ("dataset.type=sums:Sums", "dataset.like=prompt")
    items = tried(capfd, str(config), *own, "--rows", "3")["items"]
    assert [(item["answer"], item["score"]) for item in items] == [("0", 2), ("2", 2), ("4", 2)]
    assert tried(capfd, str(config), *own, "--completion", "5")["mean"] == 0
    rows.write_text('{"b": 1}\n')
    code, _, err = run(capfd, str(config), *own)
    assert (code, "rows.jsonl:1: convert failed: KeyError: 'a'" in err) == (2, True)


def test_message_for_model_rewards_names_an_alternative(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reward = "{parts: {right: {name: exact_match}, rm: {name: model, weight: 0.5}}}"
    code, _, err = run(capfd, str(config), f"reward={reward}", "reward_model.path=elsewhere")
    assert (code, "needs the scores of reward_model, and try-reward loads no models" in err) == (
        2,
        True,
    )


OF_FOLDER = """
from pathlib import Path

{imports}

def judge(prompts, completions, rows):
    words = {words}
    return [float(completion in words) for completion in completions]
"""
BESIDE = "Path(__file__).{}parent.joinpath('words.txt').read_text().split()"


@pytest.mark.parametrize(
    ("module", "code", "why"),
    [
        ("own.py", {"words": BESIDE.format("resolve().")}, "No such file or directory"),
        (
            "own/score.py",
            {"words": BESIDE.format(""), "imports": "from helpers.words import WORDS"},
            None,
        ),
        ("queue.py", {"words": "['0']"}, "'queue' is not allowed: Python's standard library has"),
        ("json/own.py", {"words": "['0']"}, "'json.own' is not allowed: Python's standard library"),
        ("slurmrl.py", {"words": "['0']"}, "the package slurmrl itself has this name; rename the"),
        ("numpy.py", {"words": "['0']"}, "this file would hide the existing module numpy"),
    ],
)
def test_reward_runs_with_only_the_files_of_a_job(
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    module: str,
    code: dict[str, str],
    why: str | None,
) -> None:
    """The reward runs in an empty folder with a copy of the code: only files of folders that it
    imports.
    """
    monkeypatch.chdir(config.parent)
    path = config.parent / module
    path.parent.mkdir(exist_ok=True)
    path.write_text(OF_FOLDER.format(**{"imports": "", **code}))
    path.with_name("words.txt").write_text("0 1")
    (config.parent / "helpers").mkdir()
    (config.parent / "helpers" / "words.py").write_text("WORDS = ['0', '1']")
    name = module.removesuffix(".py").replace("/", ".")
    done = main(["try-reward", str(config), "--completion", "1", f"reward.name={name}:judge"])
    out, err = capfd.readouterr()
    assert (done != 0, why is not None and why in err) == (why is not None,) * 2, out + err
    assert why is not None or "mean 1 of 1" in out


@pytest.mark.parametrize("name", ["own.py:judge", "./own.py:judge", "judges/own.py:judge"])
def test_reward_is_named_by_its_file(config: Path, name: str) -> None:
    path = config.parent / name.partition(":")[0]
    path.parent.mkdir(exist_ok=True)
    path.write_text(OF_FOLDER.format(imports="", words="['1']"))
    values = json.loads(config.read_text())
    values["reward"] = {"parts": {"one": {"name": name, "options": {"name": "x.py:y"}}}}
    config.write_text(json.dumps(values))
    settings = load_settings(config, planning=True)
    reward = settings.config.reward
    assert reward is not None
    assert reward.parts["one"].name == "own:judge"
    assert reward.parts["one"].options == {"name": "x.py:y"}
    code = trial_code.find_own_code(settings)
    assert [found.resolve() for found in code.paths] == [path.resolve()]
    values["reward"]["parts"]["other"] = {"name": "elsewhere/own.py:judge"}
    config.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="there is no file"):
        load_settings(config, planning=True)
    (config.parent / "elsewhere" / "own.py").write_text("")
    with pytest.raises(ConfigError, match="another setting names a file with the same name"):
        load_settings(config, planning=True)


@pytest.mark.parametrize(
    ("episode", "keys"),
    [
        ({"name": "own.py:episode"}, {"name"}),
        (
            {
                "name": "multi_turn",
                "environment": {"name": "own.py:World"},
                "tools": {"look": {"name": "./own.py:look"}},
            },
            {"environment.name", "tools.look.name"},
        ),
    ],
)
def test_episode_is_named_by_its_file(
    config: Path, episode: dict[str, Any], keys: set[str]
) -> None:
    """The same holds for environments and tools."""
    (config.parent / "own.py").touch()
    values = json.loads(config.read_text())
    values["rollout"] = {**values.get("rollout", {}), "episode": episode}
    config.write_text(json.dumps(values))
    settings = load_settings(config, planning=True)
    own = settings.config.rollout.episode.own
    assert own.keys() == keys
    assert {name.partition(":")[0] for name in own.values()} == {"own"}


def test_parts_of_the_code_example_score_content_and_length(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A right program gets 1. A program of four lines gets 0.2, right or wrong."""
    config = REPOSITORY / "examples" / "code" / "grpo.yaml"
    bodies = {
        "return (x - 5) * 10": 1.2,
        "y = x - 5\n    return y * 10": 1.0,
        "return x - 5 * 10": 0.2,
        "y = x - 5\n    return y * 11": 0.0,
    }
    programs = [f"```python\ndef f(x):\n    {body}\n```" for body in bodies]
    given = [word for program in programs for word in ("--completion", program)]
    found = tried(capfd, str(config), *given)
    assert [item["score"] for item in found["items"]] == pytest.approx(list(bodies.values()))
    assert found["stats"] == {"reward_unjudged": 0, "reward/passes": 0.5, "reward/short": 0.5}

"""``slurmrl plot`` and ``slurmrl compare``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmrl.cli.main import main
from slurmrl.desk.report.page import chart
from slurmrl.desk.report.report_data import Curve, curves, smoothed
from slurmrl.run.samples import KeptSampleWriter
from tests.fake_runs import FakeRun


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for trial, slope in (("1", 1.0), ("2", -1.0)):
        run = FakeRun(tmp_path, trial=trial)
        run.paths.config.write_text(f"seed: {trial}\nalgorithm: {{name: grpo}}\n")
        run.metrics(
            *({"step": step, "reward": slope * step, "eval/kl": 0.5} for step in range(1, 11)),
            {"step": 11, "reward": float("nan"), f"own{trial}": 1},
        )
    return tmp_path


def test_each_metric_has_one_chart_with_all_trials(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", "add/1", "add/2", "reward", "e*/kl", "--root", str(root)]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    rewards, kls = text.split("\n\n")
    assert ("reward" in rewards, "eval/kl" in kls) == (True, True)
    lines = [line for line in rewards.splitlines() if "│" in line or "┤" in line]
    # they rise and fall from a common start: the first trial ends at the top, the second below
    assert lines[0].rstrip("│")[-1] != " "
    assert lines[-1].rstrip("│").endswith("x")
    assert {"add/1", "add/2"} <= set(text.split())


def test_wrong_metric_is_rejected_with_a_similar_name(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", "add/1", "rewrd", "--root", str(root)]) == 2
    error = capsys.readouterr().err
    assert "no metric 'rewrd'; did you mean 'reward'?" in error
    assert "eval/kl" in error


def test_default_metrics_are_the_metrics_of_the_progress_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = FakeRun(tmp_path, trial="1")
    low, high = {"eval/pass@8/low": 0.0}, {"eval/pass@8/high": 1.0}
    line = {"own": 1, "eval/sums/reward": 2, "eval/pass@8": 0.5, **low, **high}
    run.metrics(*({"step": step, "reward": 1, **line} for step in (1, 2)))
    assert main(["plot", "add/1", "--root", str(tmp_path)]) == 0
    titles = [chart.split(maxsplit=1)[0] for chart in capsys.readouterr().out.split("\n\n")]
    assert titles == ["reward", "eval/sums/reward", "eval/pass@8"]


def test_chart_has_the_given_size() -> None:
    curve = Curve(x=range(300), y=[float(x) for x in range(300)])
    text = chart("a\x1b[31mb", {"t": curve}, width=200, height=9, colored=False)
    lines = text.splitlines()
    assert (len(lines), max(map(len, lines))) == (9, 200)
    assert "\x1b" not in text


@pytest.mark.parametrize("size", [1e-9, 1e12, 1e300])
def test_chart_of_extreme_values_has_short_ticks(size: float) -> None:
    curve = Curve(x=[1, 2, 3], y=[0.0, size, -size])
    text = chart("a", {"t": curve}, width=60, height=8, colored=False)
    assert f" {size:.4g}┤" in text
    assert max(map(len, text.splitlines())) == 60


def test_curves_omit_numbers_whose_differences_overflow() -> None:
    lines = [{"step": step, "a": a} for step, a in enumerate((1e308, -1.7e308, 3.0))]
    assert curves(lines)["a"].y == [None, None, 3.0]


def test_smoothing_starts_at_the_first_value_and_keeps_gaps() -> None:
    assert smoothed([4.0, None, 4.0], 0.9) == [pytest.approx(4.0), None, pytest.approx(4.0)]
    assert smoothed([0.0, 3.0], 0.5) == [0.0, pytest.approx(2.0)]
    # a chart would stretch the smallest difference over its whole height
    assert smoothed([0.7] * 50, 0.9) == [0.7] * 50


def test_compare_shows_settings_and_metrics_of_two_trials(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "add/1", "add/2", "--root", str(root)]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == {"seed": [1, 2]}
    assert list(found["metrics"]) == ["reward", "eval/kl"]  # what both have
    second = found["metrics"]["reward"][1]
    assert second["last"] == second["least"] == {"step": 10, "value": -10.0}
    assert second["greatest"] == {"step": 1, "value": -1.0}
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "seed     1      2" in text
    assert "reward  10    10     -10    1 at 1, 10 at 10  -10 at 10, -1 at 1" in text
    assert "constant and equal in both trials: eval/kl" in text


def test_compare_takes_last_step_of_both_trials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for trial, steps in (("1", 4), ("2", 9)):
        run = FakeRun(tmp_path, trial=trial)
        lines = ({"step": s, "zeta": s, "loss": 1 / s, "time/step": s} for s in range(1, steps + 1))
        run.metrics(*lines, {"step": 50 + steps, f"own{trial}": 1, "apart": 1.0 + steps})
    assert main(["compare", "add/1", "add/2", "--root", str(tmp_path)]) == 0
    table = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert [line.split()[:4] for line in table[1:]] == [
        ["loss", "4", "0.25", "0.25"],
        ["apart", "-", "-", "-"],
        ["zeta", "4", "4", "4"],
        ["time/step", "4", "4", "4"],
    ]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1, 8, [2, 4, 6, 8]),
        (1, 3, [1, 2, 3]),
        (7, 7, [7]),
        (0, 100_000, [0, 20_000, 40_000, 60_000, 80_000, 100_000]),
        (999, 1001, [999, 1000, 1001]),
    ],
)
def test_step_ticks_are_whole_numbers(low: int, high: int, ticks: list[int]) -> None:
    curve = Curve(x=[low, high], y=[0.0, 1.0])
    text = chart("loss", {"t": curve}, width=80, height=9, colored=False)
    assert [int(word) for word in text.splitlines()[-1].split()] == ticks


def test_compare_shows_a_section_missing_in_one_trial_on_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = "{dataset: {type: prompt, path: /held}, n: 4, greedy: false, samples: 512}"
    for trial, evaluation in (("1", "null"), ("2", held_out)):
        FakeRun(tmp_path, trial=trial).paths.config.write_text(f"evaluation: {evaluation}\n")
    assert main(["compare", "add/1", "add/2", "--root", str(tmp_path)]) == 0
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()[:3]]
    assert lines == [
        ["SETTING", "add/1", "add/2"],
        ["evaluation", "absent", "dataset.type: prompt, dataset.path: /held, n: 4"],
        [],
    ]


def sample(index: int, reward: float, completion: str, **more: object) -> dict[str, object]:
    return {"id": "q@0", "index": index, "prompt": "1+1=", "completion": completion, **more} | {
        "reward": reward
    }


def test_samples_are_printed_by_prompt_with_rewards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = FakeRun(tmp_path)
    writer = KeptSampleWriter(run.paths.samples, 1, 1)
    for step in (2, 5):
        rows = [
            sample(0, 1.0, "2", answer="2", rendered="<user>1+1=", parts={"short": 0.5}),
            sample(1, 0.0, "\x1b[2J" + "\n".join("abcdefghijklmn"), finished=False),
            sample(2, 0.0, "-") | {"reward": None},
            sample(0, 0.25, "x" * 9000 + f"other {step}") | {"id": "r@0"},
        ]
        text = "".join(json.dumps({"step": step, **row}) + "\n" for row in rows)
        writer.write(step, text.encode(), evaluation=False)
    words = ["samples", "add/1", "--root", str(tmp_path)]
    assert main([*words, "-n", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "step 5  q@0  answer: 2  mean reward 0.5",
        "  | <user>1+1=",
        "  reward 1, short 0.5",
        "    | 2",
        "  reward 0, cut off",
    ]
    assert lines[-5:] == [
        "    … 2 more lines; --whole prints them",
        "  reward none",
        "    | -",
        "",
        "1 more prompt; -n 2 for all",
    ]
    assert all(line.isprintable() for line in lines)
    assert main([*words, "--step", "2", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[-1]["completion"] == "x" * 9000 + "other 2"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--step", "3"], "step 3 has no samples of training; the nearest: 2 and 5"),
        (["--step", "9"], "step 9 has no samples of training; the nearest: 5"),
        (["--evaluation"], "no samples of evaluation yet (logging.samples)"),
    ],
)
def test_samples_of_a_missing_step_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    run = FakeRun(tmp_path)
    for step in (2, 5):
        (run.paths.samples / f"step-{step:08d}.jsonl").write_text("")
    assert main(["samples", "add/1", "--root", str(tmp_path), *more]) == 2
    assert message in capsys.readouterr().err

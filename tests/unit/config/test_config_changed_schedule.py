from __future__ import annotations

from pathlib import Path

import pytest

from slurmrl.config.changes import differences, moved_schedules
from slurmrl.config.load import load, parse
from slurmrl.config.schema import Config
from tests.fake_runs import write_config

LINEAR = "actor.optimizer={lr: 0.001, schedule: linear, warmup_steps: 4}"


def config(folder: Path, *overrides: str) -> Config:
    return parse(load(write_config(folder), overrides))


def told(before: Config, now: Config, step: int = 5, untrained_steps: int = 0) -> list[str]:
    trained = {"actor": untrained_steps}
    return moved_schedules(before, now, trained=trained, step=step, optimizer_steps=2)


def test_a_longer_run_reports_its_new_learning_rates(tmp_path: Path) -> None:
    before = config(tmp_path, LINEAR, "total_steps=10")
    now = config(tmp_path, LINEAR, "total_steps=20")
    assert differences(before, now) == []
    [line] = told(before, now)
    assert line == (
        "actor: the linear schedule of its learning rate ends after 40 optimizer steps, not 20: "
        "after step 5 the rate continues from 0.000829, not 0.0006; "
        "set actor.optimizer.schedule_steps=20 to keep it"
    )
    assert "from 0.000543, not 0;" in told(before, now, step=10)[0]


def test_schedule_begins_with_the_first_step_that_trains_its_model(tmp_path: Path) -> None:
    """Three additional steps at the start change neither learning rates nor the message about
    updates.
    """
    before, now = (config(tmp_path, LINEAR, f"total_steps={steps}") for steps in (10, 20))
    later = [config(tmp_path, LINEAR, f"total_steps={steps}") for steps in (13, 23)]
    [line], [moved] = told(before, now), told(*later, step=8, untrained_steps=3)
    assert moved == line.replace("after step 5", "after step 8")


def test_schedule_steps_keeps_the_learning_rates_of_a_longer_run(tmp_path: Path) -> None:
    before = config(tmp_path, LINEAR, "total_steps=10")
    now = config(tmp_path, LINEAR, "total_steps=20", "actor.optimizer.schedule_steps=20")
    assert differences(before, now) == []
    assert told(before, now) == []
    for step in range(10, 20):
        rates = [one.actor.optimizer.learning_rate(step, 20) for one in (before, now)]
        assert rates[0] == rates[1]


@pytest.mark.parametrize("total", [10, 20])
def test_unchanged_learning_rates_get_no_note(tmp_path: Path, total: int) -> None:
    constant = "actor.optimizer={lr: 0.001}"
    before, now = (config(tmp_path, constant, f"total_steps={n}") for n in (10, total))
    assert told(before, now) == []
    assert told(config(tmp_path, LINEAR), config(tmp_path, LINEAR)) == []

"""Values of settings: conditions, templates and time limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from slurmrl.config.schema.cluster import Cluster, Slurm
from slurmrl.config.schema.config import Frequency, StopWhen
from slurmrl.config.schema.data import Template
from slurmrl.errors import UsageError


def test_condition_compares_the_metric_of_the_step() -> None:
    reached = StopWhen.parse("eval/reward >= 0.4")
    assert reached.met({"eval/reward": 0.4})
    assert not reached.met({"eval/reward": 0.399})
    assert not reached.met({"reward": 1.0})
    assert not reached.met({"eval/reward": None})
    fallen = StopWhen.parse(" loss<=1e-1 ")
    assert fallen.met({"loss": 0.1})
    assert not fallen.met({"loss": 0.2})


@pytest.mark.parametrize(
    "text", ["", "loss", "loss < 1", "loss == 1", "loss >= nan", "loss >= 1 2", ">= 1", "1 >= loss"]
)
def test_invalid_condition_is_rejected_with_the_rule(text: str) -> None:
    with pytest.raises(UsageError, match="METRIC >= NUMBER"):
        StopWhen.parse(text)


def test_checkpoint_frequency_without_settings_is_never_due() -> None:
    frequency = Frequency()
    assert not any(frequency.check(step, step, float(step)) for step in range(100))


@given(every=st.integers(1, 7), steps=st.integers(0, 50))
def test_step_frequency_is_due_at_its_multiples(every: int, steps: int) -> None:
    frequency = Frequency(every_steps=every)
    due = [step for step in range(1, steps + 1) if frequency.check(step, 0, 0.0)]
    assert due == [step for step in range(1, steps + 1) if step % every == 0]


def test_first_elapsed_interval_is_due_and_restarts_all_intervals() -> None:
    frequency = Frequency(every_steps=10, every_seconds=5.0, every_epochs=1, now_s=100.0)
    assert not frequency.check(1, 0, 104.0)
    assert frequency.check(2, 0, 105.0)
    assert not frequency.check(11, 0, 109.0)
    assert frequency.check(12, 0, 109.5)
    assert frequency.check(13, 1, 110.0)
    assert not frequency.check(14, 1, 110.5)


def test_restored_frequency_is_due_at_the_same_steps() -> None:
    first = Frequency(every_steps=4)
    assert [step for step in range(1, 7) if first.check(step, 0, 0.0)] == [4]
    second = Frequency(every_steps=4)
    second.restore(first.state())
    assert [step for step in range(7, 14) if second.check(step, 0, 0.0)] == [8, 12]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("Q: {prompt} ({a hint})", "Q: 1+1? (small {prompt})"),
        (r"\boxed{{}} {prompt}", r"\boxed{} 1+1?"),
        ("{{{prompt}}}", "{1+1?}"),
        ("{{prompt}} {prompt}{prompt}", "{prompt} 1+1?1+1?"),
    ],
)
def test_template_fields_are_filled_and_doubled_braces_become_braces(
    template: str, text: str
) -> None:
    values = {"prompt": "1+1?", "a hint": "small {prompt}"}
    assert Template.parse(template).fill(values) == text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a {prompt", "at character 3 .* is not closed"),
        ("{ {prompt}", "at character 1 .* is not closed"),
        ("{prompt}} {x", "at character 9 .* was not opened|is not closed"),
        ("{prompt}}", "at character 9 .* was not opened"),
        (r"\boxed{} {prompt}", "at character 7 .* enclose no key; write {{ and }}"),
        ("prompt", "no {key}"),
        ("{{prompt}}", "no {key}"),
    ],
)
def test_template_with_unmatched_braces_is_rejected(template: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Template.parse(template)


@given(st.text())
def test_any_string_can_be_written_in_a_template(text: str) -> None:
    doubled = text.replace("{", "{{").replace("}", "}}")
    assert Template.parse(f"{doubled}{{x}}").fill({"x": text}) == text + text


FORMS = {
    "90": 5400,
    "2:30": 150,
    "1:02:03": 3723,
    "1-2": 93600,
    "1-2:3": 93780,
    "2-00:00:01": 172801,
}


@pytest.mark.parametrize(("text", "seconds"), FORMS.items())
def test_warning_lead_must_be_shorter_than_the_time_limit(text: str, seconds: int) -> None:
    assert Slurm(time=text, signal_lead_s=seconds - 1).time == text
    with pytest.raises(ValidationError, match="must be shorter than time"):
        Slurm(time=text, signal_lead_s=seconds)


def test_any_warning_lead_is_allowed_without_a_time_limit() -> None:
    for text in ("UNLIMITED", "0", "00:00:00"):
        assert Slurm(time=text, signal_lead_s=10**6).time == text


@pytest.mark.parametrize(
    "text", ["99999999999", "71582789", "4294967296", "10001-0", "１０", "1-２", "0-240001:00"]
)
def test_limit_that_slurm_would_misread_is_rejected(text: str) -> None:
    """Slurm reads 71582789 minutes, which 32 bits do not hold in seconds, as one minute."""
    with pytest.raises(ValidationError, match="must be"):
        Slurm(time=text)
    assert Slurm(time="10000-0").time == "10000-0"


@pytest.mark.parametrize("text", ["1０G", "１G", "1G\\n"])
def test_memory_has_only_digits_that_slurm_reads(text: str) -> None:
    with pytest.raises(ValidationError):
        Cluster(mem_per_worker=text)

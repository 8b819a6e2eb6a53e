"""Templates of datasets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmrl.config.schema.data import Template
from slurmrl.errors import UsageError


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

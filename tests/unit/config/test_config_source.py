from __future__ import annotations

from pathlib import Path

import pytest

from slurmrl.config.load import load
from slurmrl.config.source import Source, read
from slurmrl.errors import ConfigError, UnreadableInputError


def source_of(tmp_path: Path, text: str) -> Source:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    return read(path)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1:00:00", "1:00:00"),
        ("3e-4", 3e-4),
        ("1e3", 1000.0),
        ("no", "no"),
        ("true", True),
        ("~", None),
        ("", None),
        ("010", 10),
        ("0o10", 8),
        ("2024-01-02", "2024-01-02"),
        ("'3'", "3"),
        ("[1, {a: no}]", [1, {"a": "no"}]),
        ("|\n  two\n  lines", "two\nlines\n"),
    ],
)
def test_values_follow_yaml_1_2(tmp_path: Path, written: str, value: object) -> None:
    read_value = source_of(tmp_path, f"key: {written}\n").values["key"]
    assert read_value == value
    assert type(read_value) is type(value)


def test_each_key_has_its_line_number(tmp_path: Path) -> None:
    source = source_of(tmp_path, "a:\n  b: 1\n\n  c:\n    - x\n    - y\n")
    file = tmp_path / "a.yaml"
    assert source.where(("a",)) == f"{file}:1"
    assert source.where(("a", "b")) == f"{file}:2"
    assert source.where(("a", "c", 1)) == f"{file}:6"
    assert source.where(("a", "absent", "deeper")) == f"{file}:1"
    assert source.where(("absent",)) == str(file)


def test_duplicate_keys_are_problems_with_both_lines(tmp_path: Path) -> None:
    source = source_of(tmp_path, "a: 1\nb: {c: 1, c: 2}\na: 3\n")
    file = tmp_path / "a.yaml"
    assert [(p.where, p.key) for p in source.problems] == [(f"{file}:2", "b.c"), (f"{file}:3", "a")]
    assert f"first at {file}:1" in source.problems[1].message
    assert source.values["a"] == 1


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("a: [1\nb: 2\n", ":2", "not valid YAML"),
        ("", "", "the file is empty"),
        ("# only a comment\n", "", "the file is empty"),
        ("- 1\n", ":1", "expected lines of key: value"),
        ("a: 1\n---\nb: 1\n", ":2", "not valid YAML"),
        ("a: 1\n\tb: 2\n", ":2", "token; indent with spaces, not tabs"),
        (
            "a: b: c\n",
            ":1",
            "not allowed here; align the line, or quote a value that contains ': '",
        ),
        ("a: b\n  c: d\n", ":2", "not allowed here; align the line, or quote a value"),
        ('{"prompt": "a"}\n{"prompt": "b"}\n', ":2", "; a configuration has lines of key: value"),
    ],
)
def test_non_mapping_value_is_rejected_with_its_line(
    tmp_path: Path, text: str, where: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        source_of(tmp_path, text)
    [problem] = caught.value.problems
    assert problem.where == f"{tmp_path / 'a.yaml'}{where}"
    assert message in problem.message


def test_bundle_given_as_configuration_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    with pytest.raises(UnreadableInputError, match="No such file"):
        read(file)
    file.write_bytes(bytes(1024))
    with pytest.raises(ConfigError, match="bundles are for slurmrl submit"):
        read(file)


@pytest.mark.parametrize(
    "text", ["a: !!python/name:os.system x", "a: !!binary aGk=", "a: !mine 3", "? [x]\n: 1"]
)
def test_yaml_tags_beyond_plain_values_are_problems(tmp_path: Path, text: str) -> None:
    source = source_of(tmp_path, text)
    assert len(source.problems) == 1
    assert source.values in ({"a": None}, {})


def test_recursive_alias_is_a_problem(tmp_path: Path) -> None:
    source = source_of(tmp_path, "a: &x\n  b: *x\n")
    assert ["alias" in problem.message for problem in source.problems] == [True]


def test_yaml_alias_copies_its_value(tmp_path: Path) -> None:
    source = source_of(tmp_path, "a: &x {k: 1}\nb: *x\n")
    assert source.values == {"a": {"k": 1}, "b": {"k": 1}}
    assert not source.problems


@pytest.mark.parametrize("bracket", ["[", "{"])
def test_unclosed_brackets_are_rejected_before_composition(tmp_path: Path, bracket: str) -> None:
    file = tmp_path / "deep.yaml"
    file.write_text(f"a: {bracket * 2000}")
    with pytest.raises(ConfigError, match=r"deep\.yaml:1: .*nested more than 32 levels deep"):
        read(file)


def test_alias_bomb_is_rejected_at_once(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"bomb.yaml:\d+: .*more than 20000 values"):
        load(tmp_path / "bomb.yaml")


def test_similar_file_is_named_only_for_a_missing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("sft.yaml", "sft2.yaml"):
        (tmp_path / name).touch()
    monkeypatch.setattr("slurmrl.config.source.opened", reject)
    with pytest.raises(UnreadableInputError, match=r"cannot be read: Permission denied$"):
        load(tmp_path / "sft.yaml")


def test_missing_or_binary_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInputError, match=r"absent.yaml: cannot be read: No such file"):
        load(tmp_path / "absent.yaml")
    (tmp_path / "sft.yaml").touch()
    with pytest.raises(UnreadableInputError, match=r"directory; did you mean .*/sft\.yaml\?"):
        load(tmp_path / "sft.yml")
    with pytest.raises(ConfigError, match="is a directory, not a regular file"):
        load(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "b.yaml")

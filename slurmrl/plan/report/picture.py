"""The picture of a plan: hosts and their GPUs, with the models' ranks on each, as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from slurmrl.graph import svg
from slurmrl.plan.report.document import cell

LINE: Final = 20
LEFT: Final = 16
HOST_WIDTH: Final = 84
LETTER: Final = 7.4
MOST_HOSTS: Final = 32
"""Of more hosts of a group, the first ones and the last are drawn."""


def picture(report: Mapping[str, Any]) -> str:
    """SVG of a report."""
    colours = dict(zip(report["models"], _endless(svg.COLOURS), strict=False))
    parts = [svg.text(LEFT, 28, f"{report['experiment']}/{report['trial']}", "head")]
    y, width = 44.0, 320.0
    for name, model in report["models"].items():
        parts.append(svg.box(LEFT, y, 12, 12, colours[name]))
        words = f"{name}  {model['backend']}"
        parts.append(svg.text(LEFT + 20, y + 11, words))
        width = max(width, LEFT * 2 + 20 + LETTER * len(words))
        y += LINE
    for group in report["groups"]:
        drawn, group_width, y = _group(report, group, colours, y + 12)
        parts += drawn
        width = max(width, group_width)
    return svg.document(width, y + 12, f"Plan of {report['experiment']}/{report['trial']}", parts)


def _endless(colours: tuple[str, ...]) -> Iterator[str]:
    while True:
        yield from colours


def _group(
    report: Mapping[str, Any], group: Mapping[str, Any], colours: Mapping[str, str], y: float
) -> tuple[list[str], float, float]:
    """What is drawn, how wide it is, and where it ends."""
    word = "task" if group["elastic"] else "host"
    head = f"{group['name']}: {group['hosts']} {word}s of {group['workers_per_host']} workers"
    parts = [svg.text(LEFT, y + 12, head, "head")]
    y += LINE + 4
    cells = _cells(report, group["name"])
    longest = max((len(words) for on in cells.values() for _, words in on), default=3)
    column = max(56.0, LETTER * longest + 16)
    lines = max((len(on) for on in cells.values()), default=1)
    height = lines * LINE + 20
    for host in _shown(group["hosts"]):
        if host is None:
            parts.append(svg.text(LEFT, y + 12, f"… {group['hosts'] - MOST_HOSTS} alike", "soft"))
            y += LINE
            continue
        parts.append(svg.text(LEFT, y + height / 2, f"{word} {host}", "soft"))
        for gpu in range(group["workers_per_host"]):
            x = LEFT + HOST_WIDTH + gpu * (column + 8)
            parts += _gpu(cells.get((host, gpu), []), gpu, x, y, column, height, colours)
        y += height + 8
    return parts, LEFT * 2 + HOST_WIDTH + group["workers_per_host"] * (column + 8), y


def _cells(report: Mapping[str, Any], group: str) -> dict[tuple[int, int], list[tuple[str, str]]]:
    """By host and GPU, the models there with their places on the axes."""
    found: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for name, model in report["models"].items():
        if model["group"] == group:
            for row in model["ranks"]:
                words = cell(row, model["sizes"])
                found.setdefault((row["host"], row["gpu"]), []).append((name, words))
    return found


def _shown(hosts: int) -> list[int | None]:
    if hosts <= MOST_HOSTS:
        return list(range(hosts))
    return [*range(MOST_HOSTS - 1), None, hosts - 1]


def _gpu(
    on: list[tuple[str, str]],
    gpu: int,
    x: float,
    y: float,
    width: float,
    height: float,
    colours: Mapping[str, str],
) -> Iterator[str]:
    yield svg.frame(x, y, width, height)
    yield svg.text(x + 6, y + 13, f"{gpu}", "soft")
    for index, (name, words) in enumerate(on):
        top = y + 17 + index * LINE
        yield svg.box(x + 4, top, width - 8, LINE - 3, colours[name])
        yield svg.text(x + 8, top + 13, words)

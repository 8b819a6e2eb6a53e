"""Learning curves of the examples: stored metrics, and pictures of them for the pages.

``docs/pictures/curves/NAME.json`` holds some metrics of one real trial of an example. `keep` writes
it from the trial's directory, and `pictures` draws it.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

SOURCES = Path(__file__).resolve().parents[1]
COLORS = ("#4477aa", "#ee6677", "#228833", "#aa8800")
WIDTH = 400
LEFT, RIGHT, TOP, HEIGHT, BOTTOM = 46, 388, 46, 112, 30
PANEL = TOP + HEIGHT + BOTTOM
TICKS = 4
DIGITS = 5
"""Significant digits of a stored value."""
STYLE = """\
text { font: 12px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1b1f24; }
.b { font-weight: bold; }
.s { font-size: 11px; fill: #4b535c; }
.m { text-anchor: middle; }
.e { text-anchor: end; }
.axis { stroke: #d0d7de; fill: none; }
.ground { fill: #ffffff; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .s { fill: #a9b3bd; }
  .axis { stroke: #3a424b; }
  .ground { fill: #0d1117; }
}"""


@dataclass(frozen=True)
class Example:
    """A trial whose curves are shown."""

    trial: str
    panels: tuple[tuple[str, ...], ...]
    """The metrics of each panel, one below the other."""


EXAMPLES = {
    "sft": Example("addition-sft/1", (("eval/reward",), ("loss",))),
    "grpo": Example("addition-grpo/1", (("eval/reward", "reward"), ("kl", "entropy"))),
    "ppo": Example("addition-ppo/1", (("eval/reward", "reward"), ("kl", "explained_variance"))),
    "sums_lora": Example("sums-lora/1", (("eval/reward", "reward"), ("entropy",))),
    "dpo": Example("addition-dpo/1", (("eval/reward", "rewards/accuracies"), ("loss",))),
    "kto": Example("addition-kto/1", (("eval/reward", "rewards/accuracies"), ("loss",))),
    "distill": Example("addition-distill/1", (("eval/reward",), ("reverse_kl",))),
    "lora": Example("addition-lora/1", (("eval/reward", "reward"), ("kl", "entropy"))),
    "grpo_async": Example(
        "addition-grpo-async/1", (("mismatch/kl",), ("mismatch/effective_sample_size",))
    ),
    "reward_model": Example("addition-reward-model/1", (("eval/accuracy", "accuracy"), ("loss",))),
}
COMPARED = ("ppo", "grpo", "dpo")
"""Examples whose scores one picture compares."""
SCORE = "eval/reward"
Curve = list[tuple[int, float]]


def keep(runs: Path, folder: Path) -> list[Path]:
    """Write the metrics of the examples that have completed trials under the root ``runs``.

    The other examples keep their files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "slurmrl", "status", "--json", "--root", str(runs.absolute())]
    shown = subprocess.run(command, cwd=SOURCES, check=True, capture_output=True, text=True)
    states = {status["trial"]: status for status in json.loads(shown.stdout)}
    written = []
    for name, example in EXAMPLES.items():
        status = states.get(example.trial)
        if status is not None and status["state"] == "COMPLETED":
            lines = (Path(status["run"]) / "metrics.jsonl").read_text(encoding="utf-8")
            data = {**asdict(example), "metrics": _curves(lines.splitlines(), _wanted(example))}
            file = folder / f"{name}.json"
            file.write_text(_compact(data), encoding="utf-8")
            written.append(file)
    return written


def pictures(folder: Path) -> dict[str, str]:
    """Return the picture of each file of metrics in ``folder``, by the name of the picture.

    ``compared.svg`` shows the held-out score of several examples.
    """
    files = sorted(folder.glob("*.json"))
    kept = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}
    drawn = {
        f"{name}.svg": picture(
            f"Learning curves of {data['trial']}", data["panels"], data["metrics"]
        )
        for name, data in kept.items()
    }
    scores = {name: kept[name]["metrics"][SCORE] for name in COMPARED}
    return {**drawn, "compared.svg": picture(f"{SCORE} of three examples", [COMPARED], scores)}


def picture(title: str, panels: Sequence[Sequence[str]], curves: Mapping[str, Curve]) -> str:
    """Return curves as SVG: one panel below the other, with the step as x."""
    last = max(step for curve in curves.values() for step, _ in curve)
    first = min(curve[0][0] for curve in curves.values())
    height = PANEL * len(panels)
    said = ", ".join(
        f"{name} {curves[name][0][1]:.3g} to {curves[name][-1][1]:.3g}"
        for panel in panels
        for name in panel
    )
    body = "\n".join(
        element
        for place, panel in enumerate(panels)
        for element in _panel(panel, curves, last, PANEL * place)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="520" height="{height * 13 // 10}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img">\n'
        f"<title>{escape(title)}</title>\n"
        f"<desc>From step {first} to {last}: {escape(said)}.</desc>\n"
        f'<style>\n{STYLE}\n</style>\n<rect class="ground" width="100%" height="100%"/>\n'
        f"{body}\n</svg>\n"
    )


def _panel(names: Sequence[str], curves: Mapping[str, Curve], last: int, top: int) -> Iterator[str]:
    bands = [f"{name}/{end}" for name in names for end in ("low", "high")]
    values = [y for name in (*names, *bands) for _, y in curves.get(name, ())]
    ticks = list(_ticks(min(values), max(values)))
    low, high = ticks[0], ticks[-1]
    floor = top + TOP + HEIGHT

    def at(step: float, value: float) -> str:
        x = LEFT + (RIGHT - LEFT) * step / last
        return f"{x:.1f} {floor - HEIGHT * (value - low) / (high - low):.1f}"

    for tick in ticks:
        start = at(0, tick)
        yield f'<path class="axis" d="M{start} H{RIGHT}"/>'
        y = float(start.split()[1]) + 4
        yield f'<text x="{LEFT - 6}" y="{y:.1f}" class="s e">{tick:g}</text>'
    for step in sorted({0, last // 2, last}):
        x = at(step, low).split()[0]
        yield f'<text x="{x}" y="{floor + 16}" class="s m">{step}</text>'
    yield f'<text x="{LEFT - 6}" y="{floor + 16}" class="s e">step</text>'
    x = 8.0
    for name, color in zip(names, COLORS, strict=False):
        curve = curves[name]
        ends = [curves.get(f"{name}/{end}") for end in ("low", "high")]
        if ends[0] and ends[1]:
            points = [*ends[1], *reversed(ends[0])]
            path = " L".join(at(*point) for point in points)
            yield f'<path d="M{path} Z" fill="{color}" fill-opacity="0.2"/>'
        path = " L".join(at(*point) for point in curve)
        yield f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="1.6"/>'
        yield f'<rect x="{x:g}" y="{top + 12}" width="14" height="4" fill="{color}"/>'
        words = f"{name}{', 95 % interval' if ends[0] else ''}"
        yield f'<text x="{x + 20:g}" y="{top + 18}" class="b">{escape(words)}</text>'
        x += 36 + 7.2 * len(words)


def _ticks(low: float, high: float) -> Iterator[float]:
    """Return round values at equal distances that enclose all values."""
    rough = (high - low or abs(high) or 1.0) / (TICKS - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    distance = next(x * power for x in (1, 2, 2.5, 5, 10) if x * power >= rough * 0.999)
    first = math.floor(low / distance + 1e-9)
    last = max(math.ceil(high / distance - 1e-9), first + 1)
    return (round(number * distance, 12) for number in range(first, last + 1))


def _wanted(example: Example) -> list[str]:
    names = [name for panel in example.panels for name in panel]
    return [f"{name}{end}" for name in names for end in ("", "/low", "/high")]


def _curves(lines: Iterable[str], names: Sequence[str]) -> dict[str, Curve]:
    """Return the finite values of metrics by step; a repeated step counts as its last line."""
    steps = {row["step"]: row for row in map(json.loads, lines)}
    found = {
        name: [
            (step, float(f"{row[name]:.{DIGITS}g}"))
            for step, row in sorted(steps.items())
            if isinstance(row.get(name), int | float) and math.isfinite(row[name])
        ]
        for name in names
    }
    return {name: curve for name, curve in found.items() if curve}


def _compact(data: Mapping[str, Any]) -> str:
    """Return JSON with one line per metric, so that differences can be read."""
    metrics = ",\n  ".join(
        f"{json.dumps(name)}: {json.dumps(curve)}" for name, curve in data["metrics"].items()
    )
    rest = ", ".join(
        f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items() if key != "metrics"
    )
    return f'{{{rest}, "metrics": {{\n  {metrics}\n}}}}\n'

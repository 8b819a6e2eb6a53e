"""The file of ``slurmrl report``, as text and in a real browser."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
import time
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from slurmrl.cli.main import main
from slurmrl.desk.report import collecting
from slurmrl.desk.report.page import embedded
from slurmrl.run.history.slots import Kind
from tests.fake_runs import FakeRun
from tests.support import browser
from tests.support.rotation import rotating

SCREENSHOTS = "SLURMRL_SCREENSHOTS"
"""Names a folder for screenshots; by default they lie in the test's own."""
SECTIONS = ("incarnations", "time", "checkpoints", "samples")
HOSTILE = (
    "</script><script>document.title = 'broken out'</script><!-- <img src=x onerror=alert(1)> "
    "\u2028"
)


class _Scripts(HTMLParser):
    """Collects the scripts of a page and its content security policy, as a browser finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str | None, str]] = []
        self.policy = ""
        self._kind: str | None = None
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        assert not {"src", "href", "onerror"} & set(values), (tag, values)
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"] or ""
        if tag == "script":
            self._inside, self._kind = True, values.get("type")
            self.found.append((self._kind, ""))

    def handle_data(self, data: str) -> None:
        if self._inside:
            kind, text = self.found[-1]
            self.found[-1] = kind, text + data

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "script"


def fake_trial(root: Path, trial: str, *, steps: int, rows: int) -> FakeRun:
    run = FakeRun(root, trial=trial)
    run.submission()
    run.paths.config.write_text(f"algorithm: {{name: grpo}}\nseed: {trial}\n")
    run.begin(job="41.0.0")
    begun = time.time()
    run.commit(steps // 2)
    lines = (
        {
            "step": step,
            "time": begun + 1,
            "reward": step % 97 / 97,
            "loss": 1 / step,
            "kl": step / 1e6,
            "tokens": 400,
            "time/step": 1.5,
            "time/gen": 1.0,
        }
        for step in range(1, steps + 1)
    )
    run.paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in range(1, rows // 8 + 1):
        said = [
            {
                "step": step,
                "id": f"{number // 4}@{step}",
                "prompt": f"prompt {step}.{number // 4} {HOSTILE}",
                "completion": "needle" if (step, number) == (7, 3) else f"said {number} {HOSTILE}",
                "reward": float(number % 2),
                "finished": number % 3 > 0,
                "parts": {"exact": float(number % 2), HOSTILE: 0.5},
                "tokens": ["some", " <b>", "tokens", HOSTILE],
                "left_out": 9,
                "values": {
                    "masked": [0, 0, 1, 0],
                    "advantages": [1.5, -0.5, 0.0, 0.1],
                    "logprobs": [-0.1, -3.0, None, -1.0],
                },
                "versions": {"names": ["4.1", "5.1"], "drawn_by": [0, 0, -1, 1]},
            }
            for number in range(8)
        ]
        text = "".join(json.dumps(row) + "\n" for row in said)
        (run.paths.samples / f"step-{step:08d}.jsonl").write_text(text)
    run.paths.plan.write_text(
        json.dumps({"groups": [], "calls": [{"name": "gen", "ranks": [0, 1]}]})
    )
    memory = {"bytes": 60_000_000_000, "gpu_bytes": 80_000_000_000, "fullest_gpu": 0}
    planned = {"gen": {"flops": 6e14, "seconds": 0.5}}
    estimates = {"gpus": 2, "memory": memory, "tokens": 800, "calls": planned}
    run.paths.estimates.write_text(json.dumps(estimates))
    spans = [
        {
            "step": step,
            "calls": [
                {"name": "gen", "ranks": [[0, begun + 2 * step, 1.0], [1, begun + 2 * step, 0.8]]},
                {"name": HOSTILE, "ranks": [[1, begun + 2 * step + 1, 0.5]]},
            ],
        }
        for step in (8, 9)
    ]
    peaks = [[0, 71_000_000_000], [1, 40_000_000_000]]
    run.paths.timeline.write_text(json.dumps({"steps": spans, "peaks": peaks}))
    run.event("master.1", "rollout_task", task="rollout/0", attempt=0, state="joined", host="n7")
    run.say(
        1,
        rollouts={
            "trained": {"0": 300, "1": 80, "2": 4},
            "finished": {"1": 3},
            "dropped": {"stale": 2, HOSTILE: 1},
            "refused": {"late": 5},
            "tasks": [{"task": "rollout/0", "attempt": 0, "host": "n7", "version": "12.1"}],
        },
    )
    run.event("master.1", "commit", step=steps // 2, seconds=begun % 1)
    run.end(Kind.FAILED, reason=HOSTILE, traceback=HOSTILE)
    return run


def test_trial_texts_are_escaped_in_the_page(tmp_path: Path) -> None:
    fake_trial(tmp_path, "1", steps=20, rows=16)
    file = tmp_path / "report.html"
    assert main(["report", "add/1", "--root", str(tmp_path), "--output", str(file)]) == 0
    found = _Scripts()
    found.feed(file.read_text())
    kinds = [kind for kind, _ in found.found]
    assert kinds == ["application/json", None, None]
    data = json.loads(found.found[0][1])
    assert HOSTILE in data["trials"][0]["samples"]["rows"][0]["prompt"]
    assert "default-src 'none'" in found.policy
    assert "unsafe" not in found.policy
    allowed = re.findall(r"'sha256-([^']+)'", found.policy.partition("; style-src")[0])
    digests = [hashlib.sha256(text.encode()).digest() for kind, text in found.found if not kind]
    assert allowed == [base64.b64encode(digest).decode() for digest in digests]


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan"), 1e400])
def test_non_finite_numbers_are_embedded_as_strings(number: float) -> None:
    """A file of the trial may contain 1e400."""
    found = json.loads(embedded({"settings": {"lr": [number], "seed": 1}}))
    assert found["settings"]["seed"] == 1
    assert found["settings"]["lr"][0] in ("Infinity", "-Infinity", "NaN")


def test_embedded_data_cannot_close_its_element() -> None:
    text = embedded({"text": HOSTILE, "key</script>": [HOSTILE]})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"text": HOSTILE, "key</script>": [HOSTILE]}


@pytest.mark.long
@pytest.mark.skipif(browser.CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("scheme", rotating("light", "dark"))
def test_large_report_is_usable_in_a_browser(
    tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report has 50,000 steps and 10,000 samples."""
    fake_trial(tmp_path, "1", steps=50_000, rows=10_000)
    second = fake_trial(tmp_path, "2", steps=500, rows=8)
    judged = {"step": 7, "id": "q", "prompt": "p", "completion": "judged", "reward": 1.0}
    kept = second.paths.samples / "eval-step-00000007.jsonl"
    kept.write_text(json.dumps(judged) + "\n")
    file = tmp_path / "report.html"
    root = ["--root", str(tmp_path)]
    found = (None, {"gen": 0.5}, "hardware profile h100")
    monkeypatch.setattr(collecting, "predicted_calls", lambda paths, lines, hardware: found)
    assert main(["report", "add/1", "add/2", *root, "--output", str(file)]) == 0
    shots = Path(os.environ.get(SCREENSHOTS, tmp_path))
    shots.mkdir(parents=True, exist_ok=True)
    asyncio.run(_look(file, scheme, shots))


RECORD_LABELS = """
window.labels = new Map();
const fillText = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...rest) {
  if (!labels.has(this.canvas)) labels.set(this.canvas, []);
  const box = this.measureText(text), at = this.getTransform().transformPoint({ x, y });
  labels.get(this.canvas).push([text, this.textAlign, at.x - box.actualBoundingBoxLeft]);
  return fillText.call(this, text, x, y, ...rest);
};
"""
LABELS_BY_METRIC = """
Object.fromEntries([...document.querySelectorAll('.chart')].map((box) =>
  [box.dataset.name, labels.get(box.querySelector('canvas')) ?? []]))
"""


@pytest.mark.skipif(browser.CHROMIUM is None, reason="needs Chromium")
def test_axis_labels_fit_and_differ(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, trial="1")
    run.submission()
    run.begin(job="41.0.0")
    values = {
        "flat": [0.0, 0.0, 0.0],
        "constant": [6.0, 6.0, 6.0],
        "importance_ratio": [1.0000001, 0.9999998, 1.0000002],
        "narrow": [0.51234, 0.51236, 0.51239],
        "negative": [-1234.5, -1200.25, -1250.125],
        "tiny": [-0.0000123, 0.0000045, -0.0000077],
    }
    run.metrics(*({"step": i + 1, **{name: y[i] for name, y in values.items()}} for i in range(3)))
    run.end(Kind.FINISHED, step=3)
    file = tmp_path / "report.html"
    assert main(["report", "add/1", "--root", str(tmp_path), "--output", str(file)]) == 0
    labels = asyncio.run(_axis_labels(file, len(values)))
    for name in values:
        steps = [text for text, align, _ in labels[name] if align == "center"]
        ticks = [(text, left) for text, align, left in labels[name] if align == "right" and text]
        assert steps == ["1", "2", "3"], name
        assert len(ticks) > 1, f"{name}: the chart is empty"
        assert len({text for text, _ in ticks}) == len(ticks), f"{name}: {ticks}"
        assert min(left for _, left in ticks) >= 0, f"{name}: cut off: {ticks}"
    assert max(float(text) for text, align, _ in labels["flat"] if align == "right") <= 1
    constant = [float(text) for text, align, _ in labels["constant"] if align == "right"]
    gaps = {round(high - low, 9) for low, high in pairwise(sorted(constant))}
    assert len(gaps) == 1, f"labels are rounded: {constant}"


async def _axis_labels(file: Path, charts: int) -> dict[str, list[tuple[str, str, float]]]:
    """Return the text, alignment and left edge of each label, by metric."""
    async with browser.opened(file, before=RECORD_LABELS) as page:
        await page.until(f"document.querySelectorAll('#curves canvas').length === {charts}")
        found: dict[str, list[tuple[str, str, float]]] = await page.evaluate(LABELS_BY_METRIC)
        assert page.complaints == []
        return found


async def _look(file: Path, scheme: str, shots: Path) -> None:
    async with browser.opened(file, scheme=scheme) as page:
        await page.until("document.querySelectorAll('#curves canvas').length >= 3")
        assert await page.evaluate("document.documentElement.dataset.theme") == scheme
        assert await page.evaluate("document.title") == "slurmrl: add/1, add/2"
        # a canvas on which something is drawn is not of one color
        assert await page.evaluate(
            "[...document.querySelectorAll('#curves canvas')].slice(0, 3).every((one) => new Set("
            "one.getContext('2d').getImageData(0, 0, one.width, one.height).data).size > 8)"
        )
        await page.screenshot(shots / f"report.{scheme}.png")
        time_text = await page.evaluate("document.querySelector('#time').textContent")
        for said in ("80, 20.83 %", "droppedstale2", "result rejectedlate5", "rollout/00n712.1"):
            assert said in time_text
        bars = (
            "[...document.querySelectorAll('#time .bar')]"
            ".filter((one) => /of step . on rank/.test(one.title))"
        )
        assert await page.evaluate(f"{bars}.length") == 6  # of the newest step, of two trials
        await page.evaluate(
            "(() => { const pick = document.querySelector('#time .steps');"
            " pick.value = ''; pick.dispatchEvent(new Event('input')); })()"
        )
        assert await page.evaluate(f"{bars}.length") == 9
        for said in (
            "gen1 s150500 ms50 %",
            "rank 071.0 GB",
            "plan, rank 060.0 GB",
            "steps, with hardware profile h100.",
        ):
            assert said in await page.evaluate("document.querySelector('#time').textContent")
        await _look_at_samples(page)
        incarnations = await page.evaluate("document.querySelector('#incarnations').textContent")
        assert re.search(r"1 to 50000.*25000 steps, [0-9.]+ \w+", incarnations), incarnations
        for section in SECTIONS:
            await page.screenshot(shots / f"{section}.{scheme}.png", f"#{section}")
        assert "broken out" not in await page.evaluate("document.title")
        assert await page.evaluate("document.images.length") == 0
        assert page.complaints == []


async def _look_at_samples(page: browser.Page) -> None:
    """Filter and color the samples, then the curves."""

    async def enter(field: str, value: str) -> None:
        await page.evaluate(
            f"(() => {{ const field = document.getElementById({field!r});"
            f" field.value = {value!r}; field.dispatchEvent(new Event('input')); }})()"
        )

    count = "document.getElementById('count').textContent"
    assert (await page.evaluate(count)).startswith("2,503 prompts")
    groups = "document.querySelectorAll('#groups .group').length"
    assert await page.evaluate(groups) == 20  # a page of them, however many there are
    points = "Math.max(...JSON.parse(document.getElementById('data').textContent).trials"
    points += ".flatMap((trial) => Object.values(trial.curves).map((curve) => curve.x.length)))"
    assert 2000 < await page.evaluate(points) <= 4000
    await enter("find", "needle")
    assert (await page.evaluate(count)).startswith("1 prompts")
    assert "needle" in await page.evaluate("document.querySelector('#groups').textContent")
    await enter("find", "")
    await enter("trial", "add/2")
    await enter("order", "oldest")
    assert (await page.evaluate(count)).startswith("3 prompts")
    await enter("phase", "evaluation")
    assert (await page.evaluate(count)).startswith("1 prompts")
    shown = await page.evaluate("document.querySelector('#groups').textContent")
    assert "evaluation at step 7" in shown
    await enter("phase", "training")
    assert (await page.evaluate(count)).startswith("2 prompts")
    shown = "[...document.querySelectorAll('#groups .one:first-child .tok')].slice(0, 4)"
    assert await page.evaluate(f"{shown}.map((one) => one.title)") == [
        "advantage 1.5, log-probability -0.1, version 4.1",
        "advantage -0.5, log-probability -3, version 4.1",
        "masked: not in the loss, advantage 0, log-probability –",
        "advantage 0.1, log-probability -1, version 5.1",
    ]
    tints = f"{shown}.map((one) => one.style.background)"
    by_advantage = await page.evaluate(tints)
    assert "47, 158, 91" in by_advantage[0]
    assert "201, 65, 106" in by_advantage[1]
    assert by_advantage[2] == ""
    await enter("tint", "versions")
    first, second, read, last = await page.evaluate(tints)
    assert first == second != last
    assert read == ""
    await enter("tint", "advantages")
    await enter("smooth", "0.9")
    await page.until("document.querySelectorAll('#curves canvas').length >= 3")
    await enter("metrics", "kl")
    shown = "[...document.querySelectorAll('.chart')].filter((one) => !one.hidden).length"
    assert await page.evaluate(shown) == 1

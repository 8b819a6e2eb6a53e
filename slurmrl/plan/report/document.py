"""A plan's report as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

GIB: Final = 2**30
MOST_HOSTS: Final = 16
"""Hosts of a rank table that are shown; of more, the first ones and the last."""
SHORT: Final = {"pp": "p", "dp": "d", "cp": "c", "tp": "t"}
MEMORY: Final = ("weights", "gradients", "optimizer", "activations", "kv_cache")


def text(report: Mapping[str, Any]) -> str:
    parts = [
        f"{report['experiment']}/{report['trial']}: {report['gpus']} GPUs, "
        f"{report['world_size']} workers in the fixed job",
        _table(("GROUP", "HOSTS", "WORKERS", "GPUS/HOST", "CPUS/HOST", "ARRAY"), _groups(report)),
        *(_model(name, model) for name, model in report["models"].items()),
        _table(("MODEL", *(name.upper() for name in MEMORY), "TOGETHER"), _memory(report))
        + f"\n{_fullest(report['memory'])}",
        _table(("CALL", "MODEL", "METHOD", "RANKS", "TFLOP", "SECONDS", "HOOKS"), _calls(report)),
        _process_groups(report),
        _lines("warnings", report["warnings"]),
        _lines("notes", report["notes"]),
        _lines("before it can be submitted", report["missing"]),
    ]
    return "\n\n".join(part for part in parts if part)


def allocation(explained: Mapping[str, Any]) -> str:
    """One string's meaning."""
    lines = [f"{explained['string']}: {explained['world_size']} ranks"]
    halves = [half for half in ("attn", "ffn") if half in explained]
    if halves:
        columns = ("dp", "pp", "tp", "cp", "ep", "world_size")
        rows = [
            (half, *(str(explained[half].get(column, "-")) for column in columns))
            for half in halves
        ]
        lines.append(_table(("HALF", *(column.upper() for column in columns)), rows))
        return "\n".join(lines)
    axes = ("dp", "tp", "pp", "cp", "ep", "etp", "edp")
    lines.append(_table([axis.upper() for axis in axes], [[str(explained[a]) for a in axes]]))
    return "\n".join(lines)


def size(number: int | None) -> str:
    """Bytes with three digits."""
    if number is None:
        return "-"
    for unit, factor in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number} B"


def cell(row: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    """Where a rank stands on the axes that are split: ``d0 t1``."""
    split = [axis for axis, number in sizes.items() if number > 1]
    return " ".join(f"{SHORT[axis]}{row[axis]}" for axis in split) or "all"


def _groups(report: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    for group in report["groups"]:
        hosts = f"{group['hosts']} tasks" if group["elastic"] else str(group["hosts"])
        workers = str(group["hosts"] * group["workers_per_host"])
        devices, processors = str(group["gpus_per_host"]), str(group["cpus_per_host"])
        yield group["name"], hosts, workers, devices, processors, f"--array={group['array']}"


def _model(name: str, model: Mapping[str, Any]) -> str:
    """The picture of one model: hosts against their GPUs."""
    ranks: dict[int, dict[int, str]] = {}
    for row in model["ranks"]:
        ranks.setdefault(row["host"], {})[row["gpu"]] = cell(row, model["sizes"])
    columns = sorted({gpu for row in ranks.values() for gpu in row})
    hosts = sorted(ranks)
    shown = hosts if len(hosts) <= MOST_HOSTS else [*hosts[: MOST_HOSTS - 1], hosts[-1]]
    rows = [[str(host), *(ranks[host].get(gpu, "-") for gpu in columns)] for host in shown]
    if len(shown) < len(hosts):
        rows.insert(-1, ["…", *("…" for _ in columns)])
    kind = "trained" if model["trained"] else "not trained"
    flags = [f"virtual pipeline {model['virtual_pipeline']}"] * (model["virtual_pipeline"] > 1)
    flags += ["sequence parallel"] * model["sequence_parallel"]
    if model["expert_sizes"]:
        flags.append("experts " + " ".join(f"{a}{n}" for a, n in model["expert_sizes"].items()))
    head = f"{name}: {model['backend']}, {', '.join([kind, *flags])}, in {model['group']}"
    return f"{head}\n{_table(('HOST', *(f'GPU {gpu}' for gpu in columns)), rows)}"


def _memory(report: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    for name, model in report["models"].items():
        memory = model["memory"]
        if memory is None:
            yield [name, *("-" for _ in MEMORY), "unknown architecture"]
            continue
        sizes = [memory[f"{part}_bytes"] for part in MEMORY]
        together = sum(sizes[:3]) + max(sizes[3:])
        yield [name, *(size(number) for number in sizes), size(together)]


def _fullest(memory: Mapping[str, Any]) -> str:
    if memory["bytes"] is None:
        return "memory of a GPU: not estimated"
    limit = f" of {size(memory['gpu_bytes'])}" if memory["gpu_bytes"] else ""
    models = ", ".join(memory["models"])
    return f"fullest GPU: {memory['fullest_gpu']} with {models}: {size(memory['bytes'])}{limit}"


def _process_groups(report: Mapping[str, Any]) -> str:
    counts = report["process_group_counts"]
    counted = ", ".join(f"{use} {number}" for use, number in counts.items())
    return textwrap.fill(f"process groups: {counted}", 100, subsequent_indent="  ")


def _lines(head: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{head}:", *(f"  {line}" for line in lines)]) if lines else ""


def _calls(report: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    for call in report["calls"]:
        flops = "-" if call["flops"] is None else f"{call['flops'] / 1e12:.3g}"
        seconds = "-" if call["seconds"] is None else f"{call['seconds']:.3g}"
        hooks = ", ".join([*call["pre_hooks"], *call["post_hooks"]])
        ranks = str(call["ranks"])
        yield call["name"], call["model"] or "-", call["method"], ranks, flops, seconds, hooks


def _table(headings: Sequence[str], rows: Any) -> str:
    lines = [list(headings), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    padded = (
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(f"  {line.rstrip()}" for line in padded)

"""The documents of ``slurmrl plan``: a plan with its moves, and an allocation string."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from slurmrl.config.problems import show
from slurmrl.display.terminal import Block, Document, Grid, GridRow, Legend, Lines, Table
from slurmrl.plan.estimates.call_costs import binary_size
from slurmrl.plan.estimates.memory import EXPERTS, PASSING, STANDING
from slurmrl.plan.inherited_settings import USUAL_GPUS_PER_HOST
from slurmrl.plan.plan_values import lines
from slurmrl.tensors.parallel.topology import ProcessTopology


def document(report: Mapping[str, Any]) -> Document:
    """Return the document of a plan's report."""
    groups = ("GROUP", "HOSTS", "WORKERS", "GPUS/HOST", "CPUS/HOST", "MEM/HOST", "ARRAY")
    parts = _parts(report)
    memory = ("MODEL", *(name.upper() for name in parts))
    calls = ("CALL", "MODEL", "METHOD", "RANKS", "TFLOP", "SECONDS", "HOOKS")
    blocks: list[Block] = [
        Table(groups, list(_groups(report)), note=_host_memory(report)),
        Legend({name: _model(model) for name, model in report["models"].items()}),
        *(_grid(report, group) for group in report["groups"]),
        Table(memory, list(_memory(report, parts)), note=_fullest(report)),
        Table(calls, list(_calls(report)), note=_seconds(report)),
        *(blocks_of(report["moves"]) if "moves" in report else ()),
        *([_process_groups(report)] if report["process_group_counts"] else []),
        *([Lines("episode:", list(_episode(report["episode"])))] if report["episode"] else []),
        Lines(f"{_title(report)}:", list(lines(report["algorithm"]))),
    ]
    blocks += [Lines(*_profile(report["profile"]))] if "profile" in report else []
    ends = {"warnings": "warnings", "notes": "notes", "missing": "to fix before submission"}
    blocks += [Lines(f"{title}:", report[key]) for key, title in ends.items() if report[key]]
    workers = f"{report['gpus']} GPUs, {report['world_size']} workers in the fixed job"
    return Document(f"{report['experiment']}/{report['trial']}", blocks, workers)


def _seconds(report: Mapping[str, Any]) -> str:
    """Return the origin of the predicted seconds; empty without seconds."""
    if all(call["seconds"] is None for call in report["calls"]):
        return ""
    hardware = report["hardware"]
    return f"seconds: formulas and {hardware['source']}\nerror of the seconds: {hardware['error']}"


def _profile(profile: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return title and lines about the site profile and the settings that come from it."""
    lines = [f"{key}: {show(value)}" for key, value in profile["settings"].items()]
    return f"site profile {profile['file']}:", lines or ["the configuration sets all values itself"]


def _title(report: Mapping[str, Any]) -> str:
    """Return algorithm and length of the run, such as ``algorithm ppo, 60 steps``."""
    steps, name = report["total_steps"], f"algorithm {report['algorithm']['name']}"
    if not report["one_pass"]:
        return f"{name}, {_count(steps, 'step')}"
    limit = "" if steps is None else f" in at most {_count(steps, 'step')}"
    return f"{name}, one pass over the dataset{limit}"


def _groups(report: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    for group in report["groups"]:
        hosts = f"{group['hosts']} tasks" if group["elastic"] else str(group["hosts"])
        hosts += f" + {_count(group['spares'], 'spare')}" if group["spares"] else ""
        workers = str(group["hosts"] * group["workers_per_host"])
        gpus, cpus = str(group["gpus_per_host"]), str(group["cpus_per_host"])
        memory = group["mem_per_host_bytes"]
        shown = "-" if memory is None else binary_size(memory)
        array = f"--array={group['array']}" if group["array"] else "in the trainers' job"
        yield group["name"], hosts, workers, gpus, cpus, shown, array


def _host_memory(report: Mapping[str, Any]) -> str:
    size = report["worker_host_bytes"]
    if size is None:
        return ""
    workers = max(group["workers_per_host"] for group in report["groups"])
    on_host = binary_size(size * workers)
    lines = [f"host memory: {binary_size(size)} estimated for each worker, {on_host} for each host"]
    if recorded := report["experts_host_bytes"]:
        kept = f"{binary_size(recorded)} for each of its GPUs"
        lines.append(f"expert ids recorded by a server: {kept}, in host memory")
    return "\n".join(lines)


def _model(model: Mapping[str, Any]) -> str:
    state = "follows the actor" if model["averaged"] else "not trained"
    facts = [model["backend"], "trained" if model["trained"] else state]
    facts.append(f"{model['dtype']} ({model['dtype_from']})")
    if model["lora"] is not None:
        facts.append(_lora(model["lora"]))
    if model["virtual_pipeline"] > 1:
        facts.append(f"virtual pipeline {model['virtual_pipeline']}")
    if model["sequence_parallel"]:
        facts.append("sequence parallel")
    if model["expert_sizes"]:
        sizes = (f"{axis}{size}" for axis, size in model["expert_sizes"].items())
        facts.append(f"experts {' '.join(sizes)}")
    return f"{', '.join(facts)}, in {model['group']}"


def _lora(lora: Mapping[str, Any]) -> str:
    trained, every = lora["trained_parameters"], lora["parameters"]
    share = f" ({trained / every:.2g} of its parameters)" if every else ""
    return f"adapters of rank {lora['rank']}{share}"


def _grid(report: Mapping[str, Any], group: Mapping[str, Any]) -> Grid:
    """Return the models' ranks on the hosts and GPUs of a group of workers."""
    row, per_host = "task" if group["elastic"] else "host", group["workers_per_host"]
    held = {
        name: model for name, model in report["models"].items() if model["group"] == group["name"]
    }
    numbers = [rank["gpu"] + 1 for model in held.values() for rank in model["ranks"]]
    cells: list[list[dict[str, str]]] = [
        [{} for _ in range(max(per_host, *numbers, 0))] for _ in range(group["hosts"])
    ]
    for name, model in held.items():
        for rank in model["ranks"]:
            cells[rank["host"]][rank["gpu"]][name] = written(rank, model["sizes"])
    rows = [GridRow(str(host), on_host) for host, on_host in enumerate(cells)]
    title = f"{group['name']}: {_count(group['hosts'], row)} of {_count(per_host, 'worker')}"
    return Grid(title, row, "GPU" if group["gpus_per_host"] else "WORKER", "model", rows)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _parts(report: Mapping[str, Any]) -> Sequence[str]:
    """Return the names of the parts of a model's memory, with recorded experts if there are any."""
    memories = [model["memory"] for model in report["models"].values() if model["memory"]]
    some = any(memory[f"{EXPERTS}_bytes"] for memory in memories)
    return *STANDING, *PASSING, *([EXPERTS] if some else []), "together"


def _memory(report: Mapping[str, Any], parts: Sequence[str]) -> Iterator[Sequence[str]]:
    for name, model in report["models"].items():
        memory = model["memory"]
        if memory is None:
            yield [name, *("-" for _ in parts[1:]), "unknown architecture"]
            continue
        sizes = [memory[f"{part}_bytes"] for part in parts]
        yield [name, *map(binary_size, sizes)]


def _fullest(report: Mapping[str, Any]) -> str:
    memory, device = report["memory"], "GPU" if report["gpus"] else "worker"
    if memory["bytes"] is None:
        return f"memory of a {device}: not estimated"
    models, size = ", ".join(memory["models"]), binary_size(memory["bytes"])
    fullest = f"fullest {device}: {memory['fullest_gpu']} with {models}: {size}"
    if memory["without_adapters_bytes"]:
        fullest += f" (with all weights trained {binary_size(memory['without_adapters_bytes'])})"
    if not report["gpus"]:
        longest = memory["longest_row"]
        fullest += f", {binary_size(memory['process_bytes'])} of it for Python and torch"
        why = f", with the rows of the data: at most {longest} tokens in a sequence"
        return fullest + (why if longest else "")
    fullest += f" and a margin of {binary_size(memory['margin_bytes'])}"
    if memory["gpu_bytes"]:
        fullest += f", of {binary_size(memory['gpu_bytes'])}"
        over = memory["bytes"] + memory["margin_bytes"] - memory["gpu_bytes"]
        fullest += f": {binary_size(over)} TOO MUCH" if over > 0 else ""
    if memory["server_bytes"] is None:
        return fullest
    size = f"{binary_size(memory['server_bytes'])} of each of its GPUs"
    server = f"gets {size}" if memory["gpu_bytes"] else f"needs {size} for a step's sequences"
    sleeps = ", which is free while other models compute" if memory["server_sleeps"] else ""
    return f"{fullest}\na server {server}{sleeps}"


def _calls(report: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    for call in report["calls"]:
        flops = "-" if call["flops"] is None else f"{call['flops'] / 1e12:.3g}"
        seconds = "-" if call["seconds"] is None else f"{call['seconds']:.3g}"
        hooks = ", ".join([*call["pre_hooks"], *call["post_hooks"]])
        ranks = str(call["ranks"])
        model = f"{call['model']} base" if call["base"] else call["model"] or "-"
        yield call["name"], model, call["method"], ranks, flops, seconds, hooks


def _episode(episode: Mapping[str, Any]) -> Iterator[str]:
    parts = [episode["name"]]
    if episode["environment"]:
        parts.append(f"environment {episode['environment']}")
    if episode["tools"]:
        parts.append(f"tools {', '.join(episode['tools'])}")
    yield ", ".join(parts)
    turns = _count(episode["max_turns"], "turn")
    yield f"up to {turns} of {episode['max_new_tokens']} tokens, {episode['max_tokens']} in total"
    limit, most = f"{episode['timeout_s']:g} s outside the engine", episode["concurrency"]
    yield f"{limit}; {most} at a time on each rank"


def _process_groups(report: Mapping[str, Any]) -> Lines:
    counts = report["process_group_counts"]
    counted = ", ".join(f"{use} {number}" for use, number in counts.items())
    first, *more = textwrap.wrap(f"process groups: {counted}", 100, subsequent_indent="  ")
    return Lines(first, [line.strip() for line in more])


SHOWN: Final = 16
"""Maximum number of ranks in a table; the JSON values have all ranks."""
PARTS: Final = ("sent", "received", "lacking", "copied", "staging")


def blocks_of(moves: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    if not moves:
        yield Lines("moves: none, because every call uses the layout of its model")
    for move in moves:
        yield _summary(move)
        yield _links(move)
        yield _ranks(move)


def _summary(move: Mapping[str, Any]) -> Lines:
    received, least = move["received_bytes"], move["lower_bound_bytes"]
    extra, limit = move["peak_extra_bytes"], move["staging_limit_bytes"]
    return Lines(
        f"move {move['source']} -> {move['target']}, {move['when']} {', '.join(move['calls'])}:",
        [
            f"{binary_size(received)} received, {move['over_lower_bound']:.4f} times the lower "
            f"bound of {binary_size(least)}",
            f"{move['messages']} messages, {move['segments']} segments, {move['slots']} slots",
            f"extra memory of a rank: at most {binary_size(extra)}, allowed {binary_size(limit)}",
        ],
    )


def _links(move: Mapping[str, Any]) -> Table:
    """Return the total bytes of each kind of link, and the maximum on a single link."""
    rows = []
    links = move["links"]
    for kind, across in (("same host", False), ("across hosts", True)):
        each = [link["bytes"] for link in links if link["across_hosts"] == across]
        total = move["bytes"][kind.replace(" ", "_")]
        rows.append([kind, str(len(each)), *map(binary_size, (total, max(each, default=0)))])
    copied = move["bytes"]["same_rank"]
    own = [rank["copied_bytes"] for rank in move["ranks"] if rank["copied_bytes"]]
    rows.insert(0, ["same rank", str(len(own)), *map(binary_size, (copied, max(own, default=0)))])
    return Table(("LINKS", "NUMBER", "BYTES", "LARGEST"), rows)


def _ranks(move: Mapping[str, Any]) -> Table:
    """Return all ranks, or the ranks that send and receive most."""
    ranks = move["ranks"]
    busiest = sorted(ranks, key=lambda rank: -max(rank["sent_bytes"], rank["received_bytes"]))
    shown = ranks if len(ranks) <= SHOWN else busiest[:SHOWN]
    rows = [_rank(str(rank["rank"]), rank) for rank in shown]
    rows.append(_rank("largest", {k: max(r[k] for r in ranks) for k in ranks[0]}))
    rows.append(_rank("average", {k: sum(r[k] for r in ranks) // len(ranks) for k in ranks[0]}))
    hidden = len(ranks) - len(shown)
    note = f"{hidden} less busy ranks are left out; --json lists them" if hidden else ""
    return Table(("RANK", *(part.upper() for part in PARTS)), rows, note=note)


def _rank(label: str, costs: Mapping[str, int]) -> list[str]:
    return [label, *(binary_size(costs[f"{part}_bytes"]) for part in PARTS)]


AXIS_LETTERS: Final = {"pp": "p", "dp": "d", "cp": "c", "tp": "t"}
"""Letters of the axes of a model's ranks. Adjacent ranks differ in the last axis that is split."""


def allocation_document(explained: Mapping[str, Any]) -> Document:
    """Return the document of `explain`: sizes of each allocation, and places of its ranks."""
    parts = explained.get("components", [explained])
    names = [_name(part, number, parts) for number, part in enumerate(parts)]
    blocks: list[Block] = [_sizes(part) for part in parts]
    if "write_instead" in explained:  # A legacy string does not say which models share GPUs.
        blocks += [_rank_grid({name: part}) for name, part in zip(names, parts, strict=True)]
        blocks.append(Lines("write instead:", explained["write_instead"]))
    else:
        blocks.append(_rank_grid(dict(zip(names, parts, strict=True))))
        if len(parts) > 1:
            blocks.append(Lines(f"together: {explained['world_size']} ranks"))
    return Document("", blocks)


def written(rank: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    """Return a rank's coordinates on the axes that are split, such as ``d0 t1``."""
    split = [axis for axis in AXIS_LETTERS if sizes[axis] > 1]
    return " ".join(f"{AXIS_LETTERS[axis]}{rank[axis]}" for axis in split) or "all"


def _name(part: Mapping[str, Any], number: int, parts: Sequence[Mapping[str, Any]]) -> str:
    name = part["name"] or part["backend"]
    same = [one for one in parts if (one["name"] or one["backend"]) == name]
    return f"{name} {number}" if len(same) > 1 else str(name)


def _sizes(explained: Mapping[str, Any]) -> Table:
    title = f"{explained['string']}: {explained['world_size']} ranks"
    halves = [half for half in ("attn", "ffn") if half in explained]
    if halves:
        axes = ["dp", "pp", "tp", "cp", "ep", "world_size"]
        rows = [[half, *(str(explained[half].get(axis, "-")) for axis in axes)] for half in halves]
        return Table(["HALF", *map(str.upper, axes)], rows, title)
    axes = ["dp", "tp", "pp", "cp", "ep", "etp", "edp"]
    return Table([*map(str.upper, axes)], [[str(explained[axis]) for axis in axes]], title)


def _rank_grid(parts: Mapping[str, Mapping[str, Any]]) -> Grid:
    """Return the ranks of allocations on as many hosts as the ranks need."""
    gpus = max(part.get("first_rank", 0) + part["world_size"] for part in parts.values())
    hosts = -(-gpus // USUAL_GPUS_PER_HOST)
    cells: list[dict[str, str]] = [{} for _ in range(min(gpus, USUAL_GPUS_PER_HOST) * hosts)]
    for name, part in parts.items():
        for rank, words in enumerate(_coordinates(part), start=part.get("first_rank", 0)):
            cells[rank][name] = words
    rows = [
        GridRow(str(host), cells[first : first + USUAL_GPUS_PER_HOST])
        for host, first in enumerate(range(0, len(cells), USUAL_GPUS_PER_HOST))
    ]
    title = f"{' and '.join(parts)}, if a host has {USUAL_GPUS_PER_HOST} GPUs:"
    return Grid(title, "host", "GPU", "model", rows)


def _coordinates(part: Mapping[str, Any]) -> Iterator[str]:
    grid = ProcessTopology(tuple(AXIS_LETTERS), [part[axis] for axis in AXIS_LETTERS])
    for rank in range(grid.world_size):
        yield written(grid.coordinates(rank), part)

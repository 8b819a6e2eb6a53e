"""A trial that publishes weight versions, and whose processes are killed meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slurmrl.run import events
from slurmrl.run.history.slots import History
from slurmrl.run.history.state import Lineage
from slurmrl.tensors.checkpoint.tensors import TensorFile
from slurmrl.tensors.weights.inventory import COMPLETE, inventory
from slurmrl.tensors.weights.local_copy import LocalCopy
from tests.support.hooks import hooked
from tests.support.rotation import TASK_KILLS, in_turn
from tests.support.trials import Site, sft_config

KILLS = "tests.support.version_hooks:processes_die_while_they_publish"
MESSAGES = "slurmrl.workers.messages"
STEPS = 8


def run(site: Site, trial: str, **sections: Any) -> None:
    config = sft_config(trial=trial, total_steps=STEPS, **sections)
    config["actor"]["dtype"] = "bfloat16"
    config["checkpoint"]["export_dtype"] = "bfloat16"
    file = site.write(f"{trial}.yaml", config)
    site.slurmrl("submit", str(file), "--scheduler", "local", "--wait")


@in_turn(6, TASK_KILLS)
def test_weight_versions_survive_kills_without_bit_changes(tmp_path: Path) -> None:
    """A rank is killed between its part and its index, and the master between the parts and the
    manifest. Published versions are intact and belong to the surviving line of steps. The newest
    version has the bits of the export.
    """
    site = Site(tmp_path)
    run(site, "silent")
    killed = hooked(tmp_path, "1", MESSAGES, KILLS)
    run(site, "1", rollout={"publish": {"whole_every": 3}}, code=killed)
    assert site.outcome("sft/1") == site.outcome("sft/silent")

    paths = site.paths("sft/1")
    found = {one.version: one for one in inventory(paths.versions, verify=True)}
    assert all(one.state == COMPLETE for one in found.values()), found
    lineage = Lineage.of(History(paths.history).read())
    assert all(lineage.has(one.step, one.incarnation) for one in found.values()), found
    assert {one.base is None for one in found.values()} == {True, False}

    copy = LocalCopy(tmp_path / "copy", paths.versions).advance()
    assert copy.id.name == f"{STEPS}.3"
    (export,) = paths.exports.glob("*/model.safetensors")
    theirs, ours = TensorFile(export), copy.open()
    assert ours.specs == theirs.specs
    assert all((ours.flat(name) == theirs.flat(name)).all() for name in theirs.specs)

    told = [event for event in events.read_all(paths) if event["kind"] == "weights"]
    assert {event["version"] for event in told} >= found.keys()
    assert not {"4.1", "6.2"} & {event["version"] for event in told}

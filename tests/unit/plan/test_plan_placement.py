"""Separate and colocated placements, rank tables and process groups."""

from __future__ import annotations

import pytest

from slurmrl.config.allocation.parser import parse_gpus
from slurmrl.plan import build
from slurmrl.plan.build import make_plan
from slurmrl.plan.estimates.call_costs import memories
from slurmrl.plan.model import Plan, Reallocation
from slurmrl.plan.placement import place, workers_per_host
from slurmrl.plan.plan_values import process_groups, rows, split_over_hosts
from slurmrl.scheduler.parse import HostRow, cluster_hosts
from tests.unit.plan.conftest import EXPERTS, Load

SEED = (
    "actor.backend=megatron:t2",
    "actor.gpus=0-1",
    "critic.backend=megatron:p2",
    "critic.gpus=2-3",
    "ref.backend=megatron:t2p2",
    "ref.gpus=0-3",
)
"""Four GPUs: the actor on the first half with tensor parallelism, the critic on the second with
stages, the reference on all with both."""


def plan(load: Load, *overrides: str) -> Plan:
    return make_plan(load(*overrides), scheduler="slurm")


def test_gpu_has_coordinates_in_each_model(plan_ppo: Load) -> None:
    found = plan(plan_ppo, *SEED)
    [group] = found.groups
    assert (group.hosts, group.workers_per_host) == (1, 4)
    at = {
        role: {row.place: row.coordinates for row in rows(found, found.models[role])}
        for role in ("actor", "critic", "ref")
    }
    assert at["actor"][1]["tp"] == 1
    assert (at["ref"][2]["tp"], at["ref"][2]["pp"], at["critic"][2]["pp"]) == (0, 1, 0)
    assert [sorted(on) for on in at.values()] == [[0, 1], [2, 3], [0, 1, 2, 3]]


def test_separate_and_shared_models_have_the_expected_rank_groups(plan_ppo: Load) -> None:
    groups = {group.ranks: group.uses for group in process_groups(plan(plan_ppo, *SEED))}
    assert groups == {
        (0, 1, 2, 3): ("global", "model ref"),
        (0, 1): ("model actor", "actor tp", "ref tp"),
        (2, 3): ("model critic", "critic pp", "ref tp"),
        (0, 2): ("ref pp",),
        (1, 3): ("ref pp",),
    }


def test_experts_have_their_own_rank_groups(plan_ppo: Load) -> None:
    text = "actor.backend=megatron:(attn:d2t2|ffn:t1e2)"
    found = make_plan(plan_ppo(text, architecture=EXPERTS), scheduler="slurm")
    assert found.models["actor"].expert_sizes == {"pp": 1, "dp": 2, "ep": 2, "tp": 1}
    groups = {ranks: uses for uses, ranks in ((g.uses, g.ranks) for g in process_groups(found))}
    assert "actor expert ep" in groups[(0, 1)]
    assert "actor expert dp" in groups[(0, 2)]


@pytest.mark.parametrize(("gpus", "ranks"), [("0-3", (0, 1, 2, 3)), ("4-7", (4, 5, 6, 7))])
def test_native_generation_has_its_own_layout_in_the_trainers_job(
    plan_ppo: Load, gpus: str, ranks: tuple[int, ...]
) -> None:
    settings = plan_ppo(
        "actor.backend=megatron:t2p2", "rollout.backend=native:d2t2", f"rollout.gpus={gpus}"
    )
    assert {problem.key for problem in settings.missing} == {"actor.tokenizer"}
    found = make_plan(settings, scheduler="slurm")
    [group] = found.groups
    assert group.world_size == max(ranks) + 1
    assert found.models["rollout"].ranks == ranks
    hook = Reallocation(source="actor", target="rollout")
    on_rollout = {call.name for call in found.calls if call.layout == "rollout"}
    assert on_rollout == {"actor_gen"}
    assert [call.name for call in found.calls if hook in call.pre_hooks] == ["actor_gen"]
    assert found.evaluation_calls[0].layout == "rollout"
    assert found.evaluation_calls[0].pre_hooks == (hook,)
    assert Plan.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("overrides", "hooks"),
    [
        (("rollout.gpus=0-3",), {"actor_gen": "rollout"}),
        (("rollout.gpus=4-7",), {}),
        (("rollout.gpus=4-7", "rollout.offload=true"), {"actor_gen": "rollout"}),
        (("rollout.gpus=0-3", "rollout.offload=false", "ref.offload=true"), {"ref_inf": "ref"}),
    ],
)
def test_models_are_offloaded_after_their_calls(
    plan_ppo: Load, overrides: tuple[str, ...], hooks: dict[str, str]
) -> None:
    """By default, only generation weights on GPUs of other models are offloaded."""
    found = plan(plan_ppo, "actor.backend=fsdp:d4", "rollout.backend=native:d4", *overrides)
    after = {call.name: hook.model for call in found.calls for hook in call.post_hooks}
    assert after == hooks
    assert found.offloaded == set(hooks.values())


def test_reference_average_is_updated_after_training(plan_ppo: Load) -> None:
    found = plan(plan_ppo, "ref.ema=0.25", "ref.offload=true")
    hook = Reallocation(source="actor", target="ref", eta=0.25)
    after = {call.name: call.post_hooks for call in found.calls}
    assert after["actor_train"] == (hook,)
    assert after["critic_train"] == ()
    assert [str(each) for each in after["ref_inf"]] == ["offload ref"]
    assert found.reallocations == (hook,)
    assert found.models["ref"].changes
    assert not found.models["ref"].trained
    assert Plan.from_json(found.to_json()) == found


def test_weights_for_external_servers_are_gathered_on_the_first_gpus(plan_ppo: Load) -> None:
    """Running servers have no GPUs and no cache in the plan."""
    running = "rollout.servers=[http://host:30000]"
    for backend, ranks in (("sglang", (0,)), ("vllm:t2", (0, 1))):
        settings = plan_ppo("actor.backend=fsdp:d4", f"rollout.backend={backend}", running)
        plan = make_plan(settings, scheduler="local")
        assert [group.name for group in plan.groups] == ["trainer"]
        assert plan.models["rollout"].ranks == ranks
        assert memories(settings)["rollout"].kv_cache == 0


@pytest.mark.parametrize(
    ("workers", "tp", "per_host"),
    [
        (16, [], 8),
        (12, [4], 4),
        (12, [2], 6),
        (13, [], 1),
        (32, [16], 8),
        (10, [2], 2),
        (9, [1], 3),
    ],
)
def test_tensor_groups_stay_on_one_host(workers: int, tp: list[int], per_host: int) -> None:
    assert workers_per_host(workers, tp) == per_host


def test_tensor_group_across_two_hosts_is_reported(plan_ppo: Load) -> None:
    text = ("actor.backend=fsdp:d2", "critic.backend=megatron:t4", "critic.gpus=2-5")
    small = plan(plan_ppo, *text, "cluster.workers_per_host=3")
    assert split_over_hosts(small) == []  # it would fit into no host
    halves = plan(
        plan_ppo, *text, "ref.backend=fsdp:d2", "ref.gpus=6-7", "cluster.workers_per_host=4"
    )
    assert split_over_hosts(halves) == ["critic"]


@pytest.mark.parametrize(
    ("placement", "hosts"),
    [
        ({"actor": "0-7", "rollout": "8-11"}, {"actor": {0, 1}, "rollout": {2}}),
        ({"actor": "0-7", "rollout": "0-3"}, {"actor": {0, 1}, "rollout": {0}}),
        ({"actor": "4-7", "rollout": "0-3,8-11"}, {"actor": {1}, "rollout": {0, 2}}),
        ({"actor": "0-11", "rollout": "0,4,8"}, {"actor": {0, 1, 2}, "rollout": {0, 1, 2}}),
    ],
)
def test_roles_are_placed_on_the_hosts_of_their_gpus(
    plan_ppo: Load, placement: dict[str, str], hosts: dict[str, set[int]]
) -> None:
    """GPUs are numbered across hosts, of four GPUs here."""
    backends = {"actor": "fsdp", "rollout": "native"}
    given = [f"{role}.gpus={gpus}" for role, gpus in placement.items()]
    given += [
        f"{role}.backend={engine}:d{len(parse_gpus(placement[role]))}"
        for role, engine in backends.items()
    ]
    found = plan(plan_ppo, *given, "cluster.workers_per_host=4", "algorithm.batch_size=48")
    on = {role: {row.host for row in rows(found, found.models[role])} for role in hosts}
    assert on == hosts


def test_printed_rank_places_equal_the_topology(plan_ppo: Load) -> None:
    found = plan(plan_ppo, "actor.backend=megatron:d2t2p2c2")
    table = rows(found, found.models["actor"])
    places = [tuple(row.coordinates.values()) for row in table]
    assert places == sorted(places)
    assert len(set(places)) == 16
    assert [(row.host, row.gpu) for row in table] == [(rank // 8, rank % 8) for rank in range(16)]


def test_ranks_of_a_server_are_adjacent_gpus() -> None:
    assert place("vllm:d2t2p2", "").ranks == (0, 1, 4, 5, 2, 3, 6, 7)
    assert place("vllm:d2t1p2", "4-7").ranks == (4, 6, 5, 7)
    assert place("fsdp:d2", "6-7").ranks == (6, 7)


SINFO = """\
n1|idle|gpu:a100:8(S:0-1)|128|1031000
n2|down*|gpu:8|64+|1
n2|down*|gpu:8|64+|1
n3|mixed|gpu:h100:4,gpu:a100:2,shard:16
n4|idle|(null)|16|64000
"""


def test_cluster_resources_are_read_from_sinfo() -> None:
    assert cluster_hosts(SINFO) == [
        HostRow("n1", "idle", 8, 128, 1_031_000),
        HostRow("n2", "down*", 8, 64, 0),
        HostRow("n3", "mixed", 6, 0, 0),
        HostRow("n4", "idle", 0, 16, 64_000),
    ]


@pytest.mark.parametrize(
    ("overrides", "lacking"),
    [
        (("actor.backend=fsdp:d16",), []),
        (("actor.backend=fsdp:d32", "algorithm.n_minibatches=1"), ["needs 4 hosts with 8 GPUs"]),
        (("actor.backend=fsdp:d32", "algorithm.n_minibatches=1",
          "cluster.gpus_per_worker=0"), []),
        (("rollout.backend=sglang:d99t8",), []),
        (("cluster.slurm.gpu_directive=none", "actor.backend=fsdp:d16"), []),
    ],
)  # fmt: skip
def test_resources_that_the_cluster_lacks_are_reported(
    plan_ppo: Load, overrides: tuple[str, ...], lacking: list[str]
) -> None:
    settings = plan_ppo("cluster.gpus_per_worker=1", *overrides)
    hosts = dict.fromkeys(("trainer", "rollout"), cluster_hosts(SINFO))
    found = build.lacking(make_plan(settings, scheduler="slurm"), settings.config, hosts)
    assert len(found) == len(lacking)
    for line, part in zip(found, lacking, strict=True):
        assert part in line


def test_missing_sinfo_gives_no_finding(plan_ppo: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    settings = plan_ppo()
    assert build.ask_hosts(settings.config) is None
    assert build.lacking(make_plan(settings, scheduler="slurm"), settings.config, None) == []


def test_megatron_parallelism_settings_are_accepted(plan_ppo: Load) -> None:
    sizes = (
        "actor.backend=megatron",
        "actor.model.tensor_model_parallel_size=2",
        "actor.model.pipeline_model_parallel_size=2",
        "actor.model.expert_model_parallel_size=2",
        "cluster.hosts=2",
        "cluster.workers_per_host=8",
    )
    config = plan_ppo(*sizes, architecture=EXPERTS).config
    assert config.actor.backend == "megatron:(attn:d4t2p2|ffn:d2t2p2e2)"
    assert config.critic is not None
    assert config.critic.backend == config.actor.backend
    whole = "actor.model.expert_tensor_parallel_size=1"
    assert plan_ppo(*sizes, whole, architecture=EXPERTS).config.actor.backend == (
        "megatron:d4t2p2e2"
    )


def test_message_about_missing_gpus_explains_cpu_training(plan_ppo: Load) -> None:
    settings = plan_ppo("actor.backend=fsdp:d1")
    hosts = {"trainer": [HostRow("n1", "idle", 0)]}
    [line] = build.lacking(make_plan(settings, scheduler="slurm"), settings.config, hosts)
    assert line.startswith("the trainer group needs 1 host with 1 GPU, but the cluster has 0")
    assert line.endswith("compute on CPUs: cluster.gpus_per_worker=0")


def test_components_get_consecutive_gpus(plan_ppo: Load) -> None:
    text = "fsdp[actor]:d4|fsdp[ref]:t4+fsdp[critic]:d2+sglang[rollout]:d2"
    config = plan_ppo('actor.backend=""', f'allocation_mode="{text}"').config
    assert config.critic is not None
    assert config.ref is not None
    assert (config.actor.gpus, config.ref.gpus, config.critic.gpus) == ("", "", "4-5")
    assert config.rollout.gpus == "6-7"


@pytest.mark.parametrize(
    ("mode", "gpus", "actor"),
    [
        ("sglang.d2t2p1+d1t4p1", "4-7", "fsdp:t4"),
        ("d4+vllm.d2", "4-5", "fsdp:d4"),
        ("sglang.d4|d2t2", "0-3", "fsdp:d2t2"),
    ],
)
def test_settings_suggested_for_a_legacy_mode_are_accepted(
    plan_ppo: Load, mode: str, gpus: str, actor: str
) -> None:
    python = "rollout.python=/bin/sh"
    settings = plan_ppo('actor.backend=""', f"allocation_mode={mode}", python)
    assert (settings.config.rollout.gpus, settings.config.actor.backend) == (gpus, actor)
    assert settings.config.allocation_mode == ""
    spelled = settings.notes[0].partition("write instead: ")[2].replace(": ", "=").split(", ")
    again = plan_ppo(*spelled, python)
    assert again.config.model_dump() == settings.config.model_dump()
    keys = {one.key for one in again.missing}
    assert not any(key.startswith(("rollout", "allocation", "actor.backend")) for key in keys)


def test_servers_of_a_legacy_mode_run_in_rollout_tasks(plan_ppo: Load) -> None:
    mode = "allocation_mode=sglang.d2+d2"
    config = plan_ppo('actor.backend=""', mode, "rollout.tasks={}", "rollout.python=/bin/sh").config
    assert config.rollout.gpus == ""


@pytest.mark.parametrize("mode", ["sglang.d4+eval", "sglang:d4", "sglang.d4"])
def test_server_only_layout_is_accepted_for_evaluations(plan_ppo: Load, mode: str) -> None:
    evaluation = ("algorithm={name: evaluate, batch_size: 16}", "critic=", "ref=", "evaluation=")
    more = ('actor.backend=""', f"allocation_mode={mode}", "rollout.python=/bin/sh")
    config = plan_ppo(*evaluation, *more).config
    assert (config.actor.backend, config.rollout.backend) == ("fsdp:d4", "sglang:d4")
    assert config.rollout.gpus == "0-3"


def test_rlinf_rollout_settings_are_accepted(plan_ppo: Load) -> None:
    config = plan_ppo("rollout.backend=sglang", "rollout.tensor_parallel_size=4").config
    assert config.rollout.backend == "sglang:t4"

"""Checks of slurmrl with a tiny model of one family, which ``scripts/models`` runs."""

from __future__ import annotations

import json
import math
import os
import re
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from slurmrl.data.sample import SequenceSample
from slurmrl.engines.megatron.parts import MegatronModel
from slurmrl.errors import SlurmrlError
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_model import HFModel
from slurmrl.rollouts.generation.base import GenerationOptions
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from tests.distributed.engines.cases import Setup, make, model
from tests.pool import RankPool
from tests.support.decoder_folders import from_hf
from tests.support.families import VOCABULARY, tiny
from tests.support.generated import generate
from tests.support.held import NO_LIMIT, Hold
from tests.support.trials import ADDITION, Site, kill_one

TRIAL: Final = "family/1"
STEPS: Final = 2
LENGTHS: Final = (5, 1, 9, 12)
NEAR: Final = 1e-4
"""Largest difference of log-probabilities in float32."""
YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
}
"""Scaled rotations, without which SGLang on CPUs has no latent attention."""
PUBLISHED: Final[Mapping[str, Mapping[str, Any]]] = {
    "deepseek_v3": {
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "rope_theta": 10000.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "glm4_moe": {"first_k_dense_replace": 1},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "mtp_layers_block_type": ["attention", "moe"],
    },
    "qwen3_5_text": {"full_attention_interval": 2},
    "qwen3_next": {"full_attention_interval": 2},
}
"""Fields of published configs that servers read and transformers' classes lack."""
REASON: Final = 300
"""Maximum number of characters of a reason."""


class CheckError(Exception):
    """A check does not hold; the message is the reason."""


@dataclass(frozen=True)
class Family:
    """A tiny random model of a family, in a folder for trials."""

    name: str
    folder: Path
    servers: Mapping[str, str]
    """Python of each kind of server."""
    sites: dict[str, Site] = field(default_factory=dict)
    """Roots of the trials, by name."""
    results: dict[str, Any] = field(default_factory=dict)
    """Results, or errors, of trials that several columns need."""
    automatic: ClassVar[Any] = AutoModelForCausalLM
    """transformers' automatic class of the family's models."""

    @cached_property
    def source(self) -> Path:
        """The model's folder, as transformers saves it."""
        torch.manual_seed(0)
        config = AutoConfig.for_model(**tiny(self.name))
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(self.folder / "source")
        return self.folder / "source"

    @cached_property
    def served(self) -> Path:
        """The folder of a model that servers on CPUs can load."""
        folder, values = self.folder / "served", tiny(self.name)
        torch.manual_seed(0)
        changes = {"rope_parameters": YARN} if values.get("kv_lora_rank") else {"head_dim": 32}
        config = AutoConfig.for_model(**tiny(self.name, **changes))
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(values | PUBLISHED.get(self.name, {})))
        return folder

    @cached_property
    def values(self) -> dict[str, Any]:
        """The object in ``config.json``."""
        read: dict[str, Any] = json.loads((self.source / "config.json").read_text())
        return read

    @cached_property
    def reference(self) -> Any:
        """transformers' model of the folder."""
        return self.loaded(self.source)

    def loaded(self, folder: Path) -> Any:
        """Return transformers' model of a folder."""
        model, report = self.automatic.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        if wrong := {kind: sorted(names)[:3] for kind, names in report.items() if names}:
            raise CheckError(f"transformers reports {wrong} in the files")
        return model.eval()

    @cached_property
    def model(self) -> HFModel:
        """slurmrl's model of the folder."""
        config = HFConfig.from_hf(self.values)
        return HFModel(config, "lm", source=self.source, seed=0, dtype=torch.float32)

    @torch.no_grad()
    def agrees(self, logp: torch.Tensor) -> None:
        """Raise CheckError if ``logp`` [T] differ from transformers' values for each sequence."""
        for ids, found in zip(sequences()[0].split(LENGTHS), logp.split(LENGTHS), strict=True):
            if len(ids) > 1:
                exact = self.reference(ids[None]).logits[0, :-1].log_softmax(-1)
                wanted = exact.gather(1, ids[1:, None])[:, 0]
                near(found[1:], wanted, "log-probabilities of slurmrl and transformers")

    def site(self, name: str) -> Site:
        """Return a new root folder for trials."""
        folder = self.folder / name.replace(":", "-")
        folder.mkdir()
        self.sites[name] = Site(folder)
        return self.sites[name]

    def losses(self, layout: str) -> list[float]:
        """Return the losses of two steps of SFT."""

        def run() -> list[float]:
            steps = finished(self.site(layout), self.config(actor={"backend": layout}))
            return [step["loss"] for step in steps]

        losses: list[float] = self._once(layout, run)
        return losses

    def undisturbed(self) -> None:
        """Run two steps of GRPO."""

        def run() -> None:
            site = self.site("grpo")
            Hold(site).allow(NO_LIMIT)
            of_generation(finished(site, Hold(site).judged(self.grpo())))

        self._once("grpo", run)

    def _once(self, name: str, run: Callable[[], Any]) -> Any:
        """Run a trial that several columns need; do not run a failed trial again."""
        if name not in self.results:
            try:
                self.results[name] = run()
            except Exception as error:  # noqa: BLE001 - raised for each column
                self.results[name] = error
        if isinstance(self.results[name], Exception):
            raise self.results[name]
        return self.results[name]

    def config(self, **changes: Any) -> dict[str, Any]:
        """Return the settings of two steps of SFT on two ranks."""
        actor = {
            "path": str(self.source),
            "tokenizer": str(ADDITION / "tokenizer"),
            "implementation": "hf",
            "backend": "fsdp:d2",
            "optimizer": {"lr": 1e-2},
            **changes.pop("actor", {}),
        }
        return {
            "experiment": "family",
            "total_steps": STEPS,
            "algorithm": {"name": "sft", "batch_size": 8},
            "cluster": {"gpus_per_worker": 0},
            "actor": actor,
            "dataset": {
                "type": "prompt_answer",
                "path": str(ADDITION / "train.jsonl"),
                "max_tokens": 32,  # Doge needs a limit
            },
            "checkpoint": {"every_steps": 1},
            **changes,
        }

    def grpo(self, **changes: Any) -> dict[str, Any]:
        """Return the settings of two steps of GRPO."""
        rollout = {"n": 4, "max_new_tokens": 6, **changes.pop("rollout", {})}
        return self.config(
            algorithm={"name": "grpo", "batch_size": 8, "n_minibatches": 2},
            dataset={
                "type": "prompt",
                "path": str(ADDITION / "train.jsonl"),
                "max_prompt_tokens": 16,  # Llama 4 needs a limit
            },
            rollout=rollout,
            **changes,
        )


def sequences() -> tuple[torch.Tensor, torch.Tensor]:
    """Return random sequences as packed ids [T] and their bounds [S + 1]."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (sum(LENGTHS),), generator=generator)
    ends = torch.nn.functional.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0))
    return ids, ends.to(torch.int32)


def near(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Raise CheckError if the values differ by more than `NEAR`, or one is not a number."""
    difference = float((found - wanted).abs().max())
    if not difference <= NEAR:
        raise CheckError(f"{what} differ by {difference:.1e}")


def load(family: Family) -> None:
    """slurmrl's model has the parameters of the folder."""
    wanted = dict(family.reference.named_parameters())
    for name, values in family.model.inner.named_parameters():
        if not torch.equal(values, wanted[name]):
            raise CheckError(f"{name} differs from the file")


@torch.no_grad()
def logits(family: Family) -> None:
    """A batch has the same log-probabilities as transformers for each single sequence."""
    ids, ends = sequences()
    features = family.model(ids, ends, max(LENGTHS))
    logp, _ = family.model.logprobs(features, ids, ends, temperature=1.0)
    family.agrees(logp)


@torch.no_grad()
def generation(family: Family) -> None:
    """Generated tokens have the log-probabilities of the training pass."""
    model, (ids, ends) = family.model, sequences()
    options = GenerationOptions(max_new_tokens=14, temperature=0.8, stop_token_ids=(3, 4))
    keys = torch.arange(len(LENGTHS))
    made = generate(model, ids, ends, options, seed=1, step=2, keys=keys)
    bounds = torch.nn.functional.pad(made.lengths.cumsum(0), (1, 0)).to(torch.int32)
    features = model(made.tokens, bounds, int(made.lengths.max()))
    logp, _ = model.logprobs(features, made.tokens, bounds, temperature=0.8)
    new = made.logprobs != 0
    if not new.any():
        raise CheckError("nothing was generated")
    near(logp[new], made.logprobs[new], "log-probabilities of generation and training")


def finished(site: Site, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run a trial to its end. Return the metrics of its steps. Raise CheckError if it fails."""
    file = str(site.write("family.yaml", config))
    done = site.slurmrl("submit", file, "--scheduler", "local", "--wait", code=None)
    if done.returncode:
        raise CheckError(said(site, done.stderr or done.stdout))
    steps = site.metrics(TRIAL)
    if len(steps) != STEPS:
        raise CheckError(f"the trial has {len(steps)} steps, not {STEPS}")
    return steps


def said(site: Site, text: str) -> str:
    """Return the first error in the trial's logs, or else in what a command printed."""
    logs = [log.read_text(errors="replace") for log in sorted(site.root.rglob("*.log"))]
    whole = [line.rstrip() for part in (*logs, text) for line in part.splitlines() if line.strip()]
    lines = [line.strip() for line in whole]
    raised = [
        f"{line} {below.strip()}" if below.startswith(" ") else line
        for line, below in zip(lines, [*whole[1:], ""], strict=True)
        if re.match(r"\w[\w.]*(Error|Exception|Failure)\b", line)
    ]
    refused = [line for line in lines if re.search("not allowed|cannot|required", line)]
    line = (raised or refused or lines or ["the trial failed"])[0]
    line = re.sub(r"^\S+:\d+: ", "", line)  # file and line of the configuration
    return re.sub(r"^.*\[master\].*?(rank \d+.*?): ", "", line)


def sft(family: Family) -> None:
    """Two steps of SFT have finite losses, which differ, because weights and rows do."""
    losses = family.losses("fsdp:d2")
    if losses[0] == losses[1] or not all(map(math.isfinite, losses)):
        raise CheckError(f"losses of two steps are {losses[0]} and {losses[1]}")


def export(family: Family) -> None:
    """transformers loads the export, which has the trained weights of the checkpoint."""
    family.losses("fsdp:d2")
    site = family.sites["fsdp:d2"]
    model, before = (
        family.loaded(newest(site, "exports")),
        dict(family.reference.named_parameters()),
    )
    held = model.state_dict()
    saved = RoleCheckpoint(newest(site, "checkpoints"), "actor")
    for name, _ in saved.weights():
        values = torch.from_numpy(saved.read(name)).float()
        if not torch.equal(held[name.removeprefix("inner.")], values):
            raise CheckError(f"{name} of the export differs from the checkpoint")
    if all(torch.equal(held[name], values) for name, values in before.items()):
        raise CheckError("training changed no weight")


def newest(site: Site, kind: str) -> Path:
    """Return the newest folder of a kind in the run directory."""
    folder: Path = getattr(site.paths(TRIAL), kind)
    return sorted(folder.iterdir())[-1]


def grpo(family: Family) -> None:
    """Two steps of GRPO with the trainers' own generation, whose log-probabilities agree."""
    family.undisturbed()


def of_generation(steps: list[dict[str, Any]]) -> None:
    """Raise CheckError if generation and training disagree about the probabilities of tokens."""
    ratio = max(abs(step["mismatch/ratio_max"] - 1) for step in steps)
    if not ratio <= 10 * NEAR:
        raise CheckError(
            f"probabilities of generation and training differ by a factor of {1 + ratio}"
        )


def resume(family: Family) -> None:
    """A trial whose worker is killed has the result of an undisturbed trial, bit by bit."""
    family.undisturbed()
    site = family.site("killed")
    hold = Hold(site)
    hold.allow(1)
    file = str(site.write("family.yaml", hold.judged(family.grpo())))
    site.slurmrl("submit", file, "--scheduler", "local", "--detach")
    site.wait_for_step(TRIAL, 1)
    kill_one(site.paths(TRIAL).run, "worker")
    hold.allow(NO_LIMIT)
    if (state := site.wait_for_end(TRIAL)["state"]) != "COMPLETED":
        raise CheckError(f"the killed trial is {state}")
    one, other = (each.outcome(TRIAL) for each in (family.sites["grpo"], site))
    wrong = [key for key, value in one.items() if value != other[key]]
    if wrong:
        raise CheckError(f"{', '.join(wrong)} differ after a kill")


def lora(family: Family) -> None:
    """Two steps of SFT with adapters, whose export PEFT loads and merges to the same model."""
    import peft

    site = family.site("lora")
    finished(site, family.config(actor={"lora": {"rank": 2, "alpha": 4}}))
    adapter = site.folder / "adapter"
    site.slurmrl("export", TRIAL, "--form", "adapter", "--out", str(adapter))
    merged = family.loaded(newest(site, "exports"))
    adapted = peft.PeftModel.from_pretrained(family.loaded(family.source), adapter).eval()
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        found, before = adapted(ids).logits, family.reference(ids).logits
        near(found, merged(ids).logits, "logits of PEFT and the merged export")
    if torch.equal(found, before):
        raise CheckError("training changed no adapter")


def t2(family: Family) -> None:
    """Two steps on two tensor ranks have the losses of two data-parallel ranks."""
    found, wanted = (torch.tensor(family.losses(layout)) for layout in ("fsdp:t2", "fsdp:d2"))
    near(found, wanted, "losses of t2 and d2")


def megatron(family: Family) -> None:
    """megatron-core's model has the log-probabilities of transformers."""
    MegatronModel.from_hf(family.values)
    ids = sequences()[0][:12]
    with RankPool() as pool:
        found = pool(1, "tests.support.family_checks:of_megatron", family.source, ids)[0]
    with torch.no_grad():
        exact = family.reference(ids[None]).logits[0, :-1].log_softmax(-1)
    near(found[1:], exact.gather(1, ids[1:, None])[:, 0], "log-probabilities of megatron-core")


def of_megatron(source: Path, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities [T] of one sequence by megatron-core's model on the CPU."""
    setup = Setup("megatron", model=model(architecture=None), source=source, split=[[0]])
    sample = SequenceSample.from_default([len(ids)], ["one"], {"input_ids": ids})
    return make(setup).forward(sample)["logp"]


def builtin(family: Family) -> None:
    """The built-in decoder has the log-probabilities of transformers."""
    decoder, (ids, ends) = from_hf(family.source), sequences()
    with torch.no_grad():
        logp, _ = decoder.logprobs(decoder(ids, ends, max(LENGTHS)), ids, ends, temperature=1.0)
    family.agrees(logp)


def sglang(family: Family) -> None:
    """Two steps of GRPO with completions of an SGLang server."""
    _served(family, "sglang")


def vllm(family: Family) -> None:
    """Two steps of GRPO with completions of a vLLM server."""
    _served(family, "vllm")


def _served(family: Family, kind: str) -> None:
    site = family.site(kind)
    Hold(site).allow(NO_LIMIT)
    rollout = {"backend": f"{kind}:d1", "gpus": "2", "python": family.servers[kind]}
    config = family.grpo(rollout=rollout, actor={"path": str(family.served)})
    of_generation(finished(site, Hold(site).judged(config)))


CHECKS: Final[Mapping[str, Callable[[Family], None]]] = {
    check.__name__: check
    for check in (
        load, logits, generation, sft, export, grpo, resume, lora, t2, megatron, builtin, sglang,
        vllm,
    )
}  # fmt: skip


def reason_of(error: BaseException, folder: Path) -> str:
    """Return an error as one line without paths of this machine."""
    text = str(error) if isinstance(error, CheckError | SlurmrlError) else ""
    text = text or f"{type(error).__name__}: {error}"
    lines = [line.strip() for line in text.replace(str(folder), "").splitlines() if line.strip()]
    line = re.sub(r"(/[\w.+-]+){2,}/?", "…", " ".join(lines[:2]))
    return line if len(line) <= REASON else f"{line[: REASON - 1]}…"


Checks = Mapping[str, Callable[[Any], None]]


def main(asked: Mapping[str, Any], kind: type[Family] = Family, checks: Checks = CHECKS) -> None:
    """Append an object with the name and the reason of each column to the file ``output``.

    ``asked`` has ``family``, ``folder``, ``columns``, ``servers``, ``output``, and ``errors``, the
    file of tracebacks.
    """
    with Path(asked["errors"]).open("w") as errors:
        for number in (1, 2):
            os.dup2(errors.fileno(), number)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    family = kind(asked["family"], Path(asked["folder"]), asked["servers"])
    for column in asked["columns"]:
        reason = ""
        try:
            checks[column](family)
        except Exception as error:  # noqa: BLE001 - transformers' classes may raise anything
            traceback.print_exc()
            reason = reason_of(error, family.folder)
        with Path(asked["output"]).open("a") as output:
            output.write(json.dumps({column: reason}) + "\n")

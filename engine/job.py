"""What every engine verb starts from: a loaded model, the documents of a workload, and what to write about both.

Leaves out Hydra: settings arrive as plain mappings.
"""

import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from specdial.engine.cache import round_up
from specdial.engine.drafters.summaries import MOST_COMMITTED
from specdial.engine.free_memory import free_bytes, free_host_bytes
from specdial.engine.history import HistorySpec
from specdial.engine.memory import Demand, cache_of, predict, require, require_host
from specdial.engine.models.eagle import EagleHead
from specdial.engine.partial_cache import places
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.engine.verification import CUDA_RECOMPUTED_MULTIPLE, chosen_pages, kept_tokens
from specdial.engine.weights import LoadedModel, load_model
from specdial.engine.weights.eagle import load_head
from specdial.engine.workloads import Document, WorkloadSpec, build, of_split
from specdial.kernels import Backend
from specdial.policies.drafting import OWN_PAGE
from specdial.policies.errors import UserError
from specdial.policies.fields import setting
from specdial.policies.placement import Where
from specdial.policies.schema import Policy
from specdial.policies.verification import LOOKAHEAD


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model, where and how. source: see `load_model`; name: what outputs call it."""

    source: str
    name: str = ""
    shape: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    seed: int = setting(0, low=0, high=(1 << 32) - 1)


@dataclass(frozen=True, slots=True)
class Job:
    """A model and the documents it will decode. draft_models, heads: those that policies named so far, loaded once."""

    model: LoadedModel
    name: str
    spec: WorkloadSpec
    documents: list[Document]
    draft_models: dict[str, LoadedModel] = field(default_factory=dict)
    heads: dict[str, EagleHead] = field(default_factory=dict)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a document: none when the workload ignores the end mark."""
        return frozenset() if self.spec.ignore_eos else frozenset(self.model.tokenizer.eos_ids)

    def drafting(self, policies: Iterable[Policy]) -> dict[str, LoadedModel]:
        """The draft models that policies name, each loaded when first asked for. Errors: see `load_draft_models`."""
        named = list(policies)
        load_draft_models(self.model, named, self.draft_models)
        return {name: self.draft_models[name] for name in sorted(draft_model_names(named))}

    def sequences(
        self, documents: list[Document], policies: list[Policy], *, copies: int = 0, room_tokens: int = 0
    ) -> Sequences:
        """Prefilled sequences with room for every policy's drafts.

        room_tokens: and for documents of that length, which they may be prefilled with later.
        copies: of a single sequence so many copies are to be made beside it (`Sequences.repeated`): see to it that
        they will fit. Raises UserError past the model's context, and before it allocates more memory than is free.
        """
        longest = max(room_tokens, *(len(d.prompt_ids) + d.new_tokens for d in documents))
        s = empty_sequences(
            self.model, longest, len(documents), policies, copies=copies, draft_models=self.draft_models,
            heads=self.heads,
        )  # fmt: skip
        s.prefill([d.prompt_ids for d in documents], [d.new_tokens for d in documents], self.stop_ids)
        return s


def load_job(model: ModelSettings, workload: Mapping[str, Any], split: str = "all") -> Job:
    """Load the model and build the documents of a split: train, validation, test, several joined by +, or all.

    Raises UserError on anything unusable.
    """
    spec = WorkloadSpec.from_mapping(workload)  # first, since a model takes long to load
    loaded = load_model(model.source, device=model.device, dtype=model.dtype, seed=model.seed)
    loaded.config.check_context(spec.context_tokens + spec.new_tokens)
    built = build(spec, loaded.tokenizer)
    chosen = {d.index: d for part in split.split("+") for d in of_split(built, part)}
    return Job(loaded, model.name or loaded.config.name, spec, [chosen[index] for index in sorted(chosen)])


def load_draft_models(target: LoadedModel, policies: list[Policy], loaded: dict[str, LoadedModel]) -> None:
    """Add to `loaded` the draft models that policies name and it lacks, beside the target in its dtype.

    Raises UserError for one that cannot be loaded, or whose tokens mean something else.
    """
    for name in sorted(draft_model_names(policies) - loaded.keys()):
        draft = load_model(name, device=target.decoder.device, dtype=target.decoder.dtype)
        if not draft.tokenizer.same_ids(target.tokenizer):
            raise UserError(
                f"draft model {name} ({draft.config.name}) and target {target.config.name} number their tokens "
                "differently",
                "draft with a model of the same family",
                field="drafter.model",
            )
        loaded[name] = draft


def load_heads(target: LoadedModel, policies: list[Policy], loaded: dict[str, EagleHead]) -> None:
    """Add to `loaded` the EAGLE heads that policies name and it lacks. Errors: see `load_head`."""
    for name in sorted(draft_model_names(policies, "eagle") - loaded.keys()):
        loaded[name] = load_head(name, target.decoder)


def draft_model_names(policies: list[Policy], kind: Literal["model", "eagle"] = "model") -> set[str]:
    """The draft models, or EAGLE heads, that these policies name."""
    return {v.drafter.model for p in policies if p.k_max > 0 for v in p.variants() if v.drafter.kind == kind}


def empty_sequences(
    model: LoadedModel,
    longest_tokens: int,
    batch: int,
    policies: list[Policy],
    *,
    copies: int = 0,
    draft_models: dict[str, LoadedModel] | None = None,
    heads: dict[str, EagleHead] | None = None,
) -> Sequences:
    """Sequences with room for `longest_tokens` and every policy's drafts. copies, errors: see `Job.sequences`.

    draft_models, heads: those loaded already; the policies' other ones are added.
    """
    loaded = {} if draft_models is None else draft_models
    load_draft_models(model, policies, loaded)
    loaded_heads = {} if heads is None else heads
    load_heads(model, policies, loaded_heads)
    named_heads = {name: loaded_heads[name] for name in sorted(draft_model_names(policies, "eagle"))}
    companions = {name: loaded[name].decoder for name in sorted(draft_model_names(policies))}
    for config in (model.config, *(decoder.config for decoder in companions.values())):
        config.check_context(longest_tokens)
    demand = memory_demand(model, longest_tokens, batch, policies)
    others = [*(d.config for d in companions.values()), *(head.config.layer for head in named_heads.values())]
    beside = replace(demand, history=None, selected=0, float8=False, kv_where="device", gathered=0)
    demands = [demand, *(replace(beside, config=c) for c in others)]
    free = free_bytes(model.decoder.device) - summary_bytes(demand, max(batch, copies), policies)
    for name in draft_model_names([p for p in policies if any(v.drafter.budget for v in p.variants())]):
        free -= _page_bytes(replace(beside, config=companions[name].config), max(batch, copies), OWN_PAGE)
    free_host = free_host_bytes(Path("/"))
    for wanted in (batch, copies) if copies else (batch,):
        kept = require_host(replace(demand, batch=wanted), free_host)
        free_host -= kept
        free -= kept if demand.backend == "reference" else 0  # on a CPU it is the same memory
        for one in demands:
            free -= require(replace(one, batch=wanted), free).to_allocate
    return Sequences(
        model.decoder,
        demand.capacity_tokens,
        batch,
        history=demand.history,
        backend=demand.backend,
        companions=companions,
        heads=named_heads,
        kv_where=demand.kv_where,
    )


def summary_bytes(demand: Demand, batch: int, policies: list[Policy]) -> int:
    """Of the page summaries that policies drafting by quest or verifying by page bound keep, two keys a page.

    And of the draft models' attention, a score a key and draft step, that a verification by lookahead reads.
    """
    variants = [v for p in policies if p.k_max > 0 for v in p.variants()]
    partial = [v for v in variants if not v.verify_kv.lossless]
    pages = {v.draft_kv.page for v in variants if v.drafter.kind == "quest"}
    pages |= {v.verify_kv.page for v in partial if v.verify_kv.source == "page_bound"}
    steps = max((v.k_max for v in partial if v.verify_kv.source in LOOKAHEAD), default=0)
    scores = 4 * steps * batch * demand.capacity_tokens  # float32
    return sum(_page_bytes(demand, batch, page) for page in pages) + scores


def _page_bytes(demand: Demand, batch: int, page: int) -> int:
    """Of summaries of pages of so many keys: two keys a page."""
    return predict(replace(demand, batch=batch, kv_where="device", gathered=0)).kv_cache // page


def most_recomputed(policies: list[Policy]) -> int:
    """Most rows that a full round puts in front of its own: all that the partial rounds before may have committed."""
    k = max(p.k_max for p in policies)
    partial = [v.verify_kv for p in policies if p.k_max > 0 for v in p.variants() if not v.verify_kv.lossless]
    return round_up(max((kv.most_uncorrected(k) for kv in partial), default=0), CUDA_RECOMPUTED_MULTIPLE)


def memory_demand(model: LoadedModel, longest_tokens: int, batch: int, policies: list[Policy]) -> Demand:
    """What to predict the memory of such sequences from."""
    variants = [v for p in policies if p.k_max > 0 for v in p.variants()]
    selections = [v.draft_kv.resolved(longest_tokens) for v in variants]
    selections += [v.verify_kv.keys for v in variants if not v.verify_kv.lossless]
    demand = Demand(
        config=model.config,
        dtype=model.decoder.dtype,
        backend=backend_for(model.decoder.device),
        batch=batch,
        longest_tokens=longest_tokens,
        k_max=max(p.slots for p in policies),
        history=history_spec(policies),
        selected=max((kv.budget for kv in selections), default=0),
        float8=any(v.drafter.weights == "fp8" for p in policies if p.k_max for v in p.variants()),
        recomputed=min(most_recomputed(policies), longest_tokens),
        kv_where=kv_where(policies),
    )
    return replace(demand, gathered=gathered_keys(policies, cache_of(demand).capacity_tokens))


def kv_where(policies: list[Policy]) -> Where:
    """Where the target's keys are to live; policies that draft nothing decode wherever the others want them.

    Raises UserError where policies that draft want different things.
    """
    wanted = {p.kv.where for p in policies if p.k_max > 0} or {p.kv.where for p in policies}
    if len(wanted) > 1:
        raise UserError(f"policies with different kv.where {sorted(wanted)}", "run them separately")
    return wanted.pop()


def gathered_keys(policies: list[Policy], capacity_tokens: int) -> int:
    """Keys per kv head that such policies gather on the device, from a cache of this capacity in host memory."""
    found: dict[object, int] = {}
    for p in policies:
        for v in p.variants() if p.k_max > 0 and p.kv.where == "host" else ():
            if not v.verify_kv.lossless:
                chosen = chosen_pages(v.verify_kv, capacity_tokens) * v.verify_kv.page
                found[v.verify_kv, p.k_max] = places(chosen, v.verify_kv.page, kept_tokens(v.verify_kv, p.k_max))
            if v.drafter.kind == "sparse_self":
                kv = v.draft_kv.resolved(capacity_tokens)
                found[kv] = places(min(kv.budget, capacity_tokens), kv.page, MOST_COMMITTED)
    return sum(found.values())


def backend_for(device: torch.device | str) -> Backend:
    """The one place that chooses kernels: Triton on a CUDA device, the torch references elsewhere."""
    return "triton" if torch.device(device).type == "cuda" else "reference"


def history_spec(policies: list[Policy]) -> HistorySpec | None:
    """The history that these policies draft or verify by; None when none does.

    Raises UserError where they need different ones: its pages are those of draft_kv and of verify_kv.
    """
    variants = [v for p in policies if p.k_max > 0 for v in p.variants()]
    kvs = [v.draft_kv for v in variants if v.drafter.kind == "sparse_self"]
    specs = [HistorySpec(kv.window, kv.page, kv.decay) for kv in kvs]
    specs += [HistorySpec(v.draft_kv.window, v.verify_kv.page) for v in variants if verifies_by_window(v)]
    for name in ("window", "page", "decay"):
        values = {getattr(spec, name) for spec in specs}
        if len(values) > 1:
            raise UserError(f"policies with different draft_kv.{name} {sorted(values)}", "run them separately")
    return specs[0] if specs else None


def verifies_by_window(variant: Policy) -> bool:
    """Does a policy verify partially by the windowed history?"""
    kv = variant.verify_kv
    return not kv.lossless and kv.source in ("history", "hybrid") and not variant.scoring_heads.target


def describe(job: Job, sampling: Sampling, policies: Iterable[Policy] = ()) -> dict[str, Any]:
    """The model, workload, documents and sampling of a job, as meta.json carries them, and policies' draft models."""
    policies = list(policies)
    draft_models = {name: model.digest for name, model in job.drafting(policies).items()}
    load_heads(job.model, policies, job.heads)
    draft_models |= {name: job.heads[name].digest for name in sorted(draft_model_names(policies, "eagle"))}
    c, decoder = job.model.config, job.model.decoder
    return {
        "model": {
            "name": job.name,
            "digest": job.model.digest,
            "origin": job.model.origin,
            "random": job.model.random,
            "architecture": c.architecture,
            "layers": c.layers,
            "kv_heads": c.kv_heads,
            "vocab": c.vocab,
            "max_context_tokens": c.max_context_tokens,
            "dtype": str(decoder.dtype).removeprefix("torch."),
            "weight_bytes": decoder.weight_bytes,
            "kv_bytes_per_token": 2 * c.layers * c.kv_heads * c.head_dim * decoder.dtype.itemsize,
        },
        **({"draft_models": draft_models} if draft_models else {}),
        "tokenizer_digest": job.model.tokenizer.digest,
        "workload": {name: getattr(job.spec, name) for name in type(job.spec).__slots__},
        "documents": [
            {
                "doc": d.index,
                "name": d.name,
                "split": d.split,
                "prompt_tokens": len(d.prompt_ids),
                "new_tokens": d.new_tokens,
            }
            for d in job.documents
        ],
        "sampling": {name: getattr(sampling, name) for name in Sampling.__slots__},
        "graph_mode": "passes" if decoder.device.type == "cuda" else "none",
    }


def hardware(device: torch.device | str) -> dict[str, Any]:
    """What the numbers were measured on."""
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "device": "cuda",
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "driver": _driver(),
        }
    return {"device": "cpu", "name": _cpu_name(), "threads": torch.get_num_threads(), "cores": os.cpu_count()}


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _driver() -> str:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            return file.readline().strip()
    except OSError:
        return "unknown"

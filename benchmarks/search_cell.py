"""What the search benchmarks share: documents, a dense record and a cost table of them, on one loaded model.

Every step is the verb's own `run`. Leaves out searching and measuring.
"""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

from _engine_bench import check
from prediction_cell import timed
from prediction_documents import check_batch, documents, spec_of
from prediction_policies import K_MAX

from specdial.engine.job import Job
from specdial.engine.verbs import calibrate, record
from specdial.engine.weights import load_model
from specdial.policies.fields import to_plain
from specdial.policies.schema import DraftKV, plain_policy


@dataclass(frozen=True, slots=True)
class Cell:
    """Documents of a workload in `job`, files under `folder`. a: the script's arguments; about: facts on the texts."""

    job: Job
    folder: Path
    settings: dict
    a: object
    about: dict

    @classmethod
    def load(cls, a, contexts, folder):
        """Load the model and the documents of all contexts, the longest first, numbered on."""
        model = load_model(a.model, device="cpu" if a.dry else "cuda")
        check(model.config, model.decoder.device, model.decoder.dtype)
        name, found = Path(a.model).stem, []
        model.config.check_context(max(contexts) + a.new_tokens)
        for context in sorted(contexts, reverse=True):
            spec = spec_of(a.workload, context, a.train, a.test, a.new_tokens)
            some, about = documents(a, model, a.workload, context, spec)
            found += [replace(d, index=len(found) + i) for i, d in enumerate(some)]
        spec = spec_of(a.workload, max(contexts), a.train, a.test, a.new_tokens)
        settings = {"model": {"source": a.model, "name": name}, "workload": to_plain(spec)}
        return cls(Job(model, name, spec, found), folder, settings, a, about)

    @property
    def trace(self):
        return self.folder / "trace"

    @property
    def costs(self):
        return self.folder / "costs"

    def of(self, split):
        return [d for d in self.job.documents if d.split == split]

    def groups(self, batch, context=None):
        """Test documents that decode together: whole batches. Raises UserError where there are none."""
        test = [d for d in self.of("test") if context in (None, len(d.prompt_ids))]
        train = [d for d in self.of("train") if context in (None, len(d.prompt_ids))]
        check_batch(batch, train, test)
        return [test[i : i + batch] for i in range(0, len(test) - batch + 1, batch)]


def record_dense(cell, splits, clock):
    """Draft every position of the documents of some splits, at every budget."""
    some = [d for d in cell.job.documents if d.split in splits]
    policy = {**to_plain(plain_policy()), "draft_kv": _selection(cell)}
    dense = {"split": "+".join(splits), "dense": True, "budgets": cell.a.budgets, "k_max": K_MAX}
    with clock.stage(f"record {len(some)} documents"):
        record.run(
            {**cell.settings, "policy": policy, **dense, "out": str(cell.trace)}, replace(cell.job, documents=some)
        )


def time_rounds(cell, contexts, batches, clock):
    """Calibrate at these contexts and at where their documents end, on the first train document and its output.

    Raises UserError where no whole batches can be made.
    """
    for context, batch in itertools.product(contexts, batches):
        cell.groups(batch, context)
    ends = [context + more for context in sorted(contexts) for more in (0, cell.a.new_tokens)]
    ranges = {
        "contexts": ends,
        "batches": batches,
        "ks": cell.a.ks,
        "budgets": cell.a.budgets,
        "draft_kv": _selection(cell),
    }
    with clock.stage("calibrate"):
        calibrate.run({**cell.settings, **ranges, "repeats": cell.a.calibrations, "out": str(cell.costs)}, timed(cell))


def _selection(cell):
    return to_plain(DraftKV(budget=cell.a.budgets[0], page=cell.a.page))

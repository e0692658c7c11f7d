"""Faults seeded into the source, one at a time, and whether the module's own tests catch them.

A fault is one changed comparison, operator, number, condition, or `min` for `max`. Only the module's tests below run,
in a process forked from one that has the libraries imported, the changed source put in at import. A module whose tests
fail unchanged is left out and named. The last line on standard output is one JSON document with the survivors;
--save keeps it in benchmarks/results/mutation.json, one record a seed.

    python tests/soak/mutation.py --faults 60
"""

import argparse
import ast
import copy
import datetime
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import platform
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "mutation.json"
CPU_SECONDS = 60  # a fault that makes its tests run longer is caught
LIBRARIES = ("torch", "numpy", "scipy.stats", "pyarrow.parquet", "hypothesis", "pytest", "yaml", "gguf", "tokenizers")
TESTS = {
    "policies/controllers/rate.py": "policies/test_controllers.py policies/test_rules.py policies/test_settings.py",
    "policies/controllers/simple.py": "policies/test_controllers.py policies/test_rules.py policies/test_settings.py",
    "policies/drafting.py": "policies/test_drafting.py policies/test_settings.py",
    "policies/verification.py": "policies/test_verification.py policies/test_settings.py",
    "policies/schema.py": "policies/test_schema.py policies/test_settings.py policies/test_drafting.py "
    "policies/test_verification.py policies/test_placement.py",
    "policies/fields.py": "policies/test_fields.py policies/test_settings.py",
    "policies/file.py": "policies/test_file.py policies/test_file_trust.py",
    "policies/artifact.py": "policies/test_artifact.py",
    "policies/naming.py": "policies/test_naming.py",
    "policies/exporters/lowering.py": "policies/test_exporters.py policies/test_exporters_profile.py",
    "policies/exporters/loss.py": "policies/test_exporters_loss.py",
    "simulator/analytic.py": "simulator/test_analytic.py",
    "simulator/acceptance.py": "simulator/test_acceptance.py",
    "simulator/costs.py": "simulator/test_costs.py simulator/test_drafters.py simulator/test_lossy.py",
    "simulator/pricing.py": "simulator/test_pricing.py simulator/test_costs.py simulator/test_drafters.py "
    "simulator/test_lossy.py simulator/test_replay.py",
    "simulator/tally.py": "simulator/test_tally.py simulator/test_lossy.py simulator/test_replay.py",
    "simulator/arr.py": "simulator/test_arr.py",
    "engine/sampling.py": "engine/test_sampling.py",
    "engine/cache.py": "engine/test_cache.py",
    "engine/recorder.py": "engine/test_recorder.py",
    "engine/memory.py": "engine/test_memory.py "
    "engine/test_offload.py::test_predicted_device_bytes_are_those_of_the_buffers "
    "engine/test_offload.py::test_too_little_host_memory_is_one_line_with_the_longest_that_fits",
    "engine/history.py": "engine/test_history.py kernels/test_history.py engine/test_at_rest.py",
    "engine/weights/gguf_header.py": "engine/test_weights_gguf.py engine/test_weights_errors.py",
    "engine/workloads/packing.py": "engine/workloads/test_packing.py engine/workloads/test_contract.py "
    "engine/workloads/test_errors.py engine/workloads/test_overlap.py",
}
COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}


def faults(tree: ast.Module) -> Iterator[tuple[ast.AST, Callable[[ast.AST], ast.AST]]]:
    """(node, what to make of it) of every fault there is."""
    for node in executed(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
            yield node, lambda n: changed(n, ops=[COMPARED[type(n.ops[0])](), *n.ops[1:]])
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            yield node, lambda n: changed(n, op=OPERATORS[type(n.op)]())
            yield node, lambda n: n.left  # the right term is dropped
        elif isinstance(node, ast.BoolOp):
            yield node, lambda n: changed(n, op=ast.Or() if isinstance(n.op, ast.And) else ast.And())
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, lambda n: n.operand
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield node, lambda n: ast.Constant(n.value + 1)
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield node, lambda n: ast.Constant(not n.value)
        elif isinstance(node, ast.Name) and node.id in NAMES:
            yield node, lambda n: changed(n, id=NAMES[n.id])
        elif isinstance(node, ast.Attribute) and node.attr in NAMES:
            yield node, lambda n: changed(n, attr=NAMES[n.attr])


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that decide what happens: no annotations, decorators, messages of errors, or parts of texts."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "exc"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield child
                yield from executed(child)


def changed(node: Any, **fields: Any) -> Any:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def faulty(source: str, number: int) -> tuple[str, int, str, str]:
    """(source with that fault, its line, the code before, the code after)."""
    tree = ast.parse(source)
    node, change = list(faults(tree))[number]
    new = ast.copy_location(change(node), node)
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is node:
                setattr(parent, name, new)
            elif isinstance(value, list) and any(item is node for item in value):
                setattr(parent, name, [new if item is node else item for item in value])
    return ast.unparse(ast.fix_missing_locations(tree)), node.lineno, ast.unparse(node), ast.unparse(new)


class Swapped(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one module from other source."""

    def __init__(self, module: str, source: str) -> None:
        self.module, self.source, self.file = module, source, ROOT / module
        parts = ["specdial", *Path(module).with_suffix("").parts]
        super().__init__(".".join(parts[:-1] if parts[-1] == "__init__" else parts), str(self.file))

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_file_location(name, self.file, loader=self) if name == self.name else None

    def get_code(self, fullname: str) -> Any:
        return compile(self.source, str(self.file), "exec")


def caught(module: str, source: str) -> bool:
    """Do the module's tests fail with this source in its place?"""
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            sys.meta_path.insert(0, Swapped(module, source))
            import pytest

            files = [str(ROOT / "tests" / name) for name in TESTS[module].split()]
            options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not gpu and not model"]
            os._exit(min(int(pytest.main([*options, f"--rootdir={ROOT}", *files])), 1))
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1] != 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modules", nargs="*", default=list(TESTS))
    parser.add_argument("--save", action="store_true", help="merge into benchmarks/results/mutation.json")
    options = parser.parse_args()
    for library in LIBRARIES:
        importlib.import_module(library)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    chance, done, survivors, red = random.Random(options.seed), 0, [], []
    share = -(-options.faults // len(options.modules))
    for module in options.modules:
        source = (ROOT / module).read_text()
        if caught(module, source):
            red.append(module)
            continue
        places = range(len(list(faults(ast.parse(source)))))
        for number in chance.sample(places, min(share, len(places))):
            new, line, before, after = faulty(source, number)
            found, done = caught(module, new), done + 1
            print(
                f"{'caught' if found else 'SURVIVED'} {module}:{line} {before} -> {after}", file=sys.stderr, flush=True
            )
            if not found:
                survivors.append(f"{module}:{line} {before} -> {after}")
    result = record(options.seed, done, survivors, red)
    if options.save:
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        kept = [row for row in kept if row["id"] != result["id"]] + [result]
        RESULTS.write_text(json.dumps(sorted(kept, key=lambda row: row["seed"]), indent=1) + "\n")
    print(json.dumps(result))


def record(seed: int, done: int, survivors: list[str], red: list[str]) -> dict[str, Any]:
    """One record in the results' form."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "id": f"mutation-seed{seed}",
        "case": "seeded faults in policies, simulator and engine that the module's own tests catch",
        "value": round(1 - len(survivors) / max(done, 1), 3),
        "unit": "frac",
        "seed": seed,
        "faults": done,
        "caught": done - len(survivors),
        "survivors": survivors,
        "not_green": red,
        "hardware": "cpu",
        "versions": {"python": platform.python_version()},
        "command": f"python3 {' '.join([str(Path(__file__).relative_to(ROOT)), *sys.argv[1:]])}",
        "commit": head.stdout.strip() or "unknown",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    main()

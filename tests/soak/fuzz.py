"""Damaged and hostile files for every reader: each gives what was meant or a UserError of one line, and nothing else.

Nothing else means: no other exception, no process started, no connection, no file written but by this script, no
memory beyond LIMIT_BYTES. Edits are drawn by chance; guided.py lets them follow what the readers' code does. The last
line on standard output is one JSON document with the counts.

    python tests/soak/fuzz.py --inputs 100000
"""

import argparse
import contextlib
import json
import os
import random
import resource
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _targets import Target, targets

from specdial.policies.errors import UserError

LIMIT_BYTES = 2 << 30
FINE = ("read", "refused")


def judge(target: Target, data: bytes) -> str:
    """Read the file that `data` makes: "read", "refused", or else what happened and where."""
    target.path.write_bytes(target.edit(target.seed, data))
    try:
        target.read()
    except UserError as error:
        return "refused" if "\n" not in str(error) and error.remedy else f"not a line with a remedy: {error!r}"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}: {error}"[:300]
    return "read"


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[list[str]]:
    """What files have no business doing: starting processes, connecting, writing anywhere but in `folder`."""
    deeds: list[str] = []
    watching = [True]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not watching:
            return
        if event.split(".")[0] in ("subprocess", "socket", "pty") or event in (
            "os.system",
            "os.exec",
            "os.posix_spawn",
        ):
            deeds.append(f"{event} {arguments!r}"[:200])
        elif event == "open" and isinstance(arguments[0], str) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            deeds.extend([f"writes {arguments[0]}"] * (not arguments[0].startswith((str(folder), "/dev/"))))

    sys.addaudithook(hook)
    try:
        yield deeds
    finally:
        watching.clear()


def by_chance(target: Target, inputs: int, seed: int) -> Counter[str]:
    """Outcomes of so many inputs of random bytes, few edits more often than many."""
    chance = random.Random(seed)
    return Counter(judge(target, chance.randbytes(chance.choice((4, 4, 8, 12, 24)))) for _ in range(inputs))


def by_atheris(target: Target, inputs: int, seed: int) -> Counter[str]:
    """The same in a process of its own, which libFuzzer ends; counts come back through a file."""
    import atheris

    told, child = target.path.parent / "counts.json", os.fork()
    if child == 0:
        counts: Counter[str] = Counter()

        def one(data: bytes) -> None:
            counts[judge(target, data)] += 1
            told.write_text(json.dumps(counts))

        atheris.Setup([sys.argv[0], f"-runs={inputs}", f"-seed={seed + 1}", "-max_len=32", "-verbosity=0"], one)
        atheris.Fuzz()
    if os.waitpid(child, 0)[1]:
        raise AssertionError(f"atheris found a crash in {target.path.name}; see above")
    found = Counter(json.loads(told.read_text()))
    told.unlink()
    return found


def main(run: Callable[[Target, int, int], Counter[str]] = by_chance) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="the name of one target")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = {n: t for n, t in targets(folder).items() if options.only in ("", n)}
        resource.setrlimit(resource.RLIMIT_AS, (address_space() + LIMIT_BYTES, resource.RLIM_INFINITY))
        total, counts = sum(t.share for t in found.values()), {}
        with watched(folder) as deeds:
            for label, target in found.items():
                inputs = -(-options.inputs * target.share // total)
                print(f"{label}: {inputs} inputs", file=sys.stderr, flush=True)
                counts[label] = run(target, inputs, options.seed)
                target.path.write_bytes(target.seed)
    inputs = sum(sum(c.values()) for c in counts.values())
    faults = {f"{label}: {what}": n for label, c in counts.items() for what, n in c.items() if what not in FINE}
    faults |= {f"a file made its reader do this: {deed}": 1 for deed in deeds}
    counts = {label: {what: c[what] for what in FINE} for label, c in counts.items()}
    result = {
        "id": "fuzz",
        "inputs": inputs,
        "by": run.__name__,
        "seed": options.seed,
        "targets": counts,
        "faults": faults,
    }
    print(json.dumps(result))
    sys.exit(1 if faults else 0)


def address_space() -> int:
    """Bytes of address space this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()

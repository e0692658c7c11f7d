"""Mooncake's request traces: JSON lines of {timestamp, input_length, output_length, hash_ids}.

timestamp is the arrival in milliseconds, hash_ids the blocks of 512 tokens that prompts share. Lengths alone are read;
input_tokens and output_tokens are taken for the same, as other producers write them. Requests without output are
passed over.

Sources: Mooncake README, FAST25-release/traces (Qin et al., Mooncake, FAST 2025, section 4); AIPerf docs, "Trace replay
with Mooncake traces", and dynamo-data-gen's mooncake module, for the aliases.
"""

from pathlib import Path

from specdial.simulator.importers.lengths import Lengths
from specdial.simulator.importers.lines import MOST_TOKENS, json_lines


def read(path: Path) -> list[Lengths]:
    """Lengths of every request. Raises UserError naming the first bad line."""
    found = []
    for line in json_lines(path):
        names = [b if line.get(a) is None else a for a, b in NAMES]
        context, new = (line.whole(name, high=MOST_TOKENS) for name in names)
        if context and new:
            found.append(Lengths(context, new))
    return found


NAMES = (("input_length", "input_tokens"), ("output_length", "output_tokens"))

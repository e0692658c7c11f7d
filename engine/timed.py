"""A whole run of prefilled sequences as what is timed wants it: no garbage is collected, and no graph captured.

Leaves out what the times are for (validate, the search benchmarks) and runs cut at some length (calibrate_bench).
"""

from specdial.engine.garbage import uncollected
from specdial.engine.loop import Decoding
from specdial.engine.round import Round
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.policies.schema import Policy


def decode(
    sequences: Sequences, policy: Policy, sampling: Sampling, numbers: list[int], *, synthetic: tuple[float, ...] = ()
) -> list[Round]:
    """The rounds from the prompts to every output's end. numbers, synthetic: as `Decoding` takes them."""
    sequences.rewind()
    decoding = Decoding(sequences, policy, sampling, numbers, synthetic=synthetic)
    with uncollected():
        return list(decoding.rounds())


def decode_captured(
    sequences: Sequences, policy: Policy, sampling: Sampling, numbers: list[int], *, synthetic: tuple[float, ...] = ()
) -> list[Round]:
    """The same, again until a run has captured no graph: a first use of one is no measurement."""
    while True:
        captured_us = sequences.graphs.capturing_us
        rounds = decode(sequences, policy, sampling, numbers, synthetic=synthetic)
        if captured_us == sequences.graphs.capturing_us:
            return rounds

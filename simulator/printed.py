"""Speeds that papers print, from the closed form of simulator.analytic and what else they print.

SparseSpec-L prints a table over fixed k: two costs fitted to all of it must give every row. Dustin prints one row (8B
shape, batch 16, 32k tokens): that fixes one number, what a round costs in plain steps, and its speed follows from it by
construction, to the rounding of its tokens a verification. What is learned is that number: drafts and a verification
over 512 keys took .88 of a plain step of its own baseline.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specdial.simulator.analytic import fit_two_costs, speedup

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Reproduced:
    """Printed and recomputed tokens/s, [n], and the costs they were recomputed from, in plain steps."""

    printed: Floats
    recomputed: Floats
    draft: float | None  # of one drafted token; None where a row does not tell it from the verification
    round: Floats  # [n] of a whole round

    @property
    def worst_frac(self) -> float:
        return float(np.abs(self.recomputed / self.printed - 1.0).max())


def sparsespec_l() -> Reproduced:
    """Its table of accepted tokens and tokens/s for fixed k, plain decoding at 3.71 tokens/s."""
    plain = 3.71
    k = np.array([4.0, 8.0, 12.0, 16.0, 20.0])
    accepted = np.array([3.66, 6.75, 9.16, 11.31, 13.01])
    printed = np.array([7.81, 8.89, 9.99, 9.90, 9.75])
    draft_s, verify_s = fit_two_costs(k, (accepted + 1.0) / printed)
    recomputed = speedup(accepted / k, k, draft_s / verify_s, verify_s * plain) * plain
    return Reproduced(printed, recomputed, draft_s * plain, (k * draft_s + verify_s) * plain)


def dustin() -> Reproduced:
    """Plain decoding at 67.4 tokens/s, Dustin at 213.6 with 2.8 tokens a verification, which may be 2.75 or 2.85."""
    plain, printed, tokens = 67.4, 213.6, 2.8
    round_steps = tokens * plain / printed  # a round yields `tokens` a sequence, a plain step one
    rounded = np.array([tokens - 0.05, tokens + 0.05])
    recomputed = speedup(1.0, rounded - 1.0, 0.0, round_steps) * plain
    return Reproduced(np.full(2, printed), recomputed, None, np.full(2, round_steps))

"""Entropy against acceptance: how sure the drafter was, how often it was right, and whether the model of it holds."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specdial.simulator.acceptance import (
    FEATURES,
    Calibration,
    RateFit,
    calibration,
    fit_hazard,
    fit_rate,
    judged_drafts,
)
from specdial.simulator.lanes import Record, has_signals
from specdial.simulator.report.inputs import Inputs
from specdial.simulator.report.section import Figure, Json, Section, chart, fold, key, layout, number, pair, rule, table

NEEDS = "specdial record workload=book dense=true out=runs/book"
TITLE = "Entropy and acceptance"
EDGES = np.array([0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, np.inf])
LEAST = 5  # drafts in a bin that is shown
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bin:
    """Drafts whose entropy lies in one range. low, high: 95 % Wilson interval of the acceptance rate."""

    start: float
    stop: float
    entropy: float
    count: int
    rate: float
    low: float
    high: float


def section(inputs: Inputs) -> Section:
    """Acceptance by entropy with the fitted curve; reliability on documents that the fit has not seen."""
    record = inputs.record
    judged = judged_drafts(record) if record is not None and has_signals(record.trace) else None
    if record is None or judged is None or not len(judged.label):
        return Section("entropy", TITLE, needs=NEEDS)
    entropy = judged.features[:, FEATURES.index("entropy_nats")]
    right, wrong = _mean(entropy, judged.label), _mean(entropy, 1.0 - judged.label)
    score = _held_out(record)
    figures = [_rates(bins(entropy, judged.label), fit_rate(record, 0))]
    lead = f"Of {len(entropy):,} judged drafts {judged.label.mean():.0%} were accepted. "
    if right is not None and wrong is not None:
        lead += f"Accepted drafts had {right:.2f} nats on average, rejected ones {wrong:.2f}."
    charts = [chart(figures[0], "Acceptance by entropy of the draft", "Bars: 95 % intervals. Larger dot: more drafts.")]
    if score is not None:
        figures.append(_reliability(score))
        caption = (
            f"Fitted on train, scored on other documents, 95 % bars: expected calibration error "
            f"{score.expected_calibration_error:.3f}, log-loss {score.log_loss:.3f} "
            f"(the mean alone {score.base_log_loss:.3f})."
        )
        charts.append(chart(figures[1], "Predicted against seen acceptance", caption))
    else:
        charts.append(
            '<p class="needs">No calibration: the trace has no train documents, or none besides. '
            "Record more with <code>split=train+validation</code></p>"
        )
    marks = [("dot", "drafts seen"), ("line ink", "fitted curve of arm 0"), ("line dotted", "as predicted")]
    html = key(*marks) + pair(*charts)
    html += fold("Numbers", _table(bins(entropy, judged.label)))
    return Section("entropy", TITLE, lead, html, tuple(figures))


def bins(entropy: Floats, label: Floats) -> list[Bin]:
    """Drafts by entropy; bins with few drafts are left out. label: accepted, or its probability when sampled."""
    place = np.digitize(entropy, EDGES) - 1
    found = []
    for i in range(len(EDGES) - 1):
        mine = place == i
        n = int(mine.sum())
        if n < LEAST:
            continue
        rate = float(label[mine].mean())
        low, high = _wilson(rate, n)
        found.append(Bin(float(EDGES[i]), float(EDGES[i + 1]), float(entropy[mine].mean()), n, rate, low, high))
    return found


def _wilson(rate: float, n: int) -> tuple[float, float]:
    """95 % score interval of a rate seen n times (Wilson, 1927)."""
    z2 = 1.96**2
    middle = (rate + z2 / (2 * n)) / (1 + z2 / n)
    half = 1.96 * np.sqrt(rate * (1 - rate) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, float(middle - half)), min(1.0, float(middle + half))


def _bars(found: list[tuple[float, float, float]]) -> Json:
    """Error bars of (rate, low, high)."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - rate for rate, _, high in found],
        "arrayminus": [rate - low for rate, low, _ in found],
        "color": "@accent",
        "thickness": 1.5,
        "width": 0,
    }


def _mean(values: Floats, weights: Floats) -> float | None:
    return float((values * weights).sum() / weights.sum()) if weights.sum() else None


def _held_out(record: Record) -> Calibration | None:
    splits = set(record.documents.split.tolist())
    others = sorted(splits - {"train"}, key=lambda name: name != "validation")
    if "train" not in splits or not others:
        return None
    fitted, held = judged_drafts(record, "train"), judged_drafts(record, others[0])
    if not len(fitted.label) or not len(held.label):
        return None
    return calibration(fit_hazard(fitted).probability(held.features), held.label)


def _rates(found: list[Bin], fit: RateFit | None) -> Figure:
    most = max((b.count for b in found), default=1)
    dots = {
        "type": "scatter",
        "mode": "markers",
        "x": [b.entropy for b in found],
        "y": [b.rate for b in found],
        "customdata": [b.count for b in found],
        "error_y": _bars([(b.rate, b.low, b.high) for b in found]),
        "marker": {
            "color": "@accent",
            "size": [6 + 10 * (b.count / most) ** 0.5 for b in found],
            "line": {"width": 1, "color": "@paper"},
            "opacity": 1,
        },
        "hovertemplate": "%{x:.2f} nats: %{y:.1%} of %{customdata} drafts<extra></extra>",
    }
    data = [dots]
    if fit is not None:
        x = np.linspace(0.0, max((b.entropy for b in found), default=1.0), 60)
        y = 1.0 / (1.0 + np.exp(-(fit.bias - fit.slope * x)))
        line = {"color": "@ink", "width": 1.5}
        curve = {"type": "scatter", "mode": "lines", "x": x.tolist(), "y": y.tolist(), "line": line}
        data.insert(0, {**curve, "hoverinfo": "skip"})
    drawn = layout(
        "entropy of the draft, nats",
        "",
        yaxis={"range": [0, 1.03], "tickformat": ".0%", "dtick": 0.25},
        xaxis={"range": [-0.15, 1.05 * max((b.entropy for b in found), default=1.0)]},
    )
    return Figure("chart-entropy", "Share of accepted drafts against their entropy", data, drawn)


def _reliability(score: Calibration) -> Figure:
    most = max(count for _, _, count in score.reliability)
    dots = {
        "type": "scatter",
        "mode": "markers",
        "x": [predicted for predicted, _, _ in score.reliability],
        "y": [seen for _, seen, _ in score.reliability],
        "customdata": [count for _, _, count in score.reliability],
        "error_y": _bars([(seen, *_wilson(seen, count)) for _, seen, count in score.reliability]),
        "marker": {
            "color": "@accent",
            "size": [6 + 10 * (count / most) ** 0.5 for _, _, count in score.reliability],
            "line": {"width": 1, "color": "@paper"},
            "opacity": 1,
        },
        "hovertemplate": "predicted %{x:.1%}, seen %{y:.1%}<br>%{customdata} drafts<extra></extra>",
    }
    share = {"range": [-0.02, 1.03], "tickformat": ".0%", "dtick": 0.25}
    drawn = layout(
        "predicted acceptance",
        "",
        xaxis=share,
        yaxis=share,
        shapes=[rule((0, 1), (0, 1))],
    )
    return Figure("chart-calibration", "Seen against predicted acceptance", [dots], drawn)


def _table(found: list[Bin]) -> str:
    rows = [
        [
            f"{b.start:g} to {b.stop:g}" if np.isfinite(b.stop) else f"above {b.start:g}",
            f"{b.count:,}",
            f"{b.rate:.1%}",
            f"{b.low:.0%} to {b.high:.0%}",
            number(b.entropy),
        ]
        for b in found
    ]
    return table(["entropy, nats", "drafts", "accepted", "95 %", "mean entropy"], rows)

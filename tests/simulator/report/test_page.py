"""The page without a browser: whole, self-contained, every policy labelled, honest about what it has no data for."""

import importlib.util
import json
import re
from html.parser import HTMLParser

import pytest

from specdial.policies.errors import UserError
from specdial.simulator.pricing import TERMS
from specdial.simulator.report import breakdown, entropy, front, study
from specdial.simulator.report.inputs import read_inputs
from specdial.simulator.report.page import SECTIONS, build_page
from specdial.simulator.report.theme import DARK, LIGHT
from specdial.simulator.verbs import report

VOID = {"meta", "br", "link"}


class Tree(HTMLParser):
    """Checks that tags close in order, and keeps ids and the text of each section."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.sections, self.scripts, self.section = [], [], {}, [], None
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        assert not {"src", "href"} & set(attrs) or attrs["href"].startswith("#"), attrs
        self.ids += [attrs["id"]] if "id" in attrs else []
        if tag == "section":
            self.section = attrs["id"]
            self.sections[self.section] = ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.section = None if tag == "section" else self.section

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.section:
            self.sections[self.section] += data + " "


def figures_of(tree):
    return json.loads(tree.scripts[0])["figures"]


def test_the_page_is_whole_and_reaches_for_nothing(page):
    tree = Tree(page)
    assert len(tree.ids) == len(set(tree.ids))
    assert list(tree.sections) == list(SECTIONS)
    ours = page.replace(tree.scripts[1], "")  # plotly.js names addresses that only maps use; the policy forbids them
    assert "plotly.js v" in tree.scripts[1][:100]
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", ours.replace("// Draws", "").replace("// Paper", ""))
    assert "default-src 'none'" in ours


def test_figures_have_data_places_and_known_colours(page):
    tree = Tree(page)
    figures = figures_of(tree)
    assert {name.split("-")[1] for name in figures} == {
        *("breakdown", "speedup", "tail", "entropy", "calibration", "composed", "fixed", "front", "measured", "lossy"),
        "heads",
    }
    for name, figure in figures.items():
        assert name in tree.ids
        assert all(len(trace.get("x", trace.get("z", []))) for trace in figure["data"]), name
    colours = set(re.findall(r'"@([a-z-]+)"', tree.scripts[0])) - {"font"}
    assert colours <= set(LIGHT)
    assert set(LIGHT) == set(DARK)
    assert set(breakdown.WORDS) == set(TERMS)
    assert {breakdown._color(term) for term in TERMS} <= set(LIGHT)


def test_lossless_and_lossy_are_labelled_and_apart(page):
    tree = Tree(page)
    rows = re.findall(r"<tr>(.*?)</tr>", page.split('id="measured"')[1].split("</section>")[0])[1:]
    kinds = [re.findall(r'class="tag (\w+)"', row) for row in rows]
    assert kinds == [["lossless"], ["lossless"], ["lossy"]]  # not ranked together, fast as the lossy one is
    assert "&lt;i&gt;odd" in rows[1]  # what files say is text, never markup
    parts = figures_of(tree)["chart-measured"]["data"]
    assert [(len(part["x"]), part["marker"]["symbol"]) for part in parts] == [(2, "circle"), (1, "diamond-open")]
    assert parts[1]["error_y"]["array"] == pytest.approx([0.1])
    lossy = figures_of(tree)["chart-lossy"]["data"]
    assert [part["x"] for part in lossy] == [[0.98], [0.97]]  # predicted, measured
    assert lossy[1]["error_x"]["array"] == pytest.approx([0.01])
    assert '<td class="num">1</td><td class="num">40</td><td class="num">95.0%</td>' in page
    assert '<td class="num">0.9876</td>' in page
    assert "lossless" not in tree.sections["lossy"]
    for section in ("inversion", "surface", "breakdown"):
        assert "lossless" in tree.sections[section]


def test_bars_say_their_batch_and_recorded_rounds_of_another_are_left_out(runs):
    inputs = read_inputs({}, str(runs))
    alone = breakdown.section(inputs)
    assert "recorded" in alone.html
    assert "batch" not in alone.html + json.dumps(alone.figures[0].plain())
    for outcome in (*inputs.json("replay")["outcomes"], *map(inputs.json("tune").get, ("best", "best_fixed"))):
        outcome["batch"] = 4
    together = breakdown.section(inputs)
    assert "The recorded rounds are left out: they are at batch 1, and no policy here is." in together.html
    ticks = together.figures[0].layout["yaxis"]["ticktext"]
    assert "fixed-4, batch 4, lossless" in ticks
    assert not any("recorded" in tick for tick in ticks)
    assert "fixed-4, batch 4" in together.figures[0].narrow["yaxis"]["ticktext"]
    inputs.json("replay")["outcomes"].append({**inputs.json("replay")["outcomes"][1], "batch": 1})
    both = breakdown.section(inputs)
    ticks = both.figures[0].layout["yaxis"]["ticktext"]
    for at in ("fixed-4, batch 4", "fixed-4, batch 1", "recorded, batch 1"):
        assert f"{at}, lossless" in ticks
    assert "left out" not in both.html
    assert both.figures[0].layout["shapes"] == []  # plain decoding's line is of one batch


def test_a_policy_of_the_front_is_drawn_at_other_batches_too():
    def tried(batch, speedup):
        values = {"train": {"speedup": speedup, "kv_bytes_per_token": 5}}
        policy = {"policy_digest": "a", "params": {}, "level": "exact"}
        return {"values": values, "lossless": True, "batch": batch, **policy}

    rest, drawn = front._figure([tried(1, 1.2), tried(4, 1.1)]).data
    assert (rest["y"], drawn["y"]) == ([1.1], [1.2])


def test_a_front_for_each_kind():
    def tried(speedup, kv, lossless):
        values = {"train": {"speedup": speedup, "kv_bytes_per_token": kv}}
        return {"values": values, "lossless": lossless, "policy_digest": f"{speedup}"}

    found = front.fronts([tried(1.0, 5, True), tried(1.2, 9, True), tried(1.1, 9, True), tried(2.0, 1, False)])
    speedups = {kind: [t["values"]["train"]["speedup"] for t in each] for kind, each in found.items()}
    assert speedups == {True: [1.2, 1.0], False: [2.0]}  # the lossy one beats all, and dominates none


def test_a_trials_kind_follows_from_what_was_searched():
    def kind(params, **axes):
        return study.is_lossless({"settings": {"search": {"verify_kv": axes} if axes else {}}}, {"params": params})

    assert kind({})
    assert kind({}, mode=["full"], full_period=[8])
    assert not kind({}, mode=["partial"], full_period=[8])
    assert kind({"verify_kv.mode": "full"}, mode=["partial", "full"], full_period=[8])
    assert not kind({"verify_kv.mode": "partial"}, mode=["full", "partial"], full_period=[4])
    assert kind({"verify_kv.mode": "partial", "verify_kv.full_period": 1}, mode=["full", "partial"], full_period=[4, 1])


def test_hatched_where_k_is_0_and_synthetic_data_say_so(page):
    data = figures_of(Tree(page))["chart-fixed"]
    cells, hatch = data["data"][0], [part for part in data["data"] if part["type"] == "bar"]
    plain = sum("k = 0" in hover for row in cells["customdata"] for hover in row)
    assert plain == sum(len(part["x"]) for part in hatch)
    assert "Read with care: random weights" in page


DAMAGE = [("validation/validation.json", "policies", "measured"), ("tune/study.json", "tried", "front")]


@pytest.mark.parametrize(("file", "lost", "section"), DAMAGE)
def test_a_file_without_what_it_should_hold_is_told_in_one_line(runs, tmp_path, file, lost, section):
    pytest.importorskip("plotly")
    folder = tmp_path / "x"
    folder.mkdir()
    content = json.loads((runs / file).read_text())
    del content[lost]
    (folder / file.split("/")[1]).write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"no section {section} can be made of .*KeyError '{lost}'") as caught:
        build_page(read_inputs({}, str(folder)))
    assert "\n" not in str(caught.value)


def test_sections_without_data_name_the_verb(runs):
    pytest.importorskip("plotly")
    page, sections = build_page(read_inputs({"costs": str(runs / "costs")}, None))
    empty = {section.name: section.needs for section in sections if section.needs}
    assert set(empty) == set(SECTIONS) - {"provenance"}
    tree = Tree(page)
    assert figures_of(tree) == {}
    for name, needs in empty.items():
        assert needs.startswith("specdial ")
        assert needs in tree.sections[name]


def test_bins_of_entropy_by_hand():
    nats = entropy.np.array([0.05] * 10 + [3.5] * 3)
    (only,) = entropy.bins(nats, entropy.np.array([1.0] * 8 + [0.0] * 5))  # three drafts are too few
    assert (only.count, only.rate) == (10, 0.8)
    assert (only.low, only.high) == pytest.approx((0.490, 0.943), abs=1e-3)  # Wilson, 8 of 10


def test_refused_in_a_line(runs, tmp_path, monkeypatch):
    def refused(words, **settings):
        with pytest.raises(UserError, match=words):
            report.run({"out": str(tmp_path / "r.html"), **settings})
        assert list(tmp_path.glob("r.*")) == []

    refused("nothing to report on")
    refused("not an HTML file", out=str(tmp_path / "r.pdf"))
    refused("is not a directory", runs=str(tmp_path / "nowhere"))
    refused("has schema .*replay", tune=str(runs / "replay" / "replay.json"))
    refused("cannot read", replay=str(runs / "heads"))
    other = tmp_path / "other"
    other.mkdir()
    content = json.loads((runs / "validation" / "validation.json").read_text())
    (other / "validation.json").write_text(json.dumps({**content, "model": {"name": "x", "digest": "1"}}))
    refused("another one", runs=str(runs), validation=str(other))
    (tmp_path / "both").mkdir()
    for name in ("a", "b"):
        (tmp_path / "both" / name).symlink_to(runs / "heads")
    refused("two of kind heads: a, b", runs=str(tmp_path / "both"))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "plotly" else find(name))
    refused("needs plotly, which is not installed", runs=str(runs))

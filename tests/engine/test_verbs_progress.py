"""Progress of long verbs: a bar on a terminal, a plain line now and then elsewhere, and how decoding goes in words."""

import sys
from dataclasses import dataclass, field

import numpy as np
import pytest

from specdial.engine import progress as decoding
from specdial.engine import round as engine_round
from specdial.engine.progress import Pace, progress, text_view, watched
from specdial.policies import progress as module


class Terminal:
    """A stream that says it is a terminal, and keeps what is drawn."""

    encoding = "utf-8"

    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text
        return len(text)

    def flush(self):
        pass


@pytest.fixture
def terminal(monkeypatch):
    """terminal("stdout") puts a terminal there and returns it."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def make(name):
        made = Terminal()
        monkeypatch.setattr(sys, name, made)
        return made

    return make


@dataclass
class Round:
    """Two sequences, one of them finished: 4 drafts, 3 accepted, 4 tokens in 100 ms."""

    k: np.ndarray = field(default_factory=lambda: np.array([4, 0]))
    accepted: np.ndarray = field(default_factory=lambda: np.array([3, 0]))
    active: np.ndarray = field(default_factory=lambda: np.array([True, False]))
    emitted: tuple = ([5, 6, 7, 8], [])
    draft_us: float = 50e3
    verify_us: float = 40e3
    select_us: float = 4e3
    host_us: float = 6e3
    spent_us = engine_round.Round.spent_us  # of the four times above


WORDS = "40.0 tokens/s, alpha 0.75, k 4"


def test_lines_elsewhere_come_only_now_and_then(capsys, monkeypatch):
    with progress("record", 3) as bar:
        bar.advance(1)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(module, "LINE_INTERVAL_S", -1.0)
    with progress("record", 3) as bar:
        bar.say("early")
        bar.advance(1, "document 7")
        bar.advance(2)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["record 0/3 early", "record 1/3 document 7, about 0 s left", "record 3/3 document 7"]


def test_the_time_left_is_what_the_steps_took(capsys, monkeypatch):
    now = iter([0.0, 100.0, 100.0, 100.0, 200.0, 200.0, 200.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    with progress("tune", 4) as bar:
        bar.advance(1, "best speedup 1.2")
        bar.advance(2)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["tune 1/4 best speedup 1.2, about 5 min left", "tune 3/4 best speedup 1.2, about 67 s left"]


def test_a_line_is_said_at_once_where_something_long_begins(capsys, monkeypatch):
    """And the time before the total was known does not count."""
    now = iter([0.0, 10.0, 20.0, 22.0, 22.0, 22.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    with progress("heads", 0) as bar:
        bar.say("loading", now=True)
        bar.expect(4)
        bar.advance()
        bar.say("ranking", now=True)
    assert capsys.readouterr().err.splitlines() == ["heads loading", "heads 1/4 ranking, about 6 s left"]


def test_a_bar_may_learn_its_total_late(terminal):
    screen = terminal("stderr")
    with progress("heads", 0) as bar:
        bar.say("loading")
        bar.expect(4)
        bar.advance(3)
        bar.say("ranking", now=True)
        bar._live.refresh()
    assert "3/4" in screen.text


def test_a_terminal_gets_a_bar_that_cleans_up_after_an_error(capsys, terminal):
    screen = terminal("stderr")

    def fail():
        with progress("validate", 4) as bar:
            bar.advance(2, "plain [b]")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        fail()
    assert "validate" in screen.text
    assert "plain [b], about 0 s left" in screen.text
    assert screen.text.rstrip().endswith(("\x1b[?25h", "\x1b[2K", "\x1b[1A\x1b[2K"))  # cursor shown, line cleared
    assert capsys.readouterr().out == ""


def test_pace_counts_the_time_of_rounds_alone():
    pace = Pace()
    for _ in range(3):
        pace.add(Round())
    assert str(pace) == WORDS
    plain = Pace()
    plain.add(Round(k=np.array([0, 0]), accepted=np.array([0, 0]), emitted=([5], [])))
    assert str(plain) == "10.0 tokens/s, k 0"


def test_watched_rounds_pass_untouched(capsys, monkeypatch):
    monkeypatch.setattr(module, "LINE_INTERVAL_S", -1.0)
    monkeypatch.setattr(decoding, "EVERY_S", -1.0)
    rounds = [Round(), Round()]
    with progress("record", 2) as bar:
        assert list(watched(iter(rounds), bar, Pace())) == rounds
    assert capsys.readouterr().err.splitlines() == [f"record 0/2 {WORDS}"] * 2


def shown(total=8):
    with text_view(total) as view:
        view.write("drafted", drafted=True)
        view.write(" own", drafted=False)
        view.count(Round())


def test_text_is_tinted_on_a_terminal_and_its_title_tells(terminal, monkeypatch):
    monkeypatch.setattr(decoding, "EVERY_S", -1.0)
    screen = terminal("stdout")
    shown()
    assert "\x1b[36mdrafted\x1b[39m own" in screen.text
    assert f"\x1b]2;4/8 tokens, {WORDS}, 0 s left\x07" in screen.text
    assert screen.text.startswith("\x1b[22;2t")
    assert screen.text.endswith("\x1b[23;2t")  # the old title is back


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_without_colours_gets_text_alone(terminal, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    screen = terminal("stdout")
    shown()
    assert screen.text == "drafted own"


def test_a_file_gets_text_alone(capsys, monkeypatch):
    monkeypatch.setattr(module, "LINE_INTERVAL_S", -1.0)
    shown()
    found = capsys.readouterr()
    assert found.out == "drafted own"
    assert found.err == f"run 4/8 {WORDS}, about 0 s left\n"

"""Progress of long verbs: a bar on a terminal, a plain line now and then elsewhere, nothing on standard output."""

import sys

from specdial.engine import progress as module
from specdial.engine.progress import progress


class Terminal:
    """A standard error that says it is a terminal, and keeps what is drawn."""

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


def test_lines_elsewhere_come_only_now_and_then(capsys, monkeypatch):
    with progress("record", 3) as bar:
        bar.advance(1)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(module, "LINE_INTERVAL_S", -1.0)
    with progress("record", 3) as bar:
        bar.advance(1, "document 7")
        bar.advance(2)
    assert capsys.readouterr() == ("", "record 1/3 document 7\nrecord 3/3\n")


def test_a_terminal_gets_a_bar_that_cleans_up_after_an_error(capsys, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    try:
        with progress("validate", 4) as bar:
            bar.advance(2, "plain")
            raise RuntimeError("stop")
    except RuntimeError:
        drawn = terminal.text
    assert "validate" in drawn
    assert drawn.rstrip().endswith(("\x1b[?25h", "\x1b[2K", "\x1b[1A\x1b[2K"))  # cursor shown, line cleared
    assert capsys.readouterr().out == ""

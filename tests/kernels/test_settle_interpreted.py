"""Runs the interpreter's cases of settling a round in a process of its own."""


def test_settle_in_the_interpreter(in_interpreter) -> None:
    in_interpreter(__file__, "interpreted_settle.py")

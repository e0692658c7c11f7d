"""Runs the interpreter's cases of partial verification in a process of their own."""


def test_partial_verification_in_the_interpreter(in_interpreter) -> None:
    in_interpreter(__file__, "interpreted_partial.py")

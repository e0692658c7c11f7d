"""Runs the interpreter's cases of the skinny product in a process of its own."""


def test_linear_in_the_interpreter(in_interpreter) -> None:
    in_interpreter(__file__, "interpreted_linear.py")

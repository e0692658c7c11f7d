"""Runs the interpreter's cases in a process that chose the interpreter before importing Triton."""


def test_kernels_in_the_interpreter(in_interpreter) -> None:
    in_interpreter(__file__, "interpreted_full_attention.py")

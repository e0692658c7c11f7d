"""Runs the interpreter's cases of the small operations of a round in a process of their own."""


def test_kernels_in_the_interpreter(in_interpreter) -> None:
    in_interpreter(
        __file__,
        "interpreted_norm.py",
        "interpreted_rope_cache.py",
        "interpreted_settle.py",
        "interpreted_swiglu.py",
        "interpreted_token_statistics.py",
    )

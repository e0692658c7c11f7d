"""Runs the interpreter's cases of drafters in a process of their own."""


def test_drafters_in_the_interpreter(in_interpreter) -> None:
    in_interpreter(__file__, "interpreted_drafters.py", "interpreted_doctor.py")

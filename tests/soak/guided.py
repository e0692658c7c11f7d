"""fuzz.py with the readers' code instrumented, so that edits follow what they reach. Needs atheris."""

import atheris

with atheris.instrument_imports(include=["specdial"]):
    import fuzz

if __name__ == "__main__":
    fuzz.main(fuzz.by_atheris)

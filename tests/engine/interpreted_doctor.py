"""Runs in the process of test_drafters_interpreted: the Triton kernels of `doctor` against their references."""

import torch

from specdial.engine.self_test import CASES, backend_of, run_kernels


def test_every_kernel_that_the_interpreter_takes_agrees():
    device = torch.device("cpu")
    assert backend_of(device) == "triton"
    trials = {trial.kernel: trial for trial in run_kernels(device, torch.float32)}
    clock = trials.pop("timestamp")
    assert not clock.ok  # a GPU's timer: the fault is told in a line, and stops nothing
    assert clock.fault
    assert set(trials) == set(CASES) - {"timestamp"}
    assert [trial for trial in trials.values() if not trial.ok] == []
    assert any(trial.error > 0 for trial in trials.values())  # not the references compared with themselves

"""A few of the rounds that `make soak` plays by the ten thousand."""


def test_batches_and_policies_take_turns_and_outputs_stay_right(script, tmp_path, one_thread):
    found = script("soak").soak(50, "cpu", 1, tmp_path)
    assert found["rounds"] >= 50
    assert found["wrong"] == 0

"""A collection of Python's garbage stays out of what is timed."""

import gc

import pytest

from specdial.engine.garbage import collected


def test_what_was_there_is_walked_no_more_and_comes_back() -> None:
    old = [{} for _ in range(1000)]
    walked = len(gc.get_objects())
    with collected():
        assert gc.get_freeze_count() > walked // 2
        made: list[object] = []
        made.append(made)
        del made
        assert gc.collect() > 0  # garbage made meanwhile is found
        assert not any(found is old for found in gc.get_objects())
    assert gc.get_freeze_count() == 0
    assert any(found is old for found in gc.get_objects())


def test_an_error_thaws() -> None:
    with pytest.raises(ValueError, match="within"), collected():
        raise ValueError("within")
    assert gc.get_freeze_count() == 0

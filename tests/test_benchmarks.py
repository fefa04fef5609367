"""The hand-written loops of the benchmarks compute what stock `fit` computes."""

import numpy as np
import pytest

from benchmarks import by_hand
from benchmarks.models import bounded_cases
from benchmarks.own_step import credit_case

CASES = [bounds.case for bounds in bounded_cases()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_loop_by_hand_ends_with_the_loss_of_stock_fit(case):
    """An unshuffled epoch of the jitted and of the scanned loop gives the loss of stock `fit`."""
    case = case.cut(by_hand.K + 4)  # one whole stack and a part of one
    by_hand.check(
        case,
        {
            "jit": by_hand.jitted(case.build(), case),
            "scan": by_hand.scanned(case.build(), case),
        },
    )


def test_a_loop_by_hand_runs_a_step_of_its_own():
    """The credit experiment's step gives the loss that it gives in stock `fit`."""
    case = credit_case()
    by_hand.check(case, {"jit": by_hand.jitted(case.build(), case)})


def test_another_computation_is_noticed():
    """A loop whose loss differs by more than float32 explains is refused by name."""
    case = CASES[0].cut(4)
    with pytest.raises(AssertionError, match="the loop 'other' ends with the loss"):
        by_hand.check(case, {"other": lambda shuffle: 0.5})


def test_rows_are_shuffled_anew_in_each_epoch():
    """Two shuffled epochs from the same weights would differ; so do two in a row from one model."""
    case = CASES[0].cut(8)
    one, other = (by_hand.jitted(case.build(), case) for _ in range(2))
    assert not np.isclose(one(shuffle=False), other(shuffle=True), rtol=1e-7)

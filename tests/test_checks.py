"""Exercises refuse the answers that look right: the typical mistakes beyond the one in wrong_answers/."""

import pytest

import attnlab as lab
from crafted import gathered

MISTAKES = gathered("MISTAKES")


@pytest.mark.parametrize("name, number", [(name, i) for name in MISTAKES for i in range(len(MISTAKES[name]))])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_plausible_mistake_is_wrong(name, number):
    answer = getattr(lab, f"check_{name}")(MISTAKES[name][number])
    assert answer.state == "wrong", answer
    assert answer.rows and len(answer.hint) > 20

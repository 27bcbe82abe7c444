"""The number of files that a change needs (``benchmarks/touch.py``)."""

import pytest

from bridle.bench.touch import CASES, measure

pytestmark = pytest.mark.loop


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_change_touches_no_more_files_than_its_limit(case):
    touched = measure(case)
    assert touched.within, touched.files
    assert set(touched.users) == case.users

"""Whatever is in a file, its parser reads it or refuses it in its own words. More by scripts/dev/fuzz.py."""

import pytest
from mutations import attack
from targets import TARGETS

pytestmark = pytest.mark.full


@pytest.mark.parametrize("name", TARGETS)
def test_a_file_is_read_or_refused(name):
    found = attack(TARGETS[name], range(100))
    assert not found, "\n".join(map(str, found))

"""A formula changed in one sign, bound or detach turns a check red; `tests.objectives.mutations` lists them."""

import pytest

from tests.objectives.mutations import MUTATIONS, notice, survives


@pytest.mark.parametrize("what", sorted({mutation.noticed_by for mutation in MUTATIONS}))
def test_the_right_formula_passes(what):
    notice(what)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_changed_formula_is_noticed(mutation):
    assert not survives(mutation)

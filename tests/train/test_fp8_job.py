"""`fp8: true` on a device without 8-bit products is refused before anything is made."""

from __future__ import annotations

import pytest

from surefoot.errors import UserError


@pytest.mark.parametrize("compiled", [None, True])
def test_a_cpu_is_refused(settings, start, compiled):
    with pytest.raises(UserError, match="8-bit products need") as caught:
        start(settings | {"fp8": True, "compile": compiled})
    assert caught.value.problems[0].key == "fp8"

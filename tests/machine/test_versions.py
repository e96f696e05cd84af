from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from surefoot.machine.versions import local_tag, parse_version, rocm_of_tag, same_line, soname_major


def test_rocm_order():
    assert parse_version("10.0") > parse_version("7.14") > parse_version("7.9") > parse_version("7.2.4")
    assert sorted(["7.9.0", "10.1.0", "7.2.4", "7.14.0", "10.0.0"], key=parse_version) == [
        "7.2.4",
        "7.9.0",
        "7.14.0",
        "10.0.0",
        "10.1.0",
    ]


@given(st.lists(st.integers(0, 999), min_size=1, max_size=4), st.lists(st.integers(0, 999), min_size=1, max_size=4))
def test_order_is_that_of_the_numbers(left, right):
    assert (parse_version(".".join(map(str, left))) < parse_version(".".join(map(str, right)))) == (
        tuple(left) < tuple(right)
    )


@given(st.one_of(st.text(), st.none(), st.integers(), st.binary()))
def test_never_raises(value):
    assert isinstance(parse_version(value), tuple)


def test_tags():
    assert rocm_of_tag(local_tag("2.13.0+rocm7.14")) == (7, 14)
    assert rocm_of_tag("rocm6.3.4.git7cecbf6d") == (6, 3, 4)
    assert rocm_of_tag("cu128") == ()
    assert parse_version("6.14.0-37-generic") == (6, 14, 0)
    assert soname_major("libamdhip64.so.7.2.1") == 7
    assert soname_major("libamdhip64.so") is None
    assert not same_line((), ())

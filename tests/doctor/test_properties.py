"""Properties of the diagnosis: it never raises, and does not depend on order."""

from __future__ import annotations

import copy
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surefoot.doctor.causes import because_of
from surefoot.doctor.diagnose import diagnose
from surefoot.doctor.finding import LEVELS, Hit
from surefoot.doctor.rules.catalogue import all_rules
from surefoot.machine.case import base_names, base_snapshot, build_case
from surefoot.machine.facts import Machine
from surefoot.machine.snapshot import Snapshot

BASES = {n: base_snapshot(n) for n in base_names() if not n.startswith("_")}
NOISE = [
    None,
    True,
    -1,
    0,
    10**30,
    float("nan"),
    float("inf"),
    "",
    "x" * 300,
    "\x00\ud7ff",
    [],
    [None, {}],
    {},
    {"error": "EACCES"},
    {"error": 3},
    {"a": {"b": []}},
    "0x",
    "99999999999999999999",
    "7.2.4",
    "gfx1100",
]


def paths_of(value, prefix=()):
    """Every position in a nested mapping or list."""
    found = [prefix] if prefix else []
    if isinstance(value, dict):
        for key in value:
            found += paths_of(value[key], (*prefix, key))
    elif isinstance(value, list):
        for index in range(len(value)):
            found += paths_of(value[index], (*prefix, index))
    return found


def change(raw, path, value, remove=False):
    here = raw
    for key in path[:-1]:
        here = here[key]
    if remove and isinstance(here, dict):
        here.pop(path[-1], None)
    else:
        here[path[-1]] = value


def mutate(seed: int) -> Snapshot:
    """A base machine with one to six fields removed, mistyped or replaced by noise."""
    dice = random.Random(seed)
    raw = copy.deepcopy(BASES[dice.choice(sorted(BASES))])
    for _ in range(dice.randint(1, 6)):
        paths = paths_of(raw)
        change(raw, dice.choice(paths), copy.deepcopy(dice.choice(NOISE)), remove=dice.random() < 0.3)
    if dice.random() < 0.3:
        raw["log"] = "".join(chr(dice.randint(1, 0x2FF)) for _ in range(200))
    return Snapshot(raw)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10**9))
def test_no_rule_raises_on_noise(seed):
    report = diagnose(mutate(seed))
    assert (report.primary is None) == (not report.findings)


@pytest.mark.parametrize("base", sorted(BASES))
def test_any_one_section_may_be_missing(base):
    for section in BASES[base]:
        raw = copy.deepcopy(BASES[base])
        del raw[section]
        diagnose(Snapshot(raw))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(sorted(BASES)))
def test_order_of_files_does_not_matter(seed, base):
    raw = build_case(
        {
            "base": base,
            "patch": {"env.HSA_OVERRIDE_GFX_VERSION": "11.0.0", "env.LD_LIBRARY_PATH": "/opt/rocm-5.7.0/lib"},
        },
        "x",
    ).snapshot.raw

    def shuffled(value):
        if isinstance(value, dict):
            items = list(value.items())
            random.Random(seed).shuffle(items)
            return {k: shuffled(v) for k, v in items}
        return value

    one, two = diagnose(Snapshot(raw)), diagnose(Snapshot(shuffled(raw)))
    assert one.to_json() == two.to_json()


def test_hip_7_16_is_rocm_10_1():
    for base, rocm, hip in (("r9700-pip", "10.1.0", "7.16.26190"), ("r9700-pip", "10.0.0", "7.15.26010")):
        case = build_case(
            {
                "base": base,
                "patch": {
                    "python.torch.version": f"2.13.0+rocm{rocm}",
                    "python.torch.hip": hip,
                    "env.TORCH_BLAS_PREFER_HIPBLASLT": "0",
                },
            },
            "x",
        )
        assert diagnose(case.snapshot).findings == ()
    unmarked = build_case({"base": "fedora-distro-rocm", "patch": {"python.torch.hip": "7.16.1"}}, "x")
    assert Machine(unmarked.snapshot).torch.rocm == (10, 1)


def test_the_graph_has_no_circle_and_one_primary():
    m = Machine(Snapshot(BASES["rx7900xtx-ubuntu"]))
    everything = {rule: Hit(("x",)) for rule in all_rules()}
    chosen = because_of(everything, dict.fromkeys(everything, LEVELS[1]), m)
    for start in chosen:
        seen, here = set(), start
        while here is not None:
            assert here not in seen
            seen.add(here)
            here = chosen[here]


@pytest.mark.slow
def test_ten_thousand_mutations_fast_enough():
    import time

    diagnose(Snapshot(BASES["mi300x-8"]))  # the first run reads the tables
    slowest = 0.0
    for seed in range(10_000):
        snapshot = mutate(seed)
        start = time.process_time()
        diagnose(snapshot)
        slowest = max(slowest, time.process_time() - start)
    print(f"\nslowest of 10,000: {slowest * 1000:.1f} ms")
    assert slowest < 0.05  # seconds of CPU time, so that a busy machine does not matter

"""Every hand-written machine: its verdict, and the score as a table (pytest -s shows it)."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from surefoot.doctor.diagnose import diagnose
from surefoot.doctor.rules.catalogue import all_rules
from surefoot.doctor.texts import load_texts
from surefoot.machine.case import base_names, base_snapshot, load_cases
from surefoot.machine.snapshot import Snapshot

FOLDER = Path(__file__).parents[1] / "machines"
# Cases that others keep: beside the checkout, or wherever the variable says.
KEPT_BACK = [Path(__file__).parents[3] / "shared" / "machines", Path(os.environ.get("SUREFOOT_CASES") or "nowhere")]
FILES = [file for folder in [FOLDER, *KEPT_BACK] for file in sorted(folder.glob("*.yaml"))]
CASES = [(file.stem, case) for file in FILES for case in load_cases(file)]
BASES = [n for n in base_names() if not n.startswith("_")]
REPORTS = [
    1,
    3,
    5,
    6,
    7,
    9,
    10,
    11,
    12,
    13,
    14,
    16,
    18,
    19,
    20,
    21,
    24,
    25,
    26,
    27,
    28,
    30,
    31,
    32,
    34,
    35,
    36,
    38,
    39,
    41,
    42,
    43,
    44,
    46,
    47,
    48,
    50,
    51,
    53,
    54,
    55,
]


def verdict(case):
    report = diagnose(case.snapshot, "en", case.config)
    found = [f.id for f in report.findings]
    primary = report.primary.id if report.primary else None
    good = (
        (case.expect.any_primary or primary == case.expect.primary)
        and set(case.expect.present) <= set(found)
        and not set(case.expect.absent) & set(found)
    )
    return good, primary, found


@pytest.mark.parametrize(("file", "case"), CASES, ids=[f"{f}:{c.name}" for f, c in CASES])
def test_case(file, case):
    good, primary, found = verdict(case)
    assert good, f"wanted {case.expect}, got PRIMARY {primary} of {found}"


@pytest.mark.parametrize("base", BASES)
def test_healthy_base_gives_nothing(base):
    report = diagnose(Snapshot(base_snapshot(base)))
    assert report.primary is None and report.findings == ()
    assert report.exit_code == 0


def test_enough_bases_reports_and_near_misses():
    assert len(BASES) >= 12
    names = [c.name for _, c in CASES]
    for number in REPORTS:
        assert any(n.startswith(f"R{number:02d} ") for n in names), number
    primaries = {c.expect.primary for _, c in CASES}
    for rule in sorted(set(all_rules()) | set(load_texts())):
        assert rule in primaries or any(rule in c.expect.present for _, c in CASES), f"{rule} has no positive case"
        assert any(n.startswith(f"{rule} near miss") for n in names) or rule in ("F03",), f"{rule} has no near miss"


def test_score_table(capsys):
    score: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for file, case in CASES:
        total[file] += 1
        score[file] += verdict(case)[0]
    with capsys.disabled():
        print(f"\n{'cases':<16} {'right':>6} {'of':>4}")
        for file in total:
            print(f"{file:<16} {score[file]:>6} {total[file]:>4}")
        print(f"{'all':<16} {sum(score.values()):>6} {sum(total.values()):>4}")
    assert score == total


def test_fixes_never_weaken_the_machine():
    """No chmod on device nodes, no override unless labelled a workaround, no privileged container, no blind upgrade."""
    for _, case in CASES:
        for finding in diagnose(case.snapshot, "en", case.config).findings:
            for line in finding.fix:
                assert not re.search(r"chmod\s+\S*666|--privileged|setenforce 0|pip install --upgrade", line), (
                    finding.id,
                    line,
                )
                if "HSA_OVERRIDE_GFX_VERSION=" in line:
                    assert line.startswith("# workaround only, same ISA family"), (finding.id, line)
            assert finding.evidence, finding.id
            assert finding.mechanism and finding.confirm and finding.title, finding.id
            assert "{" not in finding.title + finding.mechanism, finding.id


def test_every_text_is_there_in_both_languages():
    for rule, text in load_texts().items():
        for key in ("title", "why", "confirm"):
            english, bar, chinese = text[key].partition(" || ")
            assert english and bar and chinese, (rule, key)
        assert re.search(r"[\u4e00-\u9fff]", text["title"]), rule
    assert set(all_rules()) <= set(load_texts())


def test_chinese_report_has_the_same_findings():
    for _, case in CASES[::7]:
        one, two = diagnose(case.snapshot, "en", case.config), diagnose(case.snapshot, "zh", case.config)
        assert [f.id for f in one.findings] == [f.id for f in two.findings]
        for finding in two.findings:
            assert re.search(r"[\u4e00-\u9fff]", finding.title), finding.id


def test_chinese_evidence_is_chinese():
    """Evidence in the doctor's own words is translated; only what is quoted may stay English."""
    own, left = 0, []
    for _, case in CASES:
        for finding in diagnose(case.snapshot, "zh", case.config).findings:
            assert not any(" ||| " in e for e in finding.evidence), finding.id
            for line in finding.evidence:
                own += 1
                quoted = re.match(r"(/\S+|\w+): |ROCk |\S+ printed|probe ", line)
                if (
                    not re.search(r"[\u4e00-\u9fff]", line)
                    and not quoted
                    and re.search(r"[a-z]{2,} [a-z]{2,} [a-z]{2,}", line)
                ):
                    left.append((finding.id, line))
    assert own > 400
    assert not left, left[:5]

"""The telling lines of real kinds of logs: what matters is kept, noise is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.setup.telling import telling, unreachable

PIP_NOISE = "\n".join(
    [f"Collecting package-{n}\n  Downloading package_{n}-1.0-py3-none-any.whl ({n} kB)" for n in range(200)]
)
LOGS = {
    "pip finds no version": (
        "Looking in indexes: https://mirror.invalid/simple\nERROR: Could not find a version that satisfies the "
        "requirement torch==2.13.0+rocm7.2 (from versions: 2.13.0)\n"
        "ERROR: No matching distribution found for torch==2.13.0+rocm7.2",
        ["Could not find a version", "No matching distribution"],
    ),
    "disk": (
        "Installing collected packages: torch\nERROR: Could not install packages due to an OSError: [Errno 28] "
        "No space left on device\n",
        ["No space left on device"],
    ),
    "hash": (
        "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated\n    numpy from "
        "x:\n        Expected sha256 aaaa\n             Got        bbbb\n",
        ["DO NOT MATCH THE HASHES", "Expected sha256"],
    ),
    "compiler killed": (
        "[412/980] Building HIP object a.o\nFAILED: a.o\n/opt/rocm/bin/hipcc -Werror a.hip\n"
        "clang: error: unable to execute command: Killed\nclang: error: clang frontend command failed due to signal\n"
        "ninja: build stopped: subcommand failed.",
        ["Killed", "FAILED: a.o"],
    ),
    "compiler": (
        "[1/9] c++ -Wno-error -c x.cpp\nx.cpp:3:10: fatal error: hip/hip_runtime.h: No such file or directory\n"
        "    3 | #include <hip/hip_runtime.h>\ncompilation terminated.\n",
        ["hip/hip_runtime.h: No such file"],
    ),
    "cmake": (
        "-- Found Python\nCMake Error at CMakeLists.txt:12 (find_package):\n  By not providing Findhip.cmake\n",
        ["CMake Error at CMakeLists.txt:12"],
    ),
    "network": (
        "WARNING: Retrying (Retry(total=4)) after connection broken by NewConnectionError: Failed to establish a new "
        "connection: [Errno 111] Connection refused: /simple/torch/\nERROR: No matching distribution found for torch",
        ["Connection refused"],
    ),
    "uv": (
        "  x No solution found when resolving dependencies:\n  ╰─▶ Because torch==2.13.0 was not found",
        ["No solution found"],
    ),
    "apt": ("Reading package lists...\nE: Unable to locate package amdgpu-dkms\n", ["Unable to locate package"]),
    "dkms": (
        "Building module:\nmake -j8 KERNELRELEASE=6.14...(bad exit status: 2)\n"
        "Error! Bad return status for module build on kernel: 6.14.0",
        ["Bad return status"],
    ),
    "python": (
        'Traceback (most recent call last):\n  File "x.py", line 1\n'
        "ImportError: libamdhip64.so.7: cannot open shared object file: No such file or directory",
        ["libamdhip64.so.7"],
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_what_matters_is_found_in_the_noise(name):
    log, wanted = LOGS[name]
    lines = telling(f"{PIP_NOISE}\n{log}\n{PIP_NOISE}")
    for words in wanted:
        assert any(words in line for line in lines), (words, lines)
    assert not any("Collecting" in line or "-Wno-error" in line for line in lines), lines


def test_a_cause_is_not_crowded_out_by_what_came_of_it():
    log = "\n".join([f"src/{n}.cpp:{n}: error: kind {chr(97 + n)}" for n in range(20)] + ["No space left on device"])
    assert "No space left on device" in telling(log)


def test_repetitions_that_differ_in_numbers_are_told_once():
    lines = telling("\n".join(f"x.cpp:{n}:3: error: no member" for n in range(50)))
    assert lines == ("x.cpp:0:3: error: no member",)


def test_a_log_that_says_nothing_gives_its_last_lines_and_a_kill_is_named():
    assert telling("one\ntwo\n\nthree\nfour\n") == ("two", "three", "four")
    assert "memory ran out" in telling("compiling\n", code=137)[-1]


PRINTED = st.sampled_from([line for log, _ in LOGS.values() for line in log.splitlines()])
ANY = st.text(st.characters(exclude_characters="\x1b"))  # escapes are taken out of the middle of a line


@given(st.lists(PRINTED | ANY | PRINTED.map(lambda line: line * 9), max_size=30))
def test_any_text_gives_few_short_lines_that_are_in_it(printed):
    text = "\n".join(printed)
    lines = telling(text)
    assert len(lines) <= 8
    assert all(len(line) <= 300 and line.removesuffix(" ...") in text for line in lines)


def test_a_host_that_cannot_be_reached_is_told_from_other_failures():
    network = telling("ERROR: HTTPConnectionPool: Max retries exceeded (Connection refused)", 1)
    assert unreachable(network)
    assert not unreachable(telling("ERROR: [Errno 28] No space left on device", 1))

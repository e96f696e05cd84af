"""The lines of a failed command's log that tell why, out of what pip, cmake, compilers and their kind print."""

from __future__ import annotations

import re

_MOST = 8
_HEADS = 3
_WIDTH = 300
#: What a line says, from the cause itself to what merely follows from it. The first rank that a log has wins most room.
_RANKS: tuple[re.Pattern[str], ...] = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # The machine gave up: disk, memory, quota, permissions.
        r"no space left on device|errno 28\b|disk quota exceeded|not enough (free )?(disk )?space"
        r"|out of memory|cannot allocate memory|^killed$|\bkilled (signal|\()|: killed\b|signal terminated program"
        r"|permission denied|read-only file system|are you root|must be run as root|^sudo: ",
        # The network or the index.
        r"connection (refused|reset|timed out|error|broken|aborted)|could not resolve|name or service not known"
        r"|temporary failure (in name resolution|resolving)|newconnectionerror|max retries exceeded|read timed out"
        r"|certificate.verify.failed|\bssl(error|:)|proxyerror|http error \d+|\b[45]\d\d (client|server) error"
        r"|failed to (fetch|download)|network is unreachable|error sending request|dns error|incomplete download",
        # What was fetched is not what was asked for, or is not there.
        r"do(es)? not match the hashes|expected (sha256|md5)|hash mismatch|could not find a version that satisfies"
        r"|no matching distribution|is not a supported wheel|resolutionimpossible|conflicting dependencies"
        r"|no solution found|unable to locate package|no package .* available|unmet dependencies|requires-python"
        r"|requires a different python|no such option|externally-managed-environment|nothing provides ",
        # Compilers, linkers and build systems.
        r"\b(fatal )?error: |\bCMake Error|undefined (reference|symbol)|cannot find -l|ld: error|^FAILED: |hipcc: error"
        r"|clang\S*: error|unable to find (library|program)|subcommand failed|unsupported (gpu|arch|option)"
        r"|file not found|no such file or directory|command not found|cannot find (rocm|hip)|bad return status",
        # Programs in Python and everything else.
        r"^\w*(Error|Exception|Interrupt)\b(:|$)|\b[\w.]+(Error|Exception): |segmentation fault|core dumped|aborted\b"
        r"|illegal instruction|cannot open shared object|^e: |\berror\b.*:|^error\b|\bfatal\b|failed\b",
    )
)
#: Lines that hold such words and say nothing: counts of none, flags and files with error in the name.
_NOISE = re.compile(
    r"\b0 (errors?|failed)\b|-Werror|-Wno-error|^\s*(adding|copying|creating|installing) "
    r"|^note: this (error|is an issue)|^\[notice\]|errors?\.(py|h|hpp|cpp|o)\b(?!:\d)|subprocess-exited-with-error$"
    r"|process-interrupted|^hint: see above",
    re.IGNORECASE,
)
#: What `command.run_bash` prints behind the output of a line that failed.
ENDED = "surefoot: exit code "
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")


def telling(log: str, code: int | None = None) -> tuple[str, ...]:
    """Pick the lines of a log that tell why its command failed.

    Args:
        log: everything that was printed.
        code: the exit code; 137 and -9 add that the process was killed, when the log does not say so.

    Returns:
        Few lines, in the log's order, without colours, repetitions and progress bars; its last lines when none tells.
    """
    lines = [_clean(line) for line in log.splitlines()]
    best: dict[int, int] = {}  # line number -> rank
    known: set[str] = set()
    for number, line in enumerate(lines):
        if not line or _NOISE.search(line):
            continue
        rank = next((rank for rank, pattern in enumerate(_RANKS) if pattern.search(line)), None)
        shape = re.sub(r"0x[0-9a-f]+|\d+", "#", line)
        if rank is not None and shape not in known:
            known.add(shape)
            best[number] = rank
    # Of each rank its first lines, for what comes later came of it; a rank with many must not crowd out the others.
    ranked = sorted(best, key=lambda number: (best[number], number))
    heads = [n for rank in range(len(_RANKS)) for n in [n for n in ranked if best[n] == rank][:_HEADS]]
    chosen = sorted([*heads, *(n for n in ranked if n not in heads)][:_MOST])
    found = [lines[number] for number in chosen] or [line for line in lines if line][-3:]
    ended = next((number for number in reversed(range(len(lines))) if lines[number].startswith(ENDED)), None)
    if ended is not None and lines[ended] not in found:
        found.append(lines[ended])
    if code in (137, -9) and not any(re.search("killed|out of memory", line, re.IGNORECASE) for line in found):
        found.append("the process was killed (SIGKILL): most often because memory ran out")
    return tuple(found)


def unreachable(lines: tuple[str, ...]) -> bool:
    """Say whether lines tell of a host that could not be reached.

    Args:
        lines: from `telling`.

    Returns:
        True when one of them does.
    """
    return any(_RANKS[1].search(line) for line in lines)


def _clean(line: str) -> str:
    """Without colours; of a line that was overwritten by carriage returns, what stood there last."""
    shown = [part for part in _ESCAPES.sub("", line).split("\r") if part.strip()]
    text = shown[-1].strip() if shown else ""
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 4]} ..."

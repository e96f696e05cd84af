"""How many compilers may run at once: as many as memory holds, at most one a core."""

from __future__ import annotations

import math

#: GiB that stay free for everything else.
RESERVE_GIB = 2


def build_jobs(cores: int, available_gib: float, gib_per_job: float) -> int:
    """Count the compilers that may run at once.

    Args:
        cores: processors that may be used.
        available_gib: GiB of memory that are free to use.
        gib_per_job: GiB that one compiler takes at its peak.

    Returns:
        max(1, min(cores, floor((available_gib - 2) / gib_per_job))).
    """
    return max(1, min(cores, math.floor((available_gib - RESERVE_GIB) / gib_per_job)))


def build_jobs_line(gib_per_job: float) -> str:
    """Write the bash line that sets MAX_JOBS by the same rule when a build begins, since memory changes.

    Args:
        gib_per_job: GiB that one compiler takes at its peak.

    Returns:
        One line; it counts the memory that the kernel has and, in a container, what its own limit leaves.
    """
    group = "/sys/fs/cgroup/memory"
    files = f"{group}.max {group}.current {group}.stat"
    # What a group's files say of cache counts as free. nproc would take OMP_NUM_THREADS for the number of processors.
    count = (
        "/^MemAvailable:/ { kib = $2 } /^[0-9]+$/ { n++; own[n] = $1 / 1024 } /^inactive_file / { cache = $2 / 1024 } "
        "END { left = own[1] - own[2] + cache; if (n == 2 && left < kib) kib = left; "
        f"jobs = int((kib / 1048576 - {RESERVE_GIB}) / {gib_per_job:g}); if (jobs > cores) jobs = cores; "
        "if (jobs < 1) jobs = 1; print jobs }"
    )
    cores = "env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc"
    read = f"{{ cat /proc/meminfo; cat {files} 2>/dev/null || true; }}"
    return f"MAX_JOBS=$({read} | awk -v cores=\"$({cores})\" '{count}')\nexport MAX_JOBS"

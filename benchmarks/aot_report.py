"""What our Triton kernels become on AMD GPUs and on Hopper, compiled ahead of time: no GPU is needed, none is used.

Prints a table, kernel by target, and ends with exit code 1 where something would run badly or not at all: registers
that spill, more shared memory (LDS) than the chip has, more than 1024 threads, a matrix product without the chip's
matrix instructions. Triton says nothing about any of these. A chip not in the list is not checked.

    python benchmarks/aot_report.py
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

MAX_THREADS = 1024  # of a workgroup, AMD and NVIDIA alike
KIB = 1024


@dataclass(frozen=True)
class Target:
    """A chip to compile for.

    Attributes:
        backend: Triton's name of the vendor.
        arch: the chip, as Triton's target takes it.
        wave: threads of a wavefront or warp.
        lds: shared memory of a workgroup, bytes: AMD's CDNA and RDNA ISA documents, NVIDIA's CUDA guide for 9.0.
    """

    backend: str
    arch: str | int
    wave: int
    lds: int

    @property
    def name(self) -> str:
        """The chip as people write it."""
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)


TARGETS = [
    Target("hip", "gfx90a", 64, 64 * KIB),
    Target("hip", "gfx942", 64, 64 * KIB),
    Target("hip", "gfx950", 64, 160 * KIB),
    Target("hip", "gfx1100", 32, 64 * KIB),
    Target("hip", "gfx1201", 32, 64 * KIB),
    Target("cuda", 90, 32, 227 * KIB),
]


@dataclass(frozen=True)
class Variant:
    """A kernel as a run compiles it.

    Attributes:
        name: for the table.
        kernel: the function under `triton.jit`.
        pointers: type of each pointer argument, by name; all of them aligned to 16 bytes, as torch's are.
        constants: the other arguments.
        warps: wavefronts of a workgroup.
    """

    name: str
    kernel: Any
    pointers: dict[str, str]
    constants: dict[str, Any]
    warps: int


@dataclass(frozen=True)
class Outcome:
    """What one compile gave.

    Attributes:
        kernel: name of the variant.
        target: the chip.
        warps: wavefronts of a workgroup.
        vgprs: vector registers of a thread, with accumulation registers; on NVIDIA all registers.
        sgprs: scalar registers; None on NVIDIA.
        spills: registers that did not fit; None on NVIDIA, where they show as scratch.
        scratch: bytes of a thread's private memory.
        lds: bytes of a workgroup's shared memory.
        matrix: matrix instructions; None for a kernel without a matrix product.
    """

    kernel: str
    target: Target
    warps: int
    vgprs: int
    sgprs: int | None
    spills: int | None
    scratch: int
    lds: int
    matrix: int | None

    def faults(self) -> list[str]:
        """What is wrong with it, in words."""
        found = []
        if self.spills or self.scratch:
            found.append(f"{self.spills or 0} registers spilled, {self.scratch} bytes of scratch")
        if self.lds > self.target.lds:
            found.append(f"{self.lds} bytes of LDS, the chip has {self.target.lds}")
        if self.warps * self.target.wave > MAX_THREADS:
            found.append(f"{self.warps} warps of {self.target.wave} are more than {MAX_THREADS} threads")
        if self.matrix == 0:
            found.append("a matrix product without matrix instructions")
        return [f"{self.kernel} on {self.target.name}: {fault}" for fault in found]


def variants() -> Iterator[Variant]:
    """Yield every kernel of ours, in the ways that matter."""
    from surefoot.model import loss_kernel as loss

    for name, dtype, vocabulary, scale, softcap, smoothing in (
        ("loss bf16, vocabulary 128256", "bf16", 128256, 1.0, 0.0, 0.0),
        ("loss fp32, vocabulary 128256", "fp32", 128256, 1.0, 0.0, 0.0),
        ("loss fp16, vocabulary 50257, smoothed", "fp16", 50257, 1.0, 0.0, 0.1),
        ("loss bf16, vocabulary 256000, all options", "bf16", 256000, 0.0625, 30.0, 0.1),
    ):
        yield Variant(
            name,
            loss.cross_entropy_kernel,
            {"logits_ptr": f"*{dtype}", "targets_ptr": "*i64", "sums_ptr": "*fp32"},
            {
                "vocabulary": vocabulary, "scale": scale, "softcap": softcap, "smoothing": smoothing,
                "chance_stride": vocabulary // 512, "lanes": loss.LANES, "width": loss.WIDTH,
            },
            loss.WARPS,
        )  # fmt: skip


def compile_for(variant: Variant, target: Target) -> Outcome:
    """Compile one kernel for one chip and read what came out.

    Args:
        variant: the kernel.
        target: the chip.

    Returns:
        The numbers of the table.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = variant.pointers | dict.fromkeys(variant.constants, "constexpr")
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(len(variant.pointers))}
    source = ASTSource(variant.kernel, signature, variant.constants, aligned)
    made = triton.compile(
        source, target=GPUTarget(target.backend, target.arch, target.wave), options={"num_warps": variant.warps}
    )
    assembly = made.asm["amdgcn" if target.backend == "hip" else "ptx"]
    matrix = len(re.findall(r"^\s*(?:v_s?w?mf?mac?\w*_|wgmma\.mma|mma\.sync)", assembly, re.MULTILINE))
    read = _amd_numbers(assembly) if target.backend == "hip" else _nvidia_numbers(made.asm["cubin"])
    return Outcome(
        variant.name,
        target,
        made.metadata.num_warps,
        **read,
        lds=made.metadata.shared,  # the code object itself says 0: on AMD it is asked for at launch
        matrix=matrix if "tt.dot" in made.asm["ttir"] else None,
    )


def _amd_numbers(assembly: str) -> dict[str, int | None]:
    found = {name: int(value) for name, value in re.findall(r"^\s+\.(\w+):\s+(\d+)$", assembly, re.MULTILINE)}
    return {
        "vgprs": found["vgpr_count"],  # on CDNA the accumulation registers are among them
        "sgprs": found["sgpr_count"],
        "spills": found["vgpr_spill_count"] + found["sgpr_spill_count"],
        "scratch": found["private_segment_fixed_size"],
    }


def _nvidia_numbers(cubin: bytes) -> dict[str, int | None]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        said = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    return {"vgprs": found["REG"], "sgprs": None, "spills": None, "scratch": found["STACK"] + found["LOCAL"]}


def report() -> list[Outcome]:
    """Compile everything for everything."""
    return [compile_for(variant, target) for variant in variants() for target in TARGETS]


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as a Markdown table."""
    lines = [
        "| Kernel | Target | Warps | VGPRs | SGPRs | Spills | Scratch, bytes | LDS, bytes | Matrix instructions |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for o in outcomes:
        cells = (o.kernel, o.target.name, o.warps, o.vgprs, o.sgprs, o.spills, o.scratch, o.lds, o.matrix)
        lines.append("| " + " | ".join("-" if cell is None else str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def main() -> int:
    import triton

    outcomes = report()
    print(f"Triton {triton.__version__}; compiled, not run.\n\n{table(outcomes)}")
    faults = [fault for outcome in outcomes for fault in outcome.faults()]
    print("\n".join(faults), file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

"""Steps for what stands on torch: flash-attn, bitsandbytes, DeepSpeed and vLLM, none of which may replace torch."""

from __future__ import annotations

from shlex import quote
from typing import Any

from surefoot.doctor.fixes import driver_allows
from surefoot.errors import UserError
from surefoot.machine.facts import Machine
from surefoot.machine.table import load_table
from surefoot.machine.versions import Version, parse_version, short
from surefoot.setup.access import run_flags
from surefoot.setup.choose import Choice, Target
from surefoot.setup.jobs import build_jobs_line
from surefoot.setup.plan import CONSTRAINTS, Step, Wish
from surefoot.setup.toolchain import rocm_environment, rocm_needs, rocm_sdk_step

#: A file in the environment that sets flash-attn's switch for every Python started there, whoever starts it.
_SWITCH_FILE = "surefoot_flash_attn.pth"
_SWITCH = "FLASH_ATTENTION_TRITON_AMD_ENABLE"
_SDPA = {
    "native": "torch's own attention (SDPA) has flash kernels for {gfx} already and Surefoot uses it by default: "
    "first ask whether flash-attn is needed at all",
    "experimental": "torch's own attention has flash kernels for {gfx} behind "
    "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1, which needs no build",
    "none": "torch's own attention has no flash kernels for {gfx} and falls back to the slow one",
}


def addon_steps(m: Machine, wish: Wish, choice: Choice) -> tuple[Step, ...]:
    """Plan the add-ons of a wish, in the order in which they are installed.

    bitsandbytes goes with every plan whose GPUs it serves, since QLoRA needs it; `addon_notes` says where not.

    Args:
        m: the machine.
        wish: the wish.
        choice: the torch that they stand on.

    Returns:
        Steps called rocm-sdk (where something compiles with ROCm from pip), flash-attn, bitsandbytes, deepspeed, serve.

    Raises:
        UserError: an add-on that was asked for has no kernels or no image for the targets.
    """
    steps: list[Step] = []
    if "flash-attn" in wish.purposes:
        steps += _flash_attn_ck(m, choice) if attention_backend(choice) == "ck" else [_flash_attn_triton(choice)]
    if not _without_bitsandbytes(choice):
        steps.append(_bitsandbytes(choice))
    if "deepspeed" in wish.purposes:
        steps.append(_deepspeed(choice))
    if "serve" in wish.purposes:
        steps.append(_serve(m, choice))
    return tuple(steps)


def addon_notes(choice: Choice) -> tuple[str, ...]:
    """Say which add-on that usually comes along is left out, and why.

    Args:
        choice: the torch.

    Returns:
        Sentences for the plan's notes.
    """
    why = _without_bitsandbytes(choice)
    return (f"without bitsandbytes (QLoRA): {why}",) if why else ()


# ---- flash-attn ----
def attention_backend(choice: Choice) -> str:
    """Choose flash-attn's back end: CK where the release compiles it, Triton for the other targets.

    Args:
        choice: the torch.

    Returns:
        `ck` or `triton`.

    Raises:
        UserError: flash-attn has kernels for none of them.
    """
    ck, triton = load_table().addons["flash_attn_ck"], load_table().addons["flash_attn_triton"]
    if choice.kind != "rocm":
        raise UserError(
            f"setup builds flash-attn for AMD GPUs, and this plan is for {choice.kind}",
            hint="would match: leave flash-attn out of --for; torch's own attention (SDPA) is used",
            key="--for",
        )
    if set(choice.targets) <= set(ck["release_gfx"]):
        return "ck"
    missing = [gfx for gfx in choice.targets if gfx not in triton["gfx"]]
    if missing:
        raise UserError(
            f"flash-attn has no kernels for {missing[0]}",
            hint=f"would match: {', '.join(triton['gfx'])}; or leave flash-attn out of --for and use torch's own "
            "attention",
            key="--for",
        )
    first, last = (parse_version(text) for text in triton["torch"])
    version = parse_version(choice.torch)[:2]
    if not first <= version <= last:
        raise UserError(
            f"flash-attn {triton['release']}'s Triton kernels are not known to work with the Triton of "
            f"torch {short(version) or '(nightly)'}",
            hint=f"would match: --torch {short(last)} (any from {short(first)} on), or leave flash-attn out of --for",
            key="--for",
        )
    return "triton"


def _sdpa(choice: Choice) -> str:
    table = load_table().addons["aotriton"]
    targets = set(choice.targets)
    kind = "native" if targets <= set(table["gfx"]) else "none"
    if kind == "none" and targets <= {*table["gfx"], *table["experimental"]}:
        kind = "experimental"
    return _SDPA[kind].format(gfx=", ".join(choice.targets))


def _flash_attn_ck(m: Machine, choice: Choice) -> list[Step]:
    facts = load_table().addons["flash_attn_ck"]
    archs = ";".join(choice.targets)
    # A torch that was built here has brought the compiler already.
    sdk = None if choice.source == "source" else rocm_sdk_step(choice, ("torch-check",), sdk_with_devices=False)
    build = Step(
        id="flash-attn",
        title=f"Compile flash-attn {facts['release']} with the CK back end for {', '.join(choice.targets)}",
        reason=f"the release has CK kernels for {', '.join(facts['release_gfx'])}. GPU_ARCHS limits the build to these "
        f"cards; a compiler takes about {facts['gib_per_job']} GiB, so memory sets how many run. {_sdpa(choice)}",
        commands=(
            _build_tools(choice),
            *rocm_environment(m, choice),
            build_jobs_line(facts["gib_per_job"]),
            f"export GPU_ARCHS={quote(archs)} BUILD_TARGET=rocm FLASH_ATTENTION_FORCE_BUILD=TRUE",
            _from_source(choice, facts),
        ),
        verify=(f"{choice.interpreter} -c 'import flash_attn_2_cuda; from flash_attn import flash_attn_func'",),
        undo=(f"{choice.pip} uninstall -y flash-attn",),
        needs=rocm_needs(choice, ("torch-check",)),
        disk_gib=3, minutes=90, downloads=("0.02 GiB of sources from pip's index",),
    )  # fmt: skip
    return [build] if sdk is None else [sdk, build]


def _flash_attn_triton(choice: Choice) -> Step:
    facts = load_table().addons["flash_attn_triton"]
    python, version = choice.interpreter, facts["release"]
    site = f"$({python} -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))')"
    line = f'import os; os.environ.setdefault("{_SWITCH}", "TRUE")'
    return Step(
        id="flash-attn",
        title=f"Install flash-attn {version} with the Triton back end",
        reason=f"its CK back end exists for {', '.join(load_table().addons['flash_attn_ck']['release_gfx'])} only; "
        f"Triton's kernels are compiled at first use. {_SWITCH}=TRUE is read when it is built and at every "
        f"import: {_SWITCH_FILE} in the environment sets it. {_sdpa(choice)}",
        commands=(
            _build_tools(choice),
            f"export {_SWITCH}=TRUE BUILD_TARGET=rocm FLASH_ATTENTION_FORCE_BUILD=TRUE",
            _from_source(choice, facts),
            f"printf '%s\\n' {quote(line)} > \"{site}/{_SWITCH_FILE}\"",
        ),
        verify=(f"{python} -c 'from flash_attn import flash_attn_func'",),
        undo=(f"{choice.pip} uninstall -y flash-attn", f'rm -f "{site}/{_SWITCH_FILE}"'),
        needs=("torch-check",), disk_gib=0.1, minutes=1, downloads=("0.01 GiB from pip's index",),
    )  # fmt: skip


def _build_tools(choice: Choice) -> str:
    return f"{choice.pip} install -c {CONSTRAINTS} setuptools wheel packaging psutil ninja einops"


def _from_source(choice: Choice, facts: dict[str, Any]) -> str:
    """Build without isolation, against the torch that is here; a wheel in pip's cache may be of another back end."""
    options = f"--no-build-isolation --no-binary flash-attn -c {CONSTRAINTS}"
    return f"{choice.pip} install {options} {quote('flash-attn==' + facts['release'])}"


# ---- bitsandbytes ----
def bitsandbytes_library(rocm: Version) -> tuple[str, str]:
    """Name the library for a ROCm line, and the table's list of targets in it."""
    if rocm >= (10,):
        hip = next((row.hip for row in load_table().rocm if row.version[:2] == rocm[:2]), ())
        name = short(hip) if short(hip) in load_table().addons["bitsandbytes"]["libraries"] else ""
        # A library of the same HIP major serves, with a warning.
        return (name or load_table().addons["bitsandbytes"]["libraries"][-1]).replace(".", ""), "gfx_714"
    key = "gfx_714" if rocm >= (7, 14) else "gfx_70" if rocm >= (7,) else "gfx_64"
    return short(rocm).replace(".", ""), key


def _without_bitsandbytes(choice: Choice) -> str:
    """Say why bitsandbytes has nothing for a torch; empty when it has."""
    if choice.kind != "rocm":
        return ""
    facts = load_table().addons["bitsandbytes"]
    rocm = parse_version(choice.rocm)
    if not rocm:
        return "the ROCm of a nightly torch is not known before it is installed"
    name, key = bitsandbytes_library(rocm)
    if name not in [line.replace(".", "") for line in facts["libraries"]]:
        return f"it has libraries for ROCm {', '.join(facts['libraries'])}, not for {choice.rocm}"
    missing = [gfx for gfx in choice.targets if gfx not in facts[key]]
    return f"its library for ROCm {choice.rocm} has no kernels for {missing[0]}" if missing else ""


def _bitsandbytes(choice: Choice) -> Step:
    facts = load_table().addons["bitsandbytes"]
    check = "import bitsandbytes"
    reason = "QLoRA keeps the base model in 4 bits with it; its wheel has the libraries inside"
    if choice.kind == "rocm":
        library = f"libbitsandbytes_rocm{bitsandbytes_library(parse_version(choice.rocm))[0]}.so"
        check += f', os; os.stat(os.path.join(os.path.dirname(bitsandbytes.__file__), "{library}"))'
        reason += f": {library} serves {', '.join(choice.targets)}"
    return Step(
        id="bitsandbytes",
        title=f"Install bitsandbytes {facts['release']}",
        reason=reason,
        commands=(f"{choice.pip} install -c {CONSTRAINTS} 'bitsandbytes=={facts['release']}'",),
        verify=(f"{choice.interpreter} -c '{check}'",),
        undo=(f"{choice.pip} uninstall -y bitsandbytes",),
        needs=("torch-check",), disk_gib=0.4, minutes=1, downloads=("0.1 GiB from pip's index",),
    )  # fmt: skip


# ---- DeepSpeed ----
def _deepspeed(choice: Choice) -> Step:
    facts = load_table().addons["deepspeed"]
    requires = " ".join(quote(name) for name in facts["requires"])
    compiled = (
        "; CPU-Adam is compiled at the first step with offload and needs ROCm's compiler then; sparse attention and "
        "GDS do not exist on ROCm"
        if choice.kind == "rocm"
        else ""
    )
    return Step(
        id="deepspeed",
        title=f"Install DeepSpeed {facts['release']} beside this torch",
        reason="a plain `pip install deepspeed` may bring another torch: --no-deps takes the package alone, its pure "
        "requirements come under the constraints. No operators are compiled now (DS_BUILD_OPS=0)" + compiled,
        commands=(
            f"{choice.pip} install -c {CONSTRAINTS} setuptools wheel {requires}",
            f"DS_BUILD_OPS=0 {choice.pip} install --no-deps --no-build-isolation -c {CONSTRAINTS} "
            f"{quote('deepspeed==' + facts['release'])}",
        ),
        verify=(f"{choice.interpreter} -c 'import deepspeed, hjson, msgpack, cpuinfo'",),
        undo=(f"{choice.pip} uninstall -y deepspeed",),
        needs=("torch-check",), disk_gib=0.2, minutes=1, downloads=("0.03 GiB from pip's index",),
    )  # fmt: skip


# ---- vLLM ----
def _serve(m: Machine, choice: Choice) -> Step:
    images = load_table().addons["vllm"]["images"]
    targets = set(choice.targets)
    here = targets <= set(m.targets)
    if choice.kind != "rocm":
        raise UserError(
            f"setup knows vLLM images for AMD GPUs, and this plan is for {choice.kind}",
            hint="would match: leave serve out of --for, and use `surefoot chat`",
            key="--for",
        )
    if m.container and here:
        raise UserError(
            f"vLLM comes as a container of its own, and this is a container ({m.container}) already",
            hint="would match: plan it on the host; or leave serve out of --for and start "
            f"{images[0]['image']} beside this one",
            key="--for",
        )
    serving = [row for row in images if targets <= set(row["gfx"])]
    if not serving:
        known = sorted({gfx for row in images for gfx in row["gfx"]})
        raise UserError(
            f"no vLLM image has kernels for {', '.join(choice.targets)}",
            hint=f"would match: {', '.join(known)}; or leave serve out of --for, and use `surefoot chat`",
            key="--for",
        )
    allowed = [row for row in serving if not (here and m.driver) or driver_allows(m, parse_version(row["rocm"]))]
    if not allowed:
        raise UserError(
            f"no vLLM image fits the driver {short(m.driver, 3)}",
            hint=f"would match: a driver for ROCm {' or '.join(row['rocm'] for row in serving)}",
            key="--for",
        )
    return _serve_step(allowed[0], choice, run_flags(m, Target("rocm", choice.targets, here, "")))


def _serve_step(row: dict[str, Any], choice: Choice, flags: str) -> Step:
    engine = "engine=$(command -v docker || command -v podman)"
    image = quote(row["image"])
    return Step(
        id="serve",
        title="Fetch the vLLM container",
        reason="vLLM is bound to a torch and a ROCm of its own, so it stays out of the training environment; this "
        f"image (ROCm {row['rocm']}) has kernels for {', '.join(choice.targets)} and fits the driver. Start "
        f"it with: docker run --rm -it {flags} -p 8000:8000 {row['image']}",
        commands=(f'{engine}\n"$engine" pull {image}',),
        verify=(f'{engine}\n"$engine" image inspect {image} > /dev/null',),
        undo=(f'{engine}\n"$engine" image rm {image}',),
        needs=("torch-check",), disk_gib=row["disk_gib"], minutes=20,
        downloads=(f"about {row['disk_gib'] / 2:g} GiB from {row['image'].split('/')[0]}",),
    )  # fmt: skip

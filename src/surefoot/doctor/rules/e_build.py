"""E. Building from source (F67 to F79)."""

from __future__ import annotations

import re

from surefoot.doctor.clues import amd_context, is_rocm, said
from surefoot.doctor.finding import Hit, hit, seen
from surefoot.machine.facts import Machine
from surefoot.machine.gfx import is_gfx, split_targets
from surefoot.machine.table import load_table


def _log(m: Machine, pattern: str, *evidence: str) -> Hit | None:
    text = m.log_said(pattern)
    return seen(f"log: {text}", *evidence) if text else None


def hipcc_there(m: Machine) -> bool | None:
    """Whether a hipcc is known to be here; None when nobody could look."""
    answer = m.snapshot.command("hipcc")
    if answer and answer.rc == 0:
        return True
    places = ("/opt/rocm/bin/hipcc", "/usr/bin/hipcc", *(f"{root}/bin/hipcc" for root in m.rocm_trees))
    if any(m.snapshot.present(p) for p in places) or "rocm-sdk-devel" in m.dists:
        return True
    return False if m.snapshot.missing_command("hipcc") else None


_NO_CUDA = (
    r"CUDA_HOME\S* (environment variable )?is not set|CUDA_HOME .*not set|nvcc\S* (was |is )?not "
    r"found|nvcc.*No such file|nvcc not in path"
)


def f67(m: Machine) -> Hit | None:
    """A build looks for CUDA because it found no ROCm to build with."""
    text = m.log_said(_NO_CUDA)
    if not text or not amd_context(m):
        return None
    missing = "no hipcc is installed" if hipcc_there(m) is False else ""
    return seen(f"log: {text}", missing, f"torch is {m.torch.version}" if m.torch else "")


def f68(m: Machine) -> Hit | None:
    """A build in an isolated environment without this torch."""
    text = m.log_said(r"ModuleNotFoundError: No module named '?torch\b")
    building = m.log_said(
        r"build.?isolation|get_requires_for_build|subprocess-exited-with-error|Getting requirements to "
        r"build|pip-build-env|setup\.py|Failed building wheel|build backend"
    )
    if m.torch is None:
        return None
    outside = f"torch {m.torch.version} is installed outside of the build environment"
    if text and building:
        return seen(f"log: {text}", outside)
    cuda = m.log_said(_NO_CUDA)
    fetched = m.log_said(
        r"(Downloading|Using cached|Installing|Installed|Successfully installed) .*\btorch[-= ]+=?\d\S*"
    )
    depends = m.log_said(
        r"Installing build dependencies|Preparing metadata|pip-build-env|Getting requirements to build"
    )
    if cuda and fetched and depends and "+rocm" not in fetched and is_rocm(m):
        return seen(f"log: {fetched}", f"log: {cuda}", outside)
    return None


def f69(m: Machine) -> Hit | None:
    """HIP's headers are not there."""
    text = m.log_said(
        r"(hip|hipblas|hipblaslt|rocblas|hiprand|hipsparse|hipcub|rocprim|thrust|rccl|"
        r"hipsolver)/[\w./]+\.(h|hpp)['\"]?:? ?(file )?(not found|No such file)"
    )
    if not text:
        return None
    devel = m.dists.get("rocm-sdk-devel")
    unpacked = bool(devel) and "_rocm_sdk_devel" not in (devel.top if devel else ())
    return seen(f"log: {text}", "rocm-sdk-devel is installed but not unpacked" if unpacked else "")


def f70(m: Machine) -> Hit | None:
    """The compiler looks for ROCm in the wrong place."""
    text = m.log_said(r"cannot find (HIP runtime|ROCm device library|HIP device library)")
    stale = [f"{n}={v}" for n in ("HIP_PATH", "ROCM_PATH", "ROCM_HOME", "HIP_DEVICE_LIB_PATH") if (v := m.env(n))]
    return seen(f"log: {text}", *stale) if text else None


def f71(m: Machine) -> Hit | None:
    """A GCC version without its C++ headers, which clang picked."""
    text = m.log_said(
        r"'cmath' file not found|cannot find -lstdc\+\+|'(cstdlib|limits|string|type_traits)' file not found"
    )
    numbers = [int(n) for n in m.snapshot.listing("/usr/lib/gcc/x86_64-linux-gnu") if n.isdigit() and len(n) < 4]
    headers = [int(n) for n in m.snapshot.listing("/usr/include/c++") if n.isdigit() and len(n) < 4]
    bare = numbers and headers and max(numbers) not in headers
    version = str(max(numbers)) if numbers else "N"
    words = f"/usr/lib/gcc/x86_64-linux-gnu/{version} is there, /usr/include/c++/{version} is not" if bare else ""
    return Hit(tuple(e for e in (f"log: {text}", words) if e), {"gcc": version}, seen=True) if text else None


def f72(m: Machine) -> Hit | None:
    """A build ran out of memory."""
    text = m.log_said(
        r"unable to execute command: Killed|(clang|cc1plus|ninja|hipcc)\S*:? .*\bKilled\b|Killed signal "
        r"terminated program cc1plus|c\+\+: fatal error: Killed"
    )
    oom = m.kernel_said(r"Out of memory: Killed process \d+ \((clang|cc1plus|ninja|ld\.lld|hipcc|ld|cicc|lld)\S*\)")
    jobs = m.env("MAX_JOBS")
    fit = max(1, (m.ram - 2 * 2**30) // (5 * 2**30)) if m.ram else 1
    if not text and not oom:
        return None
    evidence = (
        f"log: {text}" if text else "",
        f"dmesg: {oom}" if oom else "",
        f"MAX_JOBS={jobs}" if jobs else "",
        f"{m.ram / 2**30:.0f} GiB of memory" if m.ram else "",
    )
    return Hit(tuple(e for e in evidence if e), {"jobs": str(fit)}, seen=True)


#: Which separator each builder wants in its list of targets (facts/rocm.md 1.5), and which it does not understand.
_SEPARATORS = {
    "PYTORCH_ROCM_ARCH": (";", ","),
    "GPU_ARCHS": (";", ", "),
    "HIP_ARCHITECTURES": (" ", ";,"),
    "CMAKE_HIP_ARCHITECTURES": (";", ", "),
    "GPU_TARGETS": (";", ", "),
    "AMDGPU_TARGETS": (";", ", "),
    "HCC_AMDGPU_TARGET": (",", "; "),
}


def f73(m: Machine) -> Hit | None:
    """A list of targets with the wrong separator becomes one unknown target."""
    for name, (right, wrong) in _SEPARATORS.items():
        value = (m.env(name) or "").strip()
        targets = split_targets(value)
        if len(targets) > 1 and all(is_gfx(t) for t in targets) and any(c in value for c in wrong):
            return hit(f"{name}={value}", name=name, right=right, value=right.join(targets))
    text = m.log_said(
        r"--offload-arch=gfx\w+[,; ]gfx\w+.*|(invalid|unknown|unsupported) (target|processor|arch)\S* .*gfx\w+[,;]gfx"
    )
    return seen(f"log: {text}", name="PYTORCH_ROCM_ARCH", right=";", value="gfx90a;gfx942") if text else None


def f74(m: Machine) -> Hit | None:
    """flash-attn was asked to build for a GPU that its CK kernels do not have."""
    listed = load_table().addons["flash_attn_ck"]["gfx"]
    text = m.log_said(r"Invalid archs? of|GPU_ARCHS (is )?not set and no GPU|Unsupported (GPU )?arch\S* .*flash")
    asked = [t for t in split_targets(m.env("GPU_ARCHS") or "") if is_gfx(t)]
    wrong = [t for t in asked if t not in listed]
    if wrong and m.env("FLASH_ATTENTION_TRITON_AMD_ENABLE") not in ("TRUE", "1"):
        evidence = f"GPU_ARCHS={m.env('GPU_ARCHS')}; flash-attn's CK kernels exist for {', '.join(listed)}"
        return seen(evidence, f"log: {text}") if text else hit(evidence)
    return (
        seen(
            f"log: {text}",
            f"PYTORCH_ROCM_ARCH={v}, which flash-attn does not read" if (v := m.env("PYTORCH_ROCM_ARCH")) else "",
        )
        if text
        else None
    )


def f75(m: Machine) -> Hit | None:
    """An option that does not exist."""
    return _log(
        m,
        (
            r"no such option: --(global-option|build-option|rocm)|option --rocm not recognized|error: "
            r".*--global-option=?.*--rocm"
        ),
    )


def f76(m: Machine) -> Hit | None:
    """The composable_kernel submodule is missing."""
    return _log(m, r"(fmha_bwd|fmha_fwd|ck_tile/[\w/]+|ck/[\w/]+)\.hpp['\"]?:? ?(file )?(not found|No such file)")


def f77(m: Machine) -> Hit | None:
    """A package refuses this GPU's target."""
    return _log(m, r"None of the detected ROCm architectures", *(f"the GPU is {t}" for t in m.targets[:1]))


def f78(m: Machine) -> Hit | None:
    """The host's C++ library is too new for this ROCm's compiler."""
    return _log(m, r"__glibcxx_assert_fail")


def f79(m: Machine) -> Hit | None:
    """DeepSpeed finds no version file of ROCm."""
    text = m.log_said(r"Could not detect ROCm version|\.info/version-dev|No such file.*\.info/version")
    if not text:
        return None
    root = next(iter(m.rocm_trees), "")
    return seen(f"log: {text}", f"ROCm is in {root}" if root else "no ROCm tree with .info/version is here")


def f109(m: Machine) -> Hit | None:
    """Compilation at run time needs a compiler that a run-time-only ROCm lacks."""
    text = m.log_said(
        r"/opt/rocm\S*/bin/(hipcc|clang\S*|amdclang\S*).*(not found|No such file)|(not found|No such "
        r"file).*/bin/(hipcc|amdclang\S*)|hipcc: (command )?not found|HIPRTC_ERROR_COMPILATION|Code "
        r"object build failed|Error building extension"
    )
    if not text or not is_rocm(m) or hipcc_there(m) is not False:
        return None
    return seen(
        f"log: {text}",
        "no hipcc is installed",
        f"ROCm {m.dists['rocm-sdk-core'].version} came from pip" if "rocm-sdk-core" in m.dists else "",
    )


def f108(m: Machine) -> Hit | None:
    """Triton and torch.compile need a C compiler and Python's headers at run time."""
    compiler = m.python.get("compiler")
    fields = compiler if isinstance(compiler, dict) else {}
    text = m.log_said(
        r"Failed to find C compiler|Python\.h: No such file|fatal error: Python\.h|gcc: (command )?not found"
    )
    no_cc = "cc" in fields and fields["cc"] is None and not m.env("CC")
    no_headers = fields.get("python_h") is False
    gpu_torch = m.torch is not None and m.torch.flavour in ("rocm", "cuda")
    if not text and not (gpu_torch and (no_cc or no_headers)):
        return None
    evidence = (
        "no cc, gcc or clang on PATH" if no_cc else "",
        "Python.h is not there for this Python" if no_headers else "",
    )
    fix = "{compiler}" if no_cc or re.search(r"compiler|gcc", text) else "{python_dev}"
    return Hit(tuple(e for e in (f"log: {text}" if text else "", *evidence) if e), seen=bool(text), fix=(fix,))


def f129(m: Machine) -> Hit | None:
    """The kernel killed the training process for want of main memory."""
    text = m.kernel_said(
        r"Out of memory: Killed process \d+ \((python\S*|torchrun|pt_main_thread|surefoot)\)|"
        r"oom-kill:.*task=(python|pt_main)"
    )
    return seen(f"dmesg: {text}", f"{m.ram / 2**30:.0f} GiB of memory" if m.ram else "") if text else None


def f128(m: Machine) -> Hit | None:
    """Compiled files land on a file system that forbids running them."""
    text = said(m, r"failed to map segment from shared object")
    noexec = re.search(r"^\S+ /tmp \S+ \S*\bnoexec\b", m.snapshot.text("/proc/mounts"), re.M)
    moved = m.env("TORCHINDUCTOR_CACHE_DIR") or m.env("TMPDIR")
    if noexec and not moved and m.torch is not None and (text or m.torch.flavour != "cpu"):
        evidence = "/proc/mounts: /tmp is mounted noexec, and torch.compile keeps its libraries there"
        return seen(evidence, text) if text else hit(evidence)
    return None

"""What follows from a hand-written patch: the files of a GPU, torch's companions, access to device nodes."""

from __future__ import annotations

import copy
import re
from typing import Any

from surefoot.machine.gfx import encode_target, is_gfx
from surefoot.machine.snapshot import as_dict, as_int, as_mode, as_numbers, as_text, clean_path, dist_name
from surefoot.machine.table import load_table
from surefoot.machine.versions import local_tag, parse_version, rocm_of_tag, short

_KFD = "/sys/devices/virtual/kfd/kfd/topology/nodes"


def merge(target: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Lay a patch over a mapping: mappings merge, everything else replaces; `null` stays, it means "is not there"."""
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict) and "error" not in value:
            merge(target[key], value)
        else:
            target[key] = copy.deepcopy(value)
    return target


def whole_dists(patch: dict[str, Any]) -> dict[str, Any]:
    """Let a distribution, and torch, be written as its version alone: `bitsandbytes: 0.45.5`."""
    dists = as_dict(as_dict(patch.get("python")).get("dists"))
    for name, row in dists.items():
        if isinstance(row, (str, int, float)) and not isinstance(row, bool):
            patch["python"]["dists"][name] = {"version": str(row)}
    if isinstance(torch := as_dict(patch.get("python")).get("torch"), str):
        patch["python"]["torch"] = {"version": torch}
    return patch


def read_site_files(raw: dict[str, Any], patch: dict[str, Any]) -> None:
    """Take a `.../torch/version.py` and `.../NAME.dist-info/METADATA` among the patch's files as what they are."""
    python: dict[str, Any] = {}
    for path, text in as_dict(patch.get("files")).items():
        if path.endswith("/torch/version.py") and isinstance(text, str):
            found = dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*=\s*(.+?)\s*$", text, re.M))
            values = {k: (None if v == "None" else v.strip("'\"")) for k, v in found.items()}
            python["torch"] = {
                "version": values.get("__version__"),
                "hip": values.get("hip"),
                "cuda": values.get("cuda"),
            }
        elif path.endswith(".dist-info/METADATA") and isinstance(text, str):
            fields = dict(re.findall(r"^(Name|Version|Summary): (.*)$", text, re.M))
            requires = re.findall(r"^Requires-Dist: (.*)$", text, re.M)
            if fields.get("Name") and fields.get("Version"):
                row = {"version": fields["Version"], "summary": fields.get("Summary", ""), "requires": requires}
                python.setdefault("dists", {})[dist_name(fields["Name"])] = row
    if python:
        patch["python"] = merge(python, as_dict(patch.get("python")))


def revive(raw: dict[str, Any], patch: dict[str, Any]) -> None:
    """What a patch shows is there: neither it nor a folder above it stays missing because the base said so."""
    sections = ("files", "dirs", "links", "nodes")
    shown: set[str] = set()
    hidden: set[str] = set()
    for section in sections:
        for path, value in as_dict(patch.get(section)).items():
            (hidden if value is None else shown).add(clean_path(path))
    needed = {clean_path(path[:end]) for path in shown for end in _ends(path)} - hidden
    for section in sections:
        entries, written = as_dict(raw.get(section)), as_dict(patch.get(section))
        for path, value in entries.items():
            if value is None and path not in written and clean_path(path) in needed:
                del raw[section][path]


def _ends(path: str) -> list[int]:
    """Where each folder above a path ends, and the path itself."""
    return [i for i, letter in enumerate(path) if letter == "/" and i] + [len(path)]


def sync_module(raw: dict[str, Any], patch: dict[str, Any]) -> None:
    """Without the module there is no KFD and no device node, unless the patch says otherwise."""
    files = as_dict(patch.get("files"))
    gone = any(p in files and files[p] is None for p in ("/sys/module/amdgpu", "/sys/module/amdgpu/initstate"))
    gone = gone or as_dict(patch.get("dirs")).get("/sys/module/amdgpu", "") is None
    if not gone or not isinstance(raw.get("files"), dict):
        return
    raw["files"]["/sys/module/amdgpu"] = None
    nodes = as_dict(patch.get("nodes"))
    for path in ("/sys/devices/virtual/kfd", "/dev/kfd", "/dev/dri"):
        mentioned = any(p == path or p.startswith(path + "/") for p in (*files, *nodes))
        if not mentioned:
            raw["files"][path] = None


def sync_torch(raw: dict[str, Any], before: dict[str, Any], patch: dict[str, Any]) -> None:
    """Let one written torch version say the rest: dist, hip, cuda and companions follow unless the patch names them."""
    written, dists_patch = as_dict(patch.get("torch")), as_dict(patch.get("dists"))
    if "torch" in patch and patch["torch"] is None and "torch" not in dists_patch:
        _remove_torch(raw, dists_patch)
        return
    dist = as_dict(dists_patch.get("torch"))
    version = as_text(written.get("version")) or as_text(dist.get("version"))
    python = raw.get("python")
    if not version or not isinstance(python, dict):
        return
    torch = python.get("torch") if isinstance(python.get("torch"), dict) else {}
    dists = python.get("dists") if isinstance(python.get("dists"), dict) else {}
    python["torch"], python["dists"] = torch, dists
    torch["version"] = as_text(written.get("version")) or version
    if not dist.get("version"):
        dists["torch"] = {**as_dict(dists.get("torch")), "version": version}
    tag = local_tag(version)
    rocm = rocm_of_tag(tag)
    release = next((r for r in load_table().rocm if r.version == rocm[:2]), None)
    if "hip" not in written:
        same = local_tag(as_text(before.get("version"))) == tag
        torch["hip"] = (before.get("hip") if same else f"{short(release.hip if release else rocm)}.0") if rocm else None
    if "cuda" not in written:
        named = f"{tag[2:-1]}.{tag[-1]}" if tag.startswith("cu") else "13.0"
        torch["cuda"] = None if torch.get("hip") or tag == "cpu" else named
    if rocm and "libs" not in written:
        own = ["libamdhip64.so", "libhsa-runtime64.so", "libamd_smi.so"] if rocm < (7, 14) else []
        torch["libs"] = ["libtorch_hip.so", *own]
    later = any("modified" in as_dict(row) for row in dists_patch.values())  # something came after a first install
    if not later and version != as_text(before.get("version")):
        _sync_companions(raw, version, dists, dists_patch)


def _remove_torch(raw: dict[str, Any], patch: dict[str, Any]) -> None:
    """No torch: its distribution and what only came with it are not there either, unless the patch names them."""
    dists = as_dict(as_dict(raw.get("python")).get("dists"))
    came = ("torch", "torchvision", "torchaudio", "triton", "triton-rocm", "pytorch-triton-rocm")
    for name in dists:
        if name not in patch and (name in came or name.startswith("amd-torch-device-")):
            del raw["python"]["dists"][name]


def _sync_companions(raw: dict[str, Any], version: str, dists: dict[str, Any], patch: dict[str, Any]) -> None:
    """Make the packages that come with torch those of the new version, as a fresh install would.

    A patch that gives torch a `modified` time of its own says that torch alone was replaced: then they stay.
    """
    row, tag = load_table().torch_release(parse_version(version)), local_tag(version)
    rocm = rocm_of_tag(tag)
    suffix = f"+{tag}" if tag else ""
    for name, number in (("torchvision", row.vision if row else ()), ("torchaudio", row.audio if row else ())):
        if name in dists and name not in patch and number:
            dists[name] = {**as_dict(dists[name]), "version": f"{short(number)}.0{suffix}"}
    split = rocm >= (7, 14)
    for name in [n for n in dists if n not in patch]:
        sdk = name == "rocm" or name.startswith(("rocm-sdk-", "amd-torch-device-"))
        if sdk and split:
            full = version if name.startswith("amd-torch") else ".".join(str(n) for n in (*rocm, 0, 0)[:3])
            dists[name] = {**as_dict(dists[name]), "version": full}
        elif sdk or name in ("triton", "triton-rocm", "pytorch-triton-rocm"):
            del dists[name]
    requires = (
        [f"rocm[libraries]=={'.'.join(str(n) for n in (*rocm, 0)[:3])}"] if split and "rocm-sdk-core" in dists else []
    )
    owner = {"rocm": row.triton if row and rocm < (10,) else "triton", "cuda": "triton"}.get(
        "rocm" if rocm else ("" if tag == "cpu" else "cuda"), ""
    )
    named = [n for n in ("triton", "triton-rocm", "pytorch-triton-rocm") if n in patch]
    if owner:
        requires.append(f"{owner}==3.6.0")
        if not named:
            dists[owner] = {"version": f"3.6.0{suffix if rocm >= (10,) else ''}", "top": ["triton"], "installer": "pip"}
    if "requires" not in as_dict(patch.get("torch")):
        dists["torch"] = {**as_dict(dists.get("torch")), "requires": requires if not named else []}
    python = as_dict(raw.get("python"))
    written_gfx = as_dict(python.get("torch")).get("gfx")
    if isinstance(written_gfx, dict):
        as_dict(python.get("torch")).pop("gfx", None)


def sync_access(raw: dict[str, Any], patch: dict[str, Any]) -> None:
    """Work out how opening a GPU node goes when a patch changes groups or modes and does not say it itself."""
    process, nodes_patch = as_dict(patch.get("process")), as_dict(patch.get("nodes"))
    everywhere = bool({"uid", "gid", "groups"} & set(process)) or bool(
        {"/proc/self/uid_map", "/proc/self/status"} & set(as_dict(patch.get("files")))
    )
    now = as_dict(raw.get("process"))
    full = as_text(as_dict(raw.get("files")).get("/proc/self/uid_map")).split()[-1:] == ["4294967295"]
    groups = set(as_numbers(now.get("groups")) or [])
    status = as_dict(raw.get("files")).get("/proc/self/status")
    lines = "\n".join(f"{k} {v}" for k, v in status.items()) if isinstance(status, dict) else as_text(status)
    if line := re.search(r"^Groups:?[ \t]*([\d \t]*)$", lines, re.M):
        groups = {int(g) for g in line.group(1).split()}
    groups.add(as_int(now.get("gid"), -1))
    for path, node in as_dict(raw.get("nodes")).items():
        changed = as_dict(nodes_patch.get(path))
        if not isinstance(node, dict) or "open" in changed or not path.startswith(("/dev/kfd", "/dev/dri/render")):
            continue
        if not everywhere and not {"mode", "uid", "gid"} & set(changed):
            continue
        mode = as_mode(node.get("mode", "0660"))
        root = as_int(now.get("uid"), -1) == 0 and full
        owner = as_int(now.get("uid"), -1) == as_int(node.get("uid")) and mode & 0o600 == 0o600 and full
        member = as_int(node.get("gid"), -2) in groups and mode & 0o060 == 0o060
        node["open"] = "ok" if root or owner or member or mode & 0o006 == 0o006 else "EACCES"


def remove_gpus(raw: dict[str, Any]) -> None:
    """Take every GPU of a base machine away: its topology nodes, PCI devices and device nodes."""
    prefixes = (_KFD, "/sys/bus/pci/devices/", "/sys/class/drm/card", "/dev/dri/")
    for section in ("files", "dirs", "links", "nodes"):
        entries = as_dict(raw.get(section))
        raw[section] = {p: v for p, v in entries.items() if not p.startswith(prefixes) or p.startswith(f"{_KFD}/0")}


def gpu_files(gpus: object) -> dict[str, Any]:
    """Write the files that the kernel would show for a list of GPUs; see docs/cases.md for the keys."""
    out: dict[str, dict[str, Any]] = {"files": {}, "links": {}, "nodes": {}}
    index = 0
    for entry in gpus if isinstance(gpus, list) else [gpus]:
        entry = {"gfx": entry} if isinstance(entry, str) else as_dict(entry)
        if not entry:
            continue
        for _ in range(max(1, min(as_int(entry.get("count"), 1), 64))):
            _one_gpu(out, entry, index)
            index += 1
    return out


def _device(value: object, known: tuple[str, ...]) -> str:
    """A PCI device id as people write it: `744c`, `"0x744c"`, or YAML's 0x744c, which is a number by then."""
    text = as_text(value).lower().removeprefix("0x")
    if isinstance(value, int) and not isinstance(value, bool):
        as_hex = f"{value:04x}"
        if len(text) > 4 or (as_hex in known and text not in known):
            text = as_hex
    return text if re.fullmatch(r"[0-9a-f]{1,4}", text) else ""


def _one_gpu(out: dict[str, dict[str, Any]], entry: dict[str, Any], index: int) -> None:
    row = load_table().gpu(as_text(entry.get("gfx")))
    named = as_text(entry.get("gfx"))
    unknown = encode_target(named) if is_gfx(named) else 0
    gfx_version = row.target_version if row else as_int(entry.get("target_version"), unknown)
    device = _device(entry.get("device"), row.pci if row else ()) or (
        row.pci[0].partition("-")[0] if row and row.pci else "0000"
    )
    bus = 0x03 + 0x10 * index if row and row.wavefront == 64 else 0x03 + index
    bdf = as_text(entry.get("bdf")) or f"0000:{bus:02x}:00.0"
    number = [int(part, 16) for part in bdf.replace(".", ":").split(":")]
    location = number[1] << 8 | number[2] << 3 | number[3]
    integrated = bool(entry.get("integrated", row.integrated if row else False))
    cu = as_int(entry.get("cu")) or (row.compute_units[-1] if row and row.compute_units else 8)
    vram = as_int(entry.get("vram_gib")) or (row.memory_gib[-1] if row and row.memory_gib else 0)
    per_cu = 4 if row and row.wavefront == 64 else 2
    minor, node = 128 + index, f"{_KFD}/{index + 1}"
    if entry.get("kfd", True):
        out["files"][f"{node}/gpu_id"] = str(51230 + 7 * index)
        out["files"][f"{node}/name"] = "ip discovery"
        out["files"][f"{node}/properties"] = {
            "cpu_cores_count": 0, "simd_count": cu * per_cu, "simd_per_cu": per_cu, "mem_banks_count": 1,
            "lds_size_in_kb": row.lds_kib if row else 64, "wave_front_size": row.wavefront if row else 32,
            "gfx_target_version": gfx_version, "vendor_id": 4098, "device_id": int(device, 16), "location_id": location,
            "domain": number[0], "drm_render_minor": minor, "unique_id": 0 if per_cu == 2 else 4096372514887171 + index,
            "num_xcc": 8 if row and row.gfx in ("gfx942", "gfx950") else 1,
        }  # fmt: skip
        out["files"][f"{node}/mem_banks/0/properties"] = {
            "heap_type": 0 if integrated else 1, "size_in_bytes": (vram or 16) * 2**30,
        }  # fmt: skip
    pci = f"/sys/bus/pci/devices/{bdf}"
    out["files"][f"{pci}/vendor"] = "0x1002"
    out["files"][f"{pci}/device"] = f"0x{device}"
    out["files"][f"{pci}/class"] = "0x120000" if per_cu == 4 and vram >= 64 else "0x030000"
    out["links"][f"{pci}/driver"] = f"/sys/bus/pci/drivers/{as_text(entry.get('driver')) or 'amdgpu'}"
    if not integrated:
        out["files"][f"{pci}/current_link_width"] = "16"
        out["files"][f"{pci}/max_link_width"] = "16"
        out["files"][f"{pci}/current_link_speed"] = "16.0 GT/s PCIe"
        out["files"][f"{pci}/max_link_speed"] = "16.0 GT/s PCIe"
    card = f"/sys/class/drm/card{index}/device"
    if entry.get("kfd", True):
        out["files"][f"{card}/mem_info_vram_total"] = str((vram or 1) * 2**30)
    group = {"mode": "0660", "uid": 0, "gid": 993, "group": "render", "open": "ok"}
    if entry.get("render_node", True):
        out["nodes"][f"/dev/dri/renderD{minor}"] = dict(group)
        out["nodes"][f"/dev/dri/card{index}"] = {**group, "gid": 44, "group": "video"}

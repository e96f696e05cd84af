"""What tutorials say, judged for several machines; the verdicts are those of the research notes, by the machine."""

from __future__ import annotations

import re
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import surefoot.setup
from surefoot.errors import UserError
from surefoot.machine.case import base_names, base_snapshot, build_case
from surefoot.machine.facts import Machine
from surefoot.machine.snapshot import Snapshot
from surefoot.setup.advice import judge, load_words, render, to_json
from surefoot.setup.tutorial import read_tutorial

MACHINES = ("mi300x-8", "rx7900xtx-ubuntu", "w7900-igpu", "strix-halo", "mi210-docker", "cuda-h100", "cpu-only")
WHL, AMD = "https://download.pytorch.org/whl", "https://stable.repo.amd.com/rocm/whl-next/"
LETTERS = {"r": "right", "o": "outdated", "w": "wrong", "u": "unknown"}

# One letter a machine, in the order of MACHINES.
TUTORIALS = {
    "conda create -n llm python=3.11 -y": "rrrrrrr",
    "export ROCM_PATH=/opt/rocm": "oooooww",
    "export HIP_VISIBLE_DEVICES=0": "wrrrrww",
    "export HIP_PATH=/opt/rocm": "oooooww",
    'export PYTORCH_ROCM_ARCH="gfx90a;gfx942"': "rwwwrww",
    "pip install flash-attn --no-build-isolation --global-option=--rocm": "wwwwwww",
    "git clone --recursive https://github.com/pytorch/pytorch": "ooooooo",
    "export MAX_JOBS=4": "ooooooo",
    'pip install -e ".[deepspeed]"': "wwwwwrw",
    "rocm-smi": "oooooww",
    "sudo usermod -aG video,render $USER": "rrrrwww",
    'python -c "import torch; print(torch.cuda.is_available())"': "rrrrrrr",
    "optim: adamw_torch": "ooooooo",
    "fp32: true": "wwwwwwr",
    "sudo apt install amdgpu-dkms": "roowwww",
}

# Beyond the two tutorials: (line, machine, verdict, rule).
MORE = [
    ("pip install torch torchvision torchaudio", "mi300x-8", "wrong", "torch-plain"),
    ("pip install torch torchvision torchaudio", "cuda-h100", "right", "torch-cuda"),
    ("pip install torch", "cpu-only", "outdated", "torch-cuda-on-cpu"),
    (f"pip install torch -i {WHL}/cpu", "cpu-only", "right", "torch-cpu"),
    (f"pip install torch -i {WHL}/rocm7.2", "mi300x-8", "right", "torch-right"),
    (f"pip install torch -i {WHL}/rocm7.1", "mi300x-8", "outdated", "torch-older"),
    (f"pip install torch -i {WHL}/rocm6.2", "mi300x-8", "wrong", "torch-driver"),
    (f"pip install torch -i {WHL}/rocm6.2", "strix-halo", "wrong", "torch-no-kernels"),
    (f"pip install torch -i {WHL}/rocm9.9", "mi300x-8", "wrong", "torch-no-channel"),
    (f"pip install torch -i {WHL}/rocm7.2", "rx6800", "wrong", "torch-rdna2"),
    (f"pip install torch -i {WHL}/rocm7.2", "r9700-pip", "wrong", "torch-gfx12"),
    (f"pip install torch==2.9.0 -i {WHL}/rocm7.2", "mi300x-8", "wrong", "torch-no-pair"),
    (f"pip install torch --extra-index-url {WHL}/rocm7.2", "mi300x-8", "wrong", "torch-extra-index"),
    (f"pip install torch -i {WHL}/cu128", "mi300x-8", "wrong", "torch-other-build"),
    (f"pip install torch -i {WHL}/rocm7.2", "cuda-h100", "wrong", "torch-rocm-here"),
    (f"pip install --pre torch -i {WHL}/nightly/rocm7.2", "mi300x-8", "outdated", "torch-nightly"),
    ("pip install torch==2.13.0+rocm7.2", "mi300x-8", "wrong", "torch-local-tag"),
    (f"pip install 'torch[device-gfx942]' -i {AMD}", "mi300x-8", "right", "torch-amd"),
    (f"pip install 'torch[device-gfx942]' -i {AMD}", "strix-halo", "wrong", "torch-no-device"),
    ("pip install torch -i https://rocm.nightlies.amd.com/v2/gfx1151/", "strix-halo", "outdated", "torch-family-index"),
    ("pip install torch -f https://repo.radeon.com/rocm/manylinux/x/", "mi300x-8", "wrong", "torch-extra-index"),
    ("pip install torch -i https://repo.radeon.com/rocm/manylinux/x/", "mi300x-8", "outdated", "torch-radeon"),
    ("pip install -U torch", "mi300x-8", "wrong", "torch-upgrade"),
    ("uv pip install --upgrade torch", "w7900-igpu", "wrong", "torch-upgrade"),
    ("sudo pip install transformers", "mi300x-8", "wrong", "sudo-pip"),
    ("pip install aiter", "mi300x-8", "wrong", "placeholder"),
    ("pip install rocm-sdk-device-gfx942", "mi300x-8", "wrong", "placeholder"),
    ("pip install pytorch-triton-rocm", "mi300x-8", "wrong", "placeholder"),
    ("pip install triton", "rx7900xtx-ubuntu", "wrong", "triton"),
    ("pip install accelerate peft", "mi300x-8", "outdated", "needs-torch"),
    ("pip install -c surefoot-setup/constraints.txt accelerate", "mi300x-8", "right", "needs-torch-pinned"),
    ("pip install -c c.txt -e '.[deepspeed]'", "mi300x-8", "right", "deepspeed-pinned"),
    ("pip install -e '.[torch,metrics]'", "mi300x-8", "wrong", "torch-extra"),
    ("pip install -r requirements.txt", "mi300x-8", "unknown", "requirements"),
    ("pip install vllm", "mi300x-8", "wrong", "cuda-only"),
    ("pip install bitsandbytes", "mi300x-8", "right", "bitsandbytes-rocm"),
    ("pip install bitsandbytes", "rx6800", "wrong", "bitsandbytes-no-kernels"),
    ("pip install bitsandbytes==0.45.0", "mi300x-8", "outdated", "bitsandbytes-old"),
    ("pip install flash-attn", "mi300x-8", "wrong", "flash-isolation"),
    ("pip install flash-attn --no-build-isolation", "mi300x-8", "outdated", "flash-no-archs"),
    ("GPU_ARCHS=gfx942 pip install flash-attn --no-build-isolation", "mi300x-8", "right", "flash-right"),
    ("pip install flash-attn --no-build-isolation", "rx7900xtx-ubuntu", "wrong", "flash-no-ck"),
    ("pip install flash-attn --no-build-isolation", "cuda-h100", "right", "flash-cuda"),
    ("pip install flash-attn --no-build-isolation", "cpu-only", "wrong", "flash-cpu"),
    ("export FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE", "strix-halo", "right", "triton-flash"),
    ("export FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE", "rx6800", "wrong", "triton-no"),
    ("export PYTORCH_ROCM_ARCH=gfx90a,gfx942", "mi300x-8", "wrong", "arch-separator"),
    ("export PYTORCH_ROCM_ARCH='gfx90a gfx942'", "mi300x-8", "right", "arch-more"),
    ("export PYTORCH_ROCM_ARCH=gfx942", "mi300x-8", "right", "arch-right"),
    ("export PYTORCH_ROCM_ARCH=mi300", "mi300x-8", "wrong", "arch-names"),
    ("export GPU_ARCHS='gfx90a gfx942'", "mi300x-8", "wrong", "arch-separator"),
    ("export GPU_ARCHS=gfx1030", "rx6800", "wrong", "arch-no-ck"),
    ("export GPU_ARCHS=native", "mi300x-8", "right", "arch-native"),
    ("export HIP_ARCHITECTURES='gfx90a;gfx942'", "mi300x-8", "wrong", "arch-separator"),
    ("cmake -DBNB_ROCM_ARCH='gfx90a;gfx942' -S .", "mi300x-8", "right", "arch-more"),
    ("cmake -DAMDGPU_TARGETS=gfx90a,gfx942 ..", "mi300x-8", "wrong", "arch-separator"),
    ("export HSA_OVERRIDE_GFX_VERSION=11.0.0", "rx7900xtx-ubuntu", "wrong", "override-native"),
    ("export HSA_OVERRIDE_GFX_VERSION=gfx1100", "rx7900xtx-ubuntu", "wrong", "override-invalid"),
    ("export HSA_OVERRIDE_GFX_VERSION=9.4.2", "cuda-h100", "wrong", "no-amd"),
    ("export HIP_VISIBLE_DEVICES=0,1,2,3,4,5,6,7", "mi300x-8", "right", "visible-needless"),
    ("export CUDA_VISIBLE_DEVICES=1", "w7900-igpu", "wrong", "visible-igpu"),
    ("export HIP_VISIBLE_DEVICES=0,1", "rx7900xtx-ubuntu", "wrong", "visible-beyond"),
    ("export HIP_VISIBLE_DEVICES=-1", "mi300x-8", "wrong", "visible-none"),
    ("export CUDA_VISIBLE_DEVICES=0", "cuda-h100", "right", "visible-needless"),
    ("export LD_LIBRARY_PATH=/opt/rocm/lib:$LD_LIBRARY_PATH", "mi300x-8", "wrong", "library-path"),
    ("export PYTORCH_HIP_ALLOC_CONF=expandable_segments:True", "mi300x-8", "wrong", "expandable"),
    ("export AMD_LOG_LEVEL=4", "mi300x-8", "wrong", "doctors-variable"),
    ("sudo chmod 666 /dev/kfd", "mi300x-8", "wrong", "chmod"),
    ("sudo usermod -G render $USER", "mi300x-8", "wrong", "groups-replace"),
    ("sudo usermod -aG video $USER", "mi300x-8", "wrong", "groups-owner"),
    ("sudo usermod -aG render $USER", "wsl2-7900xtx", "wrong", "groups-wsl"),
    ("sudo usermod -aG render $USER", "podman-w7800", "wrong", "groups-container"),
    ("sudo apt install rocm", "mi300x-8", "outdated", "system-rocm"),
    ("sudo apt install rocm", "mi350x-rhel", "wrong", "packager"),
    ("amdgpu-install --usecase=rocm --no-dkms", "mi300x-8", "outdated", "system-rocm"),
    ("amdgpu-install --usecase=graphics", "strix-halo", "wrong", "driver-apu"),
    ("sudo apt install amdgpu-dkms", "wsl2-7900xtx", "wrong", "driver-wsl"),
    ("docker run --device /dev/kfd --device /dev/dri --group-add video x", "mi300x-8", "outdated", "run-groups"),
    ("docker run --device /dev/kfd rocm/pytorch", "mi300x-8", "wrong", "run-devices"),
    ("docker run --gpus all rocm/pytorch", "mi300x-8", "wrong", "run-nvidia-flag"),
    ("docker run --gpus all an/image", "cuda-h100", "right", "run-gpus"),
    ("nvidia-smi", "mi300x-8", "wrong", "nvidia-tool"),
    ("conda install pytorch -c pytorch", "mi300x-8", "wrong", "conda-torch"),
    ("conda create -n x python=3.9", "mi300x-8", "wrong", "python-range"),
    ("bf16: true", "mi300x-8", "right", "bf16"),
    ("bf16: true", "rx6800", "wrong", "bf16-no"),
    ("fp16: true", "mi300x-8", "outdated", "fp16-bf16"),
    ("fp16: true", "rx6800", "right", "fp16"),
    ("optim: adamw_torch_fused", "mi300x-8", "right", "adamw-fused"),
    ("llamafactory-cli train x.yaml --optim=adamw_torch", "mi300x-8", "outdated", "adamw"),
    ("python -c 'import torch; print(torch.cuda.is_bf16_supported())'", "mi300x-8", "wrong", "check-bf16"),
    ("python -c 'import torch; print(torch.version.cuda)'", "mi300x-8", "wrong", "check-cuda-version"),
    ("python tools/amd_build/build_amd.py", "mi300x-8", "outdated", "source"),
    ("cd pytorch && python setup.py install", "mi300x-8", "outdated", "source-setup-py"),
]  # fmt: skip


@cache
def machine(name: str) -> Machine:
    return Machine(Snapshot(base_snapshot(name)))


def verdicts(text: str, name: str) -> list[tuple[str, str]]:
    return [(v.verdict, v.rule) for v in judge(text, machine(name))]


@pytest.mark.parametrize("line", TUTORIALS, ids=lambda line: line[:40])
def test_the_tutorials_lines_on_seven_machines(line):
    found = [[v.verdict for v in judge(line, machine(name))] for name in MACHINES]
    assert found == [[LETTERS[letter]] for letter in TUTORIALS[line]]


@pytest.mark.parametrize(("line", "name", "verdict", "rule"), MORE, ids=lambda value: str(value)[:50])
def test_lines_that_depend_on_the_machine(line, name, verdict, rule):
    assert (verdict, rule) in verdicts(line, name)


def test_what_the_verdicts_say_on_one_machine():
    found = {v.rule: v for v in judge("\n".join(TUTORIALS), machine("w7900-igpu"))}
    assert "hides integrated graphics, number 1 (gfx1036)" in found["visible-masks-igpu"].why
    assert found["arch-missing"].instead[0].startswith("export PYTORCH_ROCM_ARCH='gfx1100'")
    assert "no option --rocm exists" in found["flash-rocm-option"].why
    assert found["deepspeed"].why.startswith("risky") and "constraints.txt" in found["deepspeed"].instead[0]
    assert found["jobs-few"].instead[0].startswith("export MAX_JOBS=28")  # (114 GiB - 2) / 4
    assert found["source"].why.startswith("rarely needed") and "rocm7.2" in found["source"].instead[0]


def test_an_integrated_gpu_that_comes_first():
    gpus = [
        {"gfx": "gfx1036", "device": "164e", "cu": 2},
        {"gfx": "gfx1100", "device": "7448", "vram_gib": 48, "cu": 96},
    ]
    m = Machine(build_case({"base": "rx7900xtx-ubuntu", "gpus": gpus}, "first").snapshot)
    (found,) = judge("export HIP_VISIBLE_DEVICES=0", m)
    assert (found.verdict, found.instead) == ("wrong", ("export HIP_VISIBLE_DEVICES=1",))


@pytest.mark.parametrize(("kib", "verdict"), [(16_000_000, "wrong"), (18_900_000, "right"), (64_000_000, "outdated")])
def test_max_jobs_by_free_memory(kib, verdict):
    patch = {"files./proc/meminfo#MemAvailable:": f"{kib} kB"}
    m = Machine(build_case({"base": "rx7900xtx-ubuntu", "patch": patch}, "small").snapshot)
    assert [v.verdict for v in judge("MAX_JOBS=4 make", m) if v.rule] == [verdict]


def test_a_card_that_only_a_source_build_serves():
    gpus = [{"gfx": "gfx1031", "device": "73df", "vram_gib": 12, "cu": 40}]
    m = Machine(build_case({"base": "rx6800", "gpus": gpus}, "community").snapshot)
    rows = judge("git clone --recursive https://github.com/pytorch/pytorch\nexport HSA_OVERRIDE_GFX_VERSION=10.3.0", m)
    assert [(v.verdict, v.rule) for v in rows] == [("right", "source-needed"), ("right", "override-stopgap")]
    assert verdicts("export HSA_OVERRIDE_GFX_VERSION=10.3.0", "rx6800") == [("wrong", "override-native")]


def test_groups_and_the_new_login():
    patch = {"process.groups": [1000]}
    m = Machine(build_case({"base": "rx7900xtx-ubuntu", "patch": patch}, "outside").snapshot)
    (alone,) = judge("sudo usermod -aG render,video $USER", m)
    assert alone.verdict == "right" and "log out" in alone.instead[0]
    first = judge("sudo usermod -aG render,video $USER\nsudo reboot", m)[0]
    assert first.rule == "groups-login" and first.instead == ()


WRAPPED = {
    "plain": "{0}\n{1}\n",
    "fence": "Some words.\n```bash\n{0}\n{1}\n```\nMore words.\n",
    "prompts": "```console\n$ {0}\nsome output\n$ {1}\n```\n",
    "root prompts": "```\n# {0}\n# {1}\n```\n",
    "user and host": "me@box:~/x$ {0}\n(venv) me@box:~$ {1}\n",
    "list": "1. First type:\n   - {0}\n2. {1}\n",
    "inline": "Run `{0}` first, and then `{1}`, as the docs say.\n",
    "together": "{0} && {1}\n",
    "comments": "#!/bin/bash\n# this sets things up\n{0}   # first\n{1}   # second\n",
    "notebook": "```\n!{0}\n!{1}\n```\n",
    "dockerfile": "```dockerfile\nRUN {0}\nRUN {1}\n```\n",
    "chinese": "先安装依赖：\n{0}\n然后检查显卡是否可用：\n{1}\n",
    "web page": "<p>Do this &amp; that</p><pre><code>{0}\n</code></pre>\n<div>then</div>\n<code>{1}</code>\n",
    "windows line ends": "{0}\r\n{1}\r\n",
}


@pytest.mark.parametrize("form", WRAPPED)
def test_tutorials_come_in_many_forms(form):
    text = WRAPPED[form].format("pip install torch", "pip install -r requirements.txt")
    assert verdicts(text, "mi300x-8") == [("wrong", "torch-plain"), ("unknown", "requirements")]


def test_continued_lines_prompts_of_python_and_here_documents():
    text = "pip install \\\n    flash-attn \\\n    --no-build-isolation --global-option=--rocm\n"
    assert verdicts(text, "mi300x-8") == [("wrong", "flash-rocm-option")]
    assert verdicts(">>> import torch\n>>> torch.cuda.is_available()\nTrue\n", "mi300x-8")[1][0] == "right"
    here = "python - <<EOF\nimport torch\nprint(torch.cuda.is_bf16_supported())\nEOF\nrocm-smi\n"
    assert verdicts(here, "mi300x-8") == [("wrong", "check-bf16"), ("outdated", "rocm-smi")]
    quoted = 'python -c "\nimport torch\nprint(torch.cuda.is_available())\n"\nrocm-smi\n'
    assert verdicts(quoted, "mi300x-8") == [("right", "check-amd"), ("outdated", "rocm-smi")]
    assert [v.line for v in judge(quoted, machine("mi300x-8"))] == [1, 5]


def test_variables_in_every_spelling():
    for text in (
        "ROCM_PATH=/opt/rocm", "export ROCM_PATH=/opt/rocm", "ENV ROCM_PATH /opt/rocm", "ENV ROCM_PATH=/opt/rocm",
        "echo 'export ROCM_PATH=/opt/rocm' >> ~/.bashrc", "ROCM_PATH=/opt/rocm make", "export A=1 ROCM_PATH=/opt/rocm",
        "docker run -e ROCM_PATH=/opt/rocm an/image",
    ):  # fmt: skip
        assert ("outdated", "rocm-path") in verdicts(text, "mi300x-8"), text


def test_an_unquoted_list_of_targets_ends_at_its_semicolon():
    found = verdicts("export PYTORCH_ROCM_ARCH=gfx90a;gfx942", "mi300x-8")
    assert found == [("wrong", "arch-missing"), ("wrong", "arch-unquoted")]


def test_what_a_command_prints_is_one_word():
    text = "export PYTORCH_ROCM_ARCH=$(rocminfo | grep -o 'gfx.*' | head -1); rocm-smi"
    assert [v.text for v in judge(text, machine("mi300x-8"))][1:] == ["rocm-smi"]
    text = "export ROCM_HOME=$(rocm-sdk path --root) && rocminfo"
    assert verdicts(text, "strix-halo") == [("right", "rocm-path-sdk"), ("right", "rocminfo")]


def test_training_arguments_in_python():
    text = "```python\nargs = TrainingArguments(optim='adamw_torch', bf16=True)\nload(torch_dtype=torch.float32)\n```"
    assert [rule for _, rule in verdicts(text, "mi300x-8")] == ["adamw", "bf16", "fp32"]
    assert [rule for _, rule in verdicts(text, "rx6800")] == ["adamw", "bf16-no", "fp32"]


def test_a_machine_that_nobody_looked_at_gets_no_verdict():
    with pytest.raises(UserError, match="whether it has a GPU is not known"):
        judge("rocm-smi", Machine(Snapshot({"schema": "surefoot.snapshot/1"})))


def test_prose_is_no_command():
    text = (
        "# conda: the way to install\n\nPip install is easy, and conda is the usual way to do it.\n"
        "You should export ROCM_PATH before you build.\n- a list item of words\n| a | table |\n"
        "First, git clone the repository that you like.\n请先安装 conda 和 pip。\n```yaml\nlora_rank: 8\n```\n"
    )
    assert [p.text for p in read_tutorial(text)] == ["lora_rank: 8"]
    assert verdicts(text, "mi300x-8") == [("unknown", "")]


UNKNOWN = [
    "frobnicate --all",
    "cd somewhere",
    "make -j8",
    "tar xf a.tar",
    "export MY_NAME=1",
    "pip install some-package",
]


@pytest.mark.parametrize("line", UNKNOWN)
def test_what_no_rule_knows_is_said_to_be_unknown(line):
    for name in MACHINES:
        (found,) = judge(line, machine(name))
        assert (found.verdict, found.rule, found.why, found.instead) == ("unknown", "", "", ())


@given(st.text(max_size=200))
def test_no_text_breaks_the_reader(text):
    for piece in read_tutorial(text):
        assert piece.kind in ("command", "setting", "yaml", "python") and piece.line >= 1


@given(
    st.lists(st.sampled_from([*TUTORIALS, *UNKNOWN, "```", "```bash", "$ ls", "EOF", "\\", "'", "cat <<X"]), max_size=8)
)
def test_mixed_lines_are_judged_on_some_machine(lines):
    for found in judge("\n".join(lines), machine("mi210-docker")):
        assert found.verdict in LETTERS.values() and bool(found.why) == bool(found.rule)


def test_a_verdict_does_not_depend_on_what_stands_around():
    """Joined in one script, the tutorials' lines get the verdicts that they get alone."""
    alone = list(chain.from_iterable(verdicts(line, "mi300x-8") for line in TUTORIALS))
    assert verdicts("\n".join(TUTORIALS), "mi300x-8") == alone


def test_every_text_is_there_in_both_languages_and_filled():
    everything = "\n".join([*TUTORIALS, *(row[0] for row in MORE)])
    used = set()
    for name in (n for n in base_names() if not n.startswith("_")):
        for language in ("en", "zh"):
            for v in judge(everything, machine(name), language):
                whole = "\n".join((v.why, *v.instead))
                assert "||" not in whole and not re.search(r"\{\w+\}", whole), (name, v.rule, whole)
                used.add(v.rule)
    words = {key: row for key, row in load_words().items() if key != "names"}
    assert used - {""} <= set(words)
    assert all(" || " in row["why"] or key == "doctors-variable" for key, row in words.items())


def test_every_text_belongs_to_a_rule():
    folder = Path(surefoot.setup.__file__).parent
    source = "".join(path.read_text(encoding="utf-8") for path in folder.glob("advice*.py"))
    assert [key for key in load_words() if f'"{key}"' not in source] == []


def test_the_page_and_the_json(capsys):
    found = judge("rocm-smi\nfrobnicate\n", machine("mi300x-8"), "zh")
    render(found, Console(width=100), "zh")
    page = capsys.readouterr().out
    assert "过时" in page and "amd-smi" in page and "2: frobnicate" in page
    document = to_json(found)
    assert document["schema"] == "surefoot.advice/1"
    assert [row["verdict"] for row in document["verdicts"]] == ["outdated", "unknown"]

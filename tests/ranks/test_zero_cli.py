"""`deepspeed: FILE` on the command line: what is refused before anything is loaded, and a run from start to end."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
from lab import build_model, environment, good_rows, invoke, make_job, start
from safetensors.torch import load_file
from test_zero import llama_factorys

from surefoot.config import make_config
from surefoot.errors import UserError
from surefoot.train import zero
from surefoot.train.ranks import Place, Ranks

SECONDS = 240.0
installed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def prepared(settings, **changes):
    told = []
    cfg = make_config(settings | changes)
    return zero.prepare(cfg, Ranks(Place(0, 2, 0)), "cpu", told.append), told


def test_without_the_package_the_command_that_installs_it_is_named(settings, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        prepared(settings, deepspeed=llama_factorys(2))
    (problem,) = caught.value.problems
    assert problem.message == "the YAML asks for DeepSpeed, which is not installed"
    assert '-m pip install --no-deps "deepspeed>=' in problem.hint


def test_an_old_package_is_named(settings, monkeypatch):
    old = type("deepspeed", (), {"__version__": "0.15.0", "DeepSpeedEngine": object})
    monkeypatch.setitem(sys.modules, "deepspeed", old)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: old)
    with pytest.raises(UserError, match=r"DeepSpeed 0\.15\.0 cannot hold"):
        prepared(settings, deepspeed=llama_factorys(2))


@installed
def test_a_setting_that_deepspeed_does_not_know_is_named(settings):
    wrong = llama_factorys(2)
    wrong["zero_optimization"]["reduce_buket_size"] = 5
    with pytest.raises(UserError, match="reduce_buket_size") as caught:
        prepared(settings, deepspeed=wrong)
    assert caught.value.problems[0].key == "deepspeed"


@installed
def test_it_is_told_what_is_cut(settings):
    cfg, told = prepared(settings, deepspeed=llama_factorys(3))
    assert "ZeRO stage 3" in told[0] and "into 2 parts" in told[0]
    assert cfg.compile is False, "a compiled layer does not fetch its weights"


@pytest.mark.parametrize(("stage", "ranks"), [(0, Ranks(Place(0, 2, 0))), (2, Ranks())])
def test_where_nothing_is_cut_the_run_goes_on_without_it(settings, stage, ranks):
    told = []
    cfg = zero.prepare(make_config(settings | {"deepspeed": llama_factorys(stage)}), ranks, "cpu", told.append)
    assert cfg.deepspeed is None
    assert told[0].startswith("DeepSpeed: ") and told[0].endswith("the run goes on without it.")


def test_nothing_imports_it_unless_asked():
    """Saving through transformers does, where it is installed; nothing of Surefoot's own does."""
    code = (
        "import sys, surefoot.run.job, surefoot.train.run, surefoot.train.zero, surefoot.config, surefoot.cli.main; "
        "print('deepspeed' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero")
    build_model(folder / "model")
    made = make_job(
        folder / "job", folder / "model", gradient_accumulation_steps=1, num_train_epochs=2.0, save_steps=4,
        overwrite_output_dir=True, ddp_timeout=60, deepspeed=str(folder / "ds.json"),
    )  # fmt: skip
    made.rows(good_rows(22))
    return made


def test_a_contradiction_ends_with_2_and_one_message(job):
    (job.out.parent.parent / "ds.json").write_text(json.dumps(llama_factorys(2) | {"gradient_clipping": 0.25}))
    done = invoke("train", job.yaml)
    assert done.exit_code == 2
    assert "deepspeed: `gradient_clipping` is 0.25, but the YAML has `max_grad_norm: 1.0`" in done.output
    assert "Traceback" not in done.output


@installed
@pytest.mark.long
def test_a_job_runs_from_start_to_end(job):
    (job.out.parent.parent / "ds.json").write_text(json.dumps(llama_factorys(2)))
    env = environment(FORCE_TORCHRUN="1", NPROC_PER_NODE="2", GLOO_SOCKET_IFNAME="lo")
    process = start("train", job.yaml, env=env)
    out, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    assert said.count("ZeRO stage 2, the optimizer's state is cut into 2 parts.") == 1
    assert "built successfully" not in out and "[INFO]" not in out
    assert load_file(job.out / "adapter_model.safetensors")

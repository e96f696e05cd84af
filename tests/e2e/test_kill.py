"""Runs that are killed, stopped and taken up again by the same command, in real processes."""

from __future__ import annotations

import random
import signal
import time

import pytest
from lab import build_model, environment, good_rows, invoke, log_entries, make_job, run, start

from surefoot.train.checkpoint import find_checkpoints, read_checkpoint

STEPS = 24
SETTINGS = {
    "num_train_epochs": 4.0, "lora_dropout": 0.1, "save_steps": 3, "val_size": 4, "eval_strategy": "steps",
    "eval_steps": 5, "save_total_limit": 2, "full_determinism": True,
}  # fmt: skip
LATER = 50.0  # seconds: nothing here takes that long

# Put on a child's path as `sitecustomize`: flushing a file takes a while, so that a save can be met.
SLOW_DISK = "import os, time\nflush = os.fsync\nos.fsync = lambda handle: (time.sleep(0.03), flush(handle))\n"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kill")
    (folder / "slow").mkdir()
    (folder / "slow" / "sitecustomize.py").write_text(SLOW_DISK)
    build_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def env(lab):
    return environment(PYTHONPATH=str(lab / "slow"), SUREFOOT_CACHE=str(lab / "cache"))


def job_in(lab, name):
    job = make_job(lab / name, lab / "model", **SETTINGS)
    job.rows(good_rows(28))
    return job


@pytest.fixture(scope="module")
def undisturbed(lab, env):
    job = job_in(lab, "undisturbed")
    done = run("train", job.yaml, env=env)
    assert done.returncode == 0, done.stderr
    assert log_entries(job.out)[-1]["current_steps"] == STEPS
    return job.out


def wait_for(process, what):
    """Wait until a condition holds while a process runs."""
    end = time.monotonic() + LATER
    while not what():
        assert process.poll() is None, f"it ended before that: {process.communicate()}"
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.001)


def at_step(out, step):
    def reached():
        log = out / "trainer_log.jsonl"
        return log.exists() and f'"current_steps": {step},' in log.read_text()

    return reached


def in_a_save(out, pattern):
    return lambda: any(out.glob(pattern))


def assert_same_run(out, expected):
    """The same weights, bit for bit, and a log that says the same, each step once."""
    name = "adapter_model.safetensors"
    assert (out / name).read_bytes() == (expected / name).read_bytes()
    known = ("current_steps", "total_steps", "loss", "grad_norm", "lr", "epoch", "eval_loss", "total_tokens")
    one, two = ([{k: e.get(k) for k in known} for e in log_entries(folder)] for folder in (out, expected))
    assert one == two
    steps = [entry["current_steps"] for entry in one if entry["loss"] is not None]
    assert steps == list(range(1, STEPS + 1))
    assert {p.name for p in out.iterdir()} == {p.name for p in expected.iterdir()}, "nothing half written stays"


@pytest.mark.slow
def test_killed_at_five_moments_a_run_ends_as_the_undisturbed_one(lab, env, undisturbed):
    job = job_in(lab, "killed")
    out, dice = job.out, random.Random(7)
    moments = [
        at_step(out, dice.randint(1, 2)),  # before the first checkpoint: from the beginning
        at_step(out, dice.randint(4, 8)),
        in_a_save(out, ".checkpoint-*.tmp"),
        at_step(out, dice.randint(14, 20)),
        in_a_save(out, ".writing.*.tmp"),  # the last save of all
    ]
    for number, moment in enumerate(moments):
        process = start("train", job.yaml, env=env)
        try:
            wait_for(process, moment)
            time.sleep(dice.uniform(0, 0.05))
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == -signal.SIGKILL, f"moment {number} was missed"
        if number == 2:
            (half,) = out.glob(".checkpoint-*.tmp")
            assert not (out / half.name.split(".")[1]).exists()
        for folder in find_checkpoints(out):
            read_checkpoint(folder)  # what has the name of a checkpoint is whole
    assert any(out.glob(".writing.*.tmp")) and not (out / "adapter_model.safetensors").exists()
    done = run("train", job.yaml, env=env)
    assert done.returncode == 0, done.stderr
    assert_same_run(out, undisturbed)


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_goes_on(lab, env, undisturbed):
    job = job_in(lab, "stopped")
    process = start("train", job.yaml, env=env)
    wait_for(process, at_step(job.out, 4))
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=LATER)
    assert process.returncode == 0, stderr
    (stopped_at,) = {line.split()[3] for line in stdout.splitlines() if line.startswith("Stopped at step ")}
    assert "the same command goes on from there" in stdout and "Traceback" not in stderr
    step = int(stopped_at.rstrip(":"))
    assert 4 <= step < STEPS and read_checkpoint(find_checkpoints(job.out)[-1]).step == step
    assert log_entries(job.out)[-1]["current_steps"] == step
    done = run("train", job.yaml, env=env)
    assert done.returncode == 0, done.stderr
    # A save at the stop is one that the undisturbed run has not; rotation has forgotten it by the end.
    assert_same_run(job.out, undisturbed)


def snapshot(folder):
    return {
        path.relative_to(folder): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))
    }


def test_a_finished_run_is_not_gone_on_with_other_data(undisturbed, lab):
    job = job_in(lab, "other")
    job.set(output_dir=str(undisturbed))
    changed = good_rows(28)
    changed[3]["output"] += "and more"
    job.rows(changed)
    before = snapshot(undisturbed)
    done = invoke("train", job.yaml)
    assert done.exit_code == 2 and "Traceback" not in done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "differs in data" in error and "resume_anyway" in done.stderr
    assert snapshot(undisturbed) == before


def test_a_finished_run_that_is_started_again_stays_as_it_is(undisturbed, lab):
    before = snapshot(undisturbed)
    done = invoke("train", lab / "undisturbed" / "job.yaml")
    assert done.exit_code == 0, done.stderr
    after = snapshot(undisturbed)
    assert [name for name in before if after.get(name) != before[name] and name.suffix == ".safetensors"] == []
    assert after.keys() == before.keys()
    assert_same_run(undisturbed, undisturbed)

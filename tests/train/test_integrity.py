"""Between two updates nobody else may change weights, moments or the learning rate: found at once, nothing is kept."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from surefoot.guard.check import NonFiniteStepError, check_gradients
from surefoot.train import loop, rewind
from surefoot.train.integrity import Integrity, StateTensors
from surefoot.train.step import StepRunner

AT = 7  # the plants act between the updates of this step and the next
Q_PROJ = "model.layers.1.self_attn.q_proj"


@pytest.fixture
def quick(settings, tmp_path):
    """Twelve steps of LoRA with dropout; the output folder is new for each run."""
    count = iter(range(100))
    return lambda **changes: settings | {
        "max_steps": 12, "lora_dropout": 0.1, "guard_preflight": False, "warmup_steps": 3,
        "lr_scheduler_type": "cosine", "output_dir": str(tmp_path / f"out-{next(count)}"),
    } | changes  # fmt: skip


@pytest.fixture
def plant(monkeypatch):
    """Let a function of the run act once, right before (or after) a step's update."""

    def at(step, act, *, after=False):
        apply, done = loop.apply_step, []

        def planted(run, attempt):
            if after:
                apply(run, attempt)
            if attempt.check.step == step and not done:
                done.append(step)
                with torch.no_grad():
                    act(run)
            if not after:
                apply(run, attempt)

        monkeypatch.setattr(loop, "apply_step", planted)

    return at


def events(settings, kind=None):
    path = Path(settings["output_dir"]) / "surefoot" / "guard.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [event for event in found if kind in (None, event["event"])]


def trained(loaded):
    return [p.detach().clone() for p in loaded.model.parameters() if p.requires_grad]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(trained(one), trained(other), strict=True))


def zero(*keys):
    def act(run):
        for state in run.optimizer.state.values():
            for key in keys:
                state[key].zero_()

    return act


def clear_state(run):
    run.optimizer.state.clear()


def flip(run):
    name = next(name for name in run.runner.trained if Q_PROJ in name and "lora_A" in name)
    run.runner.trained[name].view(-1).view(torch.int32)[5] ^= 1 << 30


@pytest.mark.parametrize("act", [zero("exp_avg"), zero("exp_avg_sq"), zero("exp_avg", "exp_avg_sq"), clear_state])
@pytest.mark.parametrize("every, ahead", [(50, False), (AT, False), (AT, True)])
def test_lost_moments_are_named_and_nothing_is_lost(quick, start, plant, monkeypatch, act, every, ahead):
    """Also when a restore point was taken right after the damage, and while the host looks ahead as on a GPU."""
    monkeypatch.setattr(rewind, "EVERY", every)
    if ahead:
        monkeypatch.setattr(loop.Run, "__post_init__", lambda run: setattr(run, "looks_ahead", True), raising=False)
    _, clean = start(quick())
    plant(AT, act, after=True)
    settings = quick()
    _, loaded = start(settings)
    (found,) = events(settings, "diagnosis")
    assert (found["class"], found["step"], found["place"]) == ("SPIKE", AT + 1, "optimizer"), found
    assert "moments were lost" in found["evidence"]
    assert same(loaded, clean)


@pytest.mark.parametrize("every", [50, AT])
@pytest.mark.parametrize("optim", ["adamw_torch", "rmsprop"])
def test_a_flipped_bit_in_a_trained_weight_is_named(quick, start, plant, monkeypatch, every, optim):
    monkeypatch.setattr(rewind, "EVERY", every)
    changes = {"optim": optim, "learning_rate": 1e-3}
    _, clean = start(quick(**changes))
    plant(AT, flip, after=True)
    settings = quick(**changes)
    _, loaded = start(settings)
    (found,) = events(settings, "diagnosis")
    assert (found["class"], found["step"], found["module"]) == ("TRANSIENT", AT + 1, Q_PROJ), found
    assert f"{Q_PROJ}.lora_A.weight" in found["evidence"]
    assert same(loaded, clean)


def test_one_moment_that_grew_is_damage_and_no_loss(quick, start, plant):
    _, clean = start(quick())
    plant(AT, lambda run: next(iter(run.optimizer.state.values()))["exp_avg_sq"].view(-1)[0].fill_(3.0), after=True)
    settings = quick()
    _, loaded = start(settings)
    (found,) = events(settings, "diagnosis")
    assert (found["class"], found["place"]) == ("TRANSIENT", "optimizer")
    assert found["evidence"].startswith("exp_avg_sq of ")
    assert same(loaded, clean)


def test_damage_right_before_the_weights_are_saved(quick, start, plant):
    _, clean = start(quick())
    plant(12, flip, after=True)
    settings = quick()
    _, loaded = start(settings)
    (found,) = events(settings, "diagnosis")
    assert (found["class"], found["step"], found["module"]) == ("TRANSIENT", 12, Q_PROJ)
    assert same(loaded, clean)


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_moments_that_the_update_itself_loses(quick, start, key):
    """Zeroed inside the optimizer's step, after the last look before it."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    _, clean = start(quick())
    calls = []

    def hook(optimizer, args, kwargs):
        calls.append(1)
        if len(calls) == AT:
            for state in optimizer.state.values():
                state[key].zero_()

    handle = register_optimizer_step_pre_hook(hook)
    settings = quick()
    try:
        _, loaded = start(settings)
    finally:
        handle.remove()
    (found,) = events(settings, "diagnosis")
    assert (found["class"], found["step"]) == ("SPIKE", AT) and "moments were lost" in found["evidence"]
    assert same(loaded, clean)


def raise_groups(run):
    for group in run.optimizer.param_groups:
        group["lr"] *= 100


def raise_last(run):
    run.scheduler._last_lr = [100 * rate for rate in run.scheduler._last_lr]
    raise_groups(run)


def step_schedule(run):
    run.scheduler.step()


@pytest.mark.parametrize("act", [raise_groups, raise_last, step_schedule])
def test_a_changed_learning_rate_is_put_back_before_the_update(quick, start, plant, act):
    _, clean = start(quick())
    plant(AT, act)
    settings = quick()
    recorder, loaded = start(settings)
    (found,), (acted,) = events(settings, "diagnosis"), events(settings, "action")
    assert (found["class"], found["step"]) == ("SPIKE", AT)
    assert "learning rate was changed from outside" in found["evidence"]
    assert acted["steps_redone"] == 0 and acted["verified"] is True and not recorder.rewound_to
    assert same(loaded, clean)


def test_a_learning_rate_that_a_hook_changes_inside_the_optimizers_step(quick, start):
    """A hundred times for the rest of the run: put back every time, told three times."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    _, clean = start(quick())

    def hook(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            group["lr"] *= 100

    handle = register_optimizer_step_pre_hook(hook)
    settings = quick()
    try:
        _, loaded = start(settings)
    finally:
        handle.remove()
    assert len(events(settings, "diagnosis")) == 3
    assert "without another word" in events(settings, "action")[-1]["action"]
    assert same(loaded, clean)


@pytest.mark.parametrize("act, after", [(zero("exp_avg_sq"), True), (flip, True), (raise_groups, False)])
def test_watch_stops_before_the_update(quick, start, plant, act, after):
    plant(AT, act, after=after)
    settings = quick(guard="watch")
    with pytest.raises(NonFiniteStepError, match=r"lost|changed"):
        start(settings)
    assert events(settings, "stopped") and not events(settings, "action")


def test_off_looks_at_nothing(quick, start, plant):
    plant(AT, raise_groups)
    settings = quick(guard="off")
    _, loaded = start(settings)
    _, clean = start(quick())
    assert not events(settings) and not same(loaded, clean)


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"optim": "sgd", "optim_args": "momentum=0.9"}, {"optim": "adagrad"}, {"optim": "adafactor"},
        {"finetuning_type": "full", "lora_dropout": None}, {"max_grad_norm": 0.0}, {"fp16": True},
        {"optim_args": "amsgrad=true"}, {"adam_beta1": 0.0}, {"lr_scheduler_type": "constant"},
        {"save_strategy": "steps", "save_steps": 3}, {"use_dora": True}, {"additional_target": "lm_head"},
    ],
)  # fmt: skip
def test_a_healthy_run_is_left_alone_bit_for_bit(quick, start, changes):
    settings = quick(**changes)
    if changes.get("lora_dropout", 0) is None:
        settings.pop("lora_dropout")
        _, off = start({k: v for k, v in quick(guard="off", **changes).items() if k != "lora_dropout"})
    else:
        _, off = start(quick(guard="off", **changes))
    _, loaded = start(settings)
    assert not events(settings)
    assert same(loaded, off)


def test_a_resumed_run_is_left_alone(quick, start):
    """Also when it is to be longer than it was, so that its schedule is another."""
    settings = quick(save_strategy="steps", save_steps=4)
    start(settings | {"max_steps": 8})
    recorder, _ = start(settings | {"max_steps": 12, "resume_anyway": True})
    assert [event.step for event in recorder.steps] == [9, 10, 11, 12]
    assert not events(settings)


def updates(gradient_of, steps=30, **adam):
    """Updates of AdamW under the watch, without a run around it; the flags of each."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), **({"lr": 1e-3, "fused": True} | adam))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    runner = StepRunner(model, None, "cpu", SimpleNamespace(enabled=False), 1)  # type: ignore[arg-type]
    keeper = SimpleNamespace(mode="heal", memory=SimpleNamespace(steps_lost=0), learning_rate_factor=lambda run: 1.0)
    run = SimpleNamespace(
        runner=runner, optimizer=optimizer, scheduler=scheduler, guard=keeper, state=SimpleNamespace(step=0)
    )
    integrity, flags = Integrity(run, keeper), []  # type: ignore[arg-type]
    for step in range(steps):
        for p in model.parameters():
            p.grad = gradient_of(step, p)
        check = check_gradients(step + 1, runner.trained, [torch.tensor(1.0)], [("rows:0",)], 1.0)
        runner.finish_gradients(check, 1.0)
        integrity.before_update(check)
        optimizer.step()
        integrity.after_update(check)
        read = check.read()
        flags.append((read.state_changed, read.moments_lost))
        scheduler.step()
        run.state.step += 1
    return flags


SIZES = {
    "usual": lambda step: 1.0,
    "vanishing": lambda step: 10.0 ** (-step),
    "exploding": lambda step: 10.0**step,
    "one spike, then nothing": lambda step: 1e6 if step == 3 else 0.0,
    "alternating": lambda step: (-1.0) ** step,
    "zero": lambda step: 0.0,
    "tiny": lambda step: 1e-9 * (1 + step % 3),
    "turning round": lambda step: 1.0 if step < 15 else -1.0,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("adam", [{}, {"betas": (0.5, 0.5)}, {"betas": (0.99, 0.9999)}, {"betas": (0.0, 0.9)}])
def test_whatever_the_gradients_are_an_update_is_never_called_a_loss(size, adam):
    torch.manual_seed(1)
    fixed = torch.randn(16, 16)
    gradient = lambda step, p: (fixed if p.ndim == 2 else fixed[0]).clone() * SIZES[size](step)  # noqa: E731
    assert updates(gradient, **adam) == [(False, False)] * 30


def test_norms_are_the_same_bits_each_time():
    parameters = {f"p{i}": torch.nn.Parameter(torch.randn(1000 * i + 7)) for i in range(20)}
    optimizer = torch.optim.AdamW(parameters.values())
    for p in parameters.values():
        p.grad = torch.randn_like(p)
    optimizer.step()
    tensors = StateTensors(parameters, optimizer)
    first = tensors.take_norms()
    assert not any(bool(tensors.take_norms().differ_from(first)) for _ in range(50))
    assert len(first.kind("exp_avg")) == len(first.kind("exp_avg_sq")) == 20 and len(first.norms_S) == 60
    assert torch.equal(first.kind("exp_avg")[3], optimizer.state[parameters["p3"]]["exp_avg"].norm())
    assert tensors.still_there(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not tensors.still_there(optimizer)

"""The smoke test of training: it passes here in every dtype, and fails when something is planted."""

from __future__ import annotations

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from surefoot.use import smoke as room


@pytest.fixture(scope="module")
def results():
    return {result.dtype: result for result in room.smoke("cpu")}


def test_every_dtype_of_a_cpu_trains(results):
    assert list(results) == ["float32", "bfloat16", "float16"]
    for result in results.values():
        assert result.ok, result
        assert len(result.losses) == room.STEPS
        assert result.losses[-1] < room.FALLS_TO * result.losses[0]


def test_the_first_losses_agree_across_dtypes_but_are_not_the_same_numbers(results):
    first = {dtype: result.losses[0] for dtype, result in results.items()}
    assert first["bfloat16"] == pytest.approx(first["float32"], rel=1e-2)
    assert len(set(first.values())) == 3, "each dtype must compute in its own way"


def only_float32(monkeypatch) -> room.SmokeResult:
    monkeypatch.setattr(room, "dtypes_of", lambda device: ("float32",))
    (result,) = room.smoke("cpu")
    return result


def scaled_updates(monkeypatch, factor: float) -> None:
    """Make AdamW move weights by `factor` of what it should; its moments stay right."""
    right = torch.optim.AdamW.step

    def step(self, closure=None):
        kept = [(p, p.detach().clone()) for group in self.param_groups for p in group["params"]]
        right(self, closure)
        with torch.no_grad():
            for parameter, start in kept:
                parameter.copy_(start + factor * (parameter - start))

    monkeypatch.setattr(torch.optim.AdamW, "step", step)


def test_an_optimizer_that_steps_one_percent_too_far_is_found(monkeypatch):
    scaled_updates(monkeypatch, 1.01)
    result = only_float32(monkeypatch)
    assert not result.ok
    assert "optimizer's update of" in result.detail


def test_an_optimizer_that_does_nothing_is_found(monkeypatch):
    scaled_updates(monkeypatch, 0.0)
    result = only_float32(monkeypatch)
    assert "optimizer" in result.detail
    assert "does not fall" in result.detail


def test_an_attention_kernel_that_is_slightly_wrong_is_found(monkeypatch):
    right = torch.nn.functional.scaled_dot_product_attention

    def wrong(*args, **kwargs):
        return 1.2 * right(*args, **kwargs)

    expected = room._save_model

    def save_then_break(*args):
        value = expected(*args)
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", wrong)
        return value

    monkeypatch.setattr(room, "_save_model", save_then_break)
    result = only_float32(monkeypatch)
    assert "in float64" in result.detail


def test_a_loss_that_is_not_a_number_is_found(monkeypatch):
    from surefoot.model.forward import LossForward

    right = LossForward.__call__

    def poisoned(self, batch):
        sums = right(self, batch)
        sums.loss.data.fill_(float("nan"))
        return sums

    monkeypatch.setattr(LossForward, "__call__", poisoned)
    result = only_float32(monkeypatch)
    assert not result.ok
    assert "finite" in result.detail


@pytest.mark.parametrize(
    ("arch", "expected"), [("gfx1030", ("float32", "float16")), ("gfx942:sramecc+", room.TOLERANCE)]
)
def test_dtypes_of_an_amd_card_come_from_the_table(monkeypatch, arch, expected):
    monkeypatch.setattr(torch.version, "hip", "7.2.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("P", (), {"gcnArchName": arch}))
    assert room.dtypes_of("cuda:0") == tuple(expected)


def run_command(monkeypatch, *args):
    from surefoot.cli.setup_run import smoke

    app = typer.Typer()
    app.command()(smoke)
    return CliRunner().invoke(app, list(args))


def fake(ok):
    return lambda device: iter([room.SmokeResult("float32", ok, "seen", (1.0, 0.5), 0.1)])


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_the_command_prints_a_line_or_one_document_and_says_it_by_its_exit_code(monkeypatch, ok, code):
    monkeypatch.setattr(room, "smoke", fake(ok))
    plain = run_command(monkeypatch, "--device", "cpu")
    assert plain.exit_code == code
    assert ("ok  " if ok else "FAIL") in plain.stdout
    document = run_command(monkeypatch, "--device", "cpu", "--json")
    assert document.exit_code == code
    assert json.loads(document.stdout)["ok"] is ok

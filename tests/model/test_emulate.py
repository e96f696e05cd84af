"""MI200's flushing of subnormals: element by element, forward and backward, and nowhere else."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from helpers import random_table, save_tiny_model
from surefoot.config import make_config
from surefoot.data.batch import count_trained, pack
from surefoot.errors import WorkError
from surefoot.model.emulate import HALF, Gfx90a, emulation, is_subnormal
from surefoot.model.load import load_model
from surefoot.model.probes import build_forward
from surefoot.model.tokenizer import load_tokenizer

HALVES = pytest.mark.parametrize("dtype", HALF, ids=str)


def planted(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Values around the smallest normal number, few enough that every sum of products is exact."""
    tiny = torch.finfo(dtype).smallest_normal
    choice = torch.tensor([0.0, -0.0, 1.0, -2.0, 0.5, tiny, -tiny, tiny / 2, -tiny / 2, tiny / 4, 1.5 * tiny])
    picks = torch.randint(0, len(choice), shape, generator=torch.Generator().manual_seed(seed))
    return choice[picks].to(dtype)


def by_hand(x: float, dtype: torch.dtype) -> float:
    """Flush one number."""
    return 0.0 if abs(x) < torch.finfo(dtype).smallest_normal else x


def product_by_hand(a: torch.Tensor, b: torch.Tensor, addend: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply two matrices one element at a time, as MI200 does."""
    dtype, result = a.dtype, torch.empty(a.shape[0], b.shape[1], dtype=a.dtype)
    for i, j in itertools.product(range(a.shape[0]), range(b.shape[1])):
        total = sum(by_hand(float(a[i, k]), dtype) * by_hand(float(b[k, j]), dtype) for k in range(a.shape[1]))
        total += 0.0 if addend is None else float(addend[i, j])
        result[i, j] = by_hand(float(torch.tensor(total, dtype=torch.float64).to(dtype)), dtype)
    return result


def forms(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Every way to write the product, with what it must give."""
    plain, added = product_by_hand(a, b), product_by_hand(a, b, c)
    out = torch.empty_like(plain)
    return {
        "mm": (torch.mm(a, b), plain),
        "mm out": (torch.mm(a, b, out=out), plain),
        "out itself": (out, plain),
        "matmul": (a @ b, plain),
        "matmul 3d": ((a[None].repeat(2, 1, 1) @ b)[1], plain),
        "bmm": (torch.bmm(a[None], b[None])[0], plain),
        "einsum": (torch.einsum("ij,jk->ik", a, b), plain),
        "tensordot": (torch.tensordot(a, b, dims=([1], [0])), plain),
        "linear": (F.linear(a, b.T), plain),
        "mv": (torch.mv(a, b[:, 0]), plain[:, 0]),
        "dot": (torch.dot(a[0], b[:, 0]), plain[0, 0]),
        "addmm": (torch.addmm(c, a, b), added),
        "addmm_": (c.clone().addmm_(a, b), added),
        "baddbmm": (torch.baddbmm(c[None], a[None], b[None])[0], added),
        "linear with bias": (F.linear(a, b.T, c[0]), product_by_hand(a, b, c[:1].expand_as(c))),
        "addmv": (torch.addmv(c[:, 0], a, b[:, 0]), added[:, 0]),
    }


@HALVES
@pytest.mark.parametrize("inference", [False, True])
def test_every_product_flushes_as_computed_by_hand(dtype, inference):
    a, b, c = (planted(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(6, 5), (5, 4), (6, 4)]))
    with torch.inference_mode(inference), emulation("gfx90a") as mode:
        found = forms(a, b, c)
    for name, (got, expected) in found.items():
        assert torch.equal(got, expected), name
    assert mode.counter.read("forward").inputs > 0
    assert mode.counter.read("forward").outputs > 0
    unchanged = {name for name, (got, expected) in forms(a, b, c).items() if torch.equal(got, expected)}
    assert unchanged <= {"dot"}, "without the emulation every form keeps its subnormals; a single number may have none"


@HALVES
def test_the_sign_of_a_flushed_value_stays(dtype):
    tiny = torch.finfo(dtype).smallest_normal
    a, one = torch.tensor([[-tiny], [tiny]], dtype=dtype), torch.tensor([[0.5]], dtype=dtype)
    with emulation("gfx90a"):
        result = a @ one
    assert result.tolist() == [[0.0], [0.0]]
    assert result.signbit().tolist() == [[True], [False]]


@HALVES
def test_the_backward_products_flush_as_computed_by_hand(dtype):
    x, w = planted(6, 5, dtype=dtype).requires_grad_(), planted(5, 4, dtype=dtype, seed=1).requires_grad_()
    slope = planted(6, 4, dtype=dtype, seed=2)
    with emulation("gfx90a") as mode:
        (x @ w).backward(slope)
    assert torch.equal(x.grad, product_by_hand(slope, w.detach().T))
    assert torch.equal(w.grad, product_by_hand(x.detach().T, slope))
    counted = mode.counter.read("backward")
    factors = int(sum(n * is_subnormal(t).sum() for n, t in ((2, slope), (1, x.detach()), (1, w.detach()))))
    assert counted.inputs == factors
    assert 0 < counted.share < 1
    flushed, x.grad, w.grad = x.grad, None, None
    (x @ w).backward(slope)
    assert not torch.equal(x.grad, flushed)


def test_infinities_and_nans_pass():
    a = torch.tensor([[float("inf"), 1.0], [float("nan"), 1.0], [60000.0, 60000.0]], dtype=torch.float16)
    with emulation("gfx90a"):
        result = a @ torch.ones(2, 1, dtype=torch.float16)
    assert result[0, 0] == float("inf")
    assert result[1, 0].isnan()
    assert result[2, 0] == float("inf")


def test_float32_is_bitwise_unchanged():
    torch.manual_seed(0)
    x, w = torch.randn(7, 5) * 1e-38, torch.randn(5, 3, requires_grad=True)
    y = x @ w
    y.sum().backward()
    plain, w.grad = w.grad, None
    with emulation("gfx90a") as mode:
        z = x @ w
        z.sum().backward()
    assert torch.equal(y, z)
    assert torch.equal(plain, w.grad)
    assert is_subnormal(y.detach()).any()
    assert mode.counter.read("forward").values == mode.counter.read("backward").values == 0


def test_fused_attention_is_written_out_or_refused():
    torch.manual_seed(0)
    q = torch.randn(2, 4, 6, 8, dtype=torch.float16, requires_grad=True)
    k, v = (torch.randn(2, 2, 6, 8, dtype=torch.float16) for _ in range(2))
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    with emulation("gfx90a") as mode:
        causal = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        masked = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        causal.sum().backward()
    assert Gfx90a.needs_eager_attention
    torch.testing.assert_close(causal, plain, atol=4e-3, rtol=0)
    assert torch.equal(causal, masked)
    assert mode.counter.read("forward").values > 0
    assert mode.counter.read("backward").values > 0
    with emulation("gfx90a"), torch.autocast("cpu", torch.float16):
        cast = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True, enable_gqa=True)
    assert torch.equal(cast, causal)
    with Gfx90a(), pytest.raises(WorkError, match="cannot look into"):
        F.scaled_dot_product_attention(q, q, q)


class EachProduct(TorchDispatchMode):
    """Compares every 16-bit product under the emulation with the plain one."""

    def __init__(self):
        super().__init__()
        self.same = self.changed = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        factors = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "addmm_": (1, 2)}.get(func.overloadpacket.__name__)
        if factors is None or args[factors[0]].dtype not in HALF:
            return func(*args, **kwargs)
        with _disable_current_modes():
            copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
            fresh = {name: torch.empty_like(x) if name == "out" else x for name, x in kwargs.items()}
            plain = func(*copies, **fresh)
            tensors = [copies[i] for i in factors] + [plain]
            expects_change = any(bool(is_subnormal(x).any()) for x in tensors)
        result = func(*args, **kwargs)
        with _disable_current_modes():
            assert not is_subnormal(result).any()
            if not expects_change:
                assert torch.equal(result, plain), f"{func} changed without a subnormal"
                self.same += 1
            else:
                self.changed += not torch.equal(result, plain)
        return result


def lora_gradients(folder, machine, scale, **keys):
    """One step of a tiny LoRA model; returns its gradients, the emulation and what each product did."""
    settings = {"model_name_or_path": str(folder), "dataset": "rows", "template": "default", "output_dir": "out"}
    cfg = make_config({**settings, "seed": 3, **keys})
    loaded = load_model(cfg, load_tokenizer(cfg), "cpu")
    torch.manual_seed(1)
    for name, parameter in loaded.model.named_parameters():
        if "lora_B" in name:  # as after some training, so that A has a gradient
            parameter.data.normal_(std=0.02)
    forward = build_forward(loaded.model, loaded.precision.autocast, upcast=False, label_smoothing=0.0)
    samples = [random_table(4)[i] for i in range(4)]
    loaded.model.train()
    watch = EachProduct()
    with emulation(machine) as mode, watch if mode else contextlib.nullcontext():
        (forward(pack(samples)).loss / count_trained(samples) * scale).backward()
    return {n: p.grad / scale for n, p in loaded.model.named_parameters() if p.grad is not None}, mode, watch


@pytest.mark.parametrize("attention", ["auto", "disabled"])
def test_a_lora_step_changes_exactly_where_subnormals_occur(tmp_path, attention):
    folder = save_tiny_model(tmp_path / "tiny")
    keys = {"flash_attn": attention, "fp16": True}
    # At scale 1 most gradients of this model are float16 subnormals; at 2^16, as training starts, few are.
    plain, _, _ = lora_gradients(folder, "none", 2.0**16, **keys)
    scaled, mode, watch = lora_gradients(folder, "gfx90a", 2.0**16, **keys)
    bare, bare_mode, bare_watch = lora_gradients(folder, "gfx90a", 1.0, **keys)
    share, bare_share = mode.counter.read("backward").share, bare_mode.counter.read("backward").share
    assert 0 < share < 0.01 < 0.1 < bare_share, (share, bare_share)
    assert watch.same > 0 < watch.changed
    assert bare_watch.changed > watch.changed

    def cosine(a, b):
        flat = [torch.cat([x[name].flatten() for name in plain]) for x in (a, b)]
        return float(F.cosine_similarity(*flat, dim=0))

    assert cosine(plain, scaled) > 0.999, "a loss scale saves the gradient"
    assert cosine(plain, bare) < 0.99, "without one it is damaged"


def test_a_bfloat16_lora_step_is_bitwise_unchanged(tmp_path):
    folder = save_tiny_model(tmp_path / "tiny")
    keys = {"flash_attn": "disabled", "bf16": True}
    plain, _, _ = lora_gradients(folder, "none", 1.0, **keys)
    emulated, mode, watch = lora_gradients(folder, "gfx90a", 1.0, **keys)
    counted = mode.counter.read("backward")
    assert (counted.inputs, counted.outputs, watch.changed) == (0, 0, 0)
    assert watch.same > 0 < counted.values
    assert all(torch.equal(plain[name], emulated[name]) for name in plain)

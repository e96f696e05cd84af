from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from surefoot.bench.profile import IDLE, KINDS, kind_of_kernel, kind_of_operator, of_kernels, profile_step, union_of

KERNELS = {
    "Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64_MI16x16x1": "GEMM",
    "Custom_Cijk_Alik_Bljk_F8BS_BH_MT128x128": "GEMM",
    "void rocblas_gemvn_kernel<64, 16, float>": "GEMM",
    "ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm>": "GEMM",
    "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNN": "GEMM",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n": "GEMM",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>": "GEMM",
    "void cublasLt::splitKreduce_kernel<32, 16>": "GEMM",
    "triton_tem_fused_mm_3": "GEMM",
    "attn_fwd": "attention",
    "attn_fwd.kd": "attention",
    "bwd_kernel_dk_dv": "attention",
    "bwd_kernel_dq": "attention",
    "bwd_preprocess": "attention",
    "void ck_tile::kentry<256, 1, ck_tile::FmhaFwdKernel<...>>": "attention",
    "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<>": "attention",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop": "attention",
    "void cudnn::fusion::compute_dot_do_o<true>": "attention",
    "triton_poi_fused__scaled_dot_product_flash_attention_mm_4": "elementwise",
    "triton_red_fused_mean_mul_pow_rsqrt_0": "elementwise",
    "_layer_norm_bwd_kernel_0": "elementwise",
    "cross_entropy_kernel": "elementwise",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>": "elementwise",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "elementwise",
    "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>": "copies",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<>": "copies",
    "__amd_rocclr_copyBuffer": "copies",
    "__amd_rocclr_fillBufferAligned": "copies",
    "Memcpy HtoD (Pinned -> Device)": "copies",
    "Memset (Device)": "copies",
    "ncclDevKernel_AllReduce": "other",
}


@pytest.mark.parametrize(("name", "kind"), KERNELS.items())
def test_kernels_of_both_vendors_are_sorted(name, kind):
    assert kind_of_kernel(name) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "GEMM"), ("aten::addmm_", "GEMM"), ("aten::_scaled_mm", "GEMM"),
        ("mkldnn::_linear_pointwise", "GEMM"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("surefoot::packed_attention", "attention"), ("aten::copy_", "copies"), ("aten::cat", "copies"),
        ("aten::mul", "elementwise"), ("aten::sum", "elementwise"), ("aten::matrix_exp", "elementwise"),
        ("Torch-Compiled Region: 0/0", "elementwise"),
        ("autograd::engine::evaluate_function: MmBackward0", "other"),
    ],
)  # fmt: skip
def test_operators_are_sorted(name, kind):
    assert kind_of_operator(name) == kind


def test_a_step_on_the_cpu_adds_up_and_its_product_is_found():
    x = torch.randn(300, 300)
    found = profile_step(lambda: (x @ x).mul_(2.0), "cpu")
    assert not found.on_gpu and list(found.kinds) == [*KINDS, IDLE]
    assert found.kinds["GEMM"] > 0 and found.kinds["elementwise"] > 0 and found.kinds["attention"] == 0
    assert sum(found.kinds.values()) == pytest.approx(found.wall_ms, rel=0.25)
    assert {name for name, *_ in found.top} >= {"aten::mm", "aten::mul_"}


def test_overlapping_kernels_are_busy_once():
    assert union_of([(0, 4), (2, 6), (10, 11), (3, 5)]) == 7
    assert union_of([]) == 0


def event(name, start, end, device=DeviceType.CUDA, marked=False):
    return SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=start, end=end), device_type=device, is_user_annotation=marked
    )


def test_a_gpu_is_idle_when_no_kernel_runs_and_marked_ranges_are_no_kernels():
    events = [
        event("aten::mm", 0, 900, DeviceType.CPU),
        event("Optimizer.step#AdamW.step", 0, 9000, marked=True),
        event("## Call CompiledFxGraph abc ##", 0, 9000),
        event("Cijk_Ailk_Bljk_BBS", 0, 4000),
        event("Cijk_Ailk_Bljk_BBS", 6000, 7000),
        event("attn_fwd", 3000, 5000),  # on another stream
    ]
    found = of_kernels(events, wall_ms=10.0)
    assert found.on_gpu and found.top == (("Cijk_Ailk_Bljk_BBS", "GEMM", 5.0, 2), ("attn_fwd", "attention", 2.0, 1))
    assert found.kinds == {"GEMM": 5.0, "attention": 2.0, "elementwise": 0, "copies": 0, "other": 0, IDLE: 4.0}

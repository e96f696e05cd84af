"""LLaMA-Factory's keys about the model, its tokenizer, quantisation, chat and export (78)."""

from __future__ import annotations

from typing import Literal

from surefoot.config import reasons as why
from surefoot.config.key import USE, Keys, accepted, not_yet, works
from surefoot.config.values import Dtype, Names, SettingsOrPath


class ModelKeys(Keys):
    """Which model to load, and how."""

    model_name_or_path: str | None = works(None, "Folder, hub id or `demo:` name of the model. Required.")
    adapter_name_or_path: Names | None = works(None, "Adapters to load on the model; the last one trains on.")
    adapter_folder: str | None = works(None, "Subfolder of the adapter's folder or hub repository.")
    cache_dir: str | None = works(None, "Where downloads from the hub are kept.")
    use_fast_tokenizer: bool = accepted(True, "Prefer the fast tokenizer.", why.FAST_TOKENIZER)
    resize_vocab: bool = works(False, "Grow the embeddings to the tokenizer's size, rounded up to a multiple of 64.")
    split_special_tokens: bool = works(False, "Split special marks in the data's text like ordinary text.")
    add_tokens: Names | None = works(None, "Ordinary tokens to add to the tokenizer.")
    add_special_tokens: Names | None = works(None, "Special tokens to add to the tokenizer.")
    new_special_tokens_config: str | None = not_yet(
        None, "YAML of new tokens with descriptions to initialise them from.", why.DESCRIBED_TOKENS
    )
    init_special_tokens: Literal["noise_init", "desc_init", "desc_init_w_noise"] = not_yet(
        "noise_init", "How new special tokens start.", why.DESCRIBED_TOKENS
    )
    model_revision: str = works("main", "Branch, tag or commit on the hub.")
    low_cpu_mem_usage: bool = accepted(True, "Load with little memory.", why.LOADING)
    rope_scaling: Literal["linear", "dynamic", "yarn", "llama3"] | None = works(
        None, "Stretch the position encoding when `cutoff_len` exceeds what the model knows."
    )
    flash_attn: Literal["auto", "disabled", "sdpa", "fa2", "fa3"] = works(
        "auto", "Attention implementation; `disabled` is the plain one.", refused={"fa2": why.FLASH, "fa3": why.FLASH}
    )
    shift_attn: bool = not_yet(False, "Shifted sparse attention of LongLoRA.", why.LONGLORA)
    mixture_of_depths: Literal["convert", "load"] | None = not_yet(None, "Mixture of depths.", why.DEPTHS)
    use_unsloth: bool = accepted(False, "Use Unsloth's kernels.", why.OWN_KERNELS)
    use_unsloth_gc: bool = accepted(False, "Use Unsloth's gradient checkpointing.", why.RECOMPUTE)
    enable_liger_kernel: bool = accepted(False, "Use Liger kernels.", why.OWN_KERNELS)
    moe_aux_loss_coef: float | None = not_yet(None, "Weight of the router's auxiliary loss.", why.MOE_LOSS)
    disable_gradient_checkpointing: bool = works(
        False, "Never recompute layers to save memory; otherwise they are recomputed when memory asks for it."
    )
    use_reentrant_gc: bool = accepted(True, "Reentrant gradient checkpointing.", why.RECOMPUTE)
    upcast_layernorm: bool = works(False, "Keep the weights of norms in fp32.")
    upcast_lmhead_output: bool = works(False, "Compute the logits in fp32.")
    train_from_scratch: bool = works(False, "Start from random weights of the model's shape.")
    infer_backend: Literal["huggingface", "vllm", "sglang"] = works(
        "huggingface", "What generates in chat.", refused={"vllm": why.ENGINES, "sglang": why.ENGINES}
    )
    offload_folder: str = accepted("offload", "Folder for weights that do not fit.", why.OFFLOAD)
    use_kv_cache: bool = works(True, "Keep keys and values between tokens in chat.")
    use_v1_kernels: bool | None = accepted(False, "Use the kernels of LLaMA-Factory's rewrite.", why.OWN_KERNELS)
    infer_dtype: Dtype = works("auto", "Precision of the weights in chat and export.")
    hf_hub_token: str | None = works(None, "Token for the Hugging Face hub.", secret=True)
    ms_hub_token: str | None = works(None, "Token for data sets on ModelScope.", secret=True)
    om_hub_token: str | None = accepted(None, "Token for Modelers.", why.OTHER_HUBS, secret=True)
    print_param_status: bool = accepted(
        False, "Print every parameter's name, type, device and whether it trains.", why.PARAMETERS_COUNTED
    )
    trust_remote_code: bool = works(False, "Run code that a model or data set brings along.")

    quantization_method: Literal["bnb", "gptq", "awq", "aqlm", "quanto", "eetq", "hqq", "mxfp4", "fp8"] = works(
        "bnb", "How to quantise while loading, with `quantization_bit`; `bnb` is bitsandbytes, and the only one so far."
    )
    quantization_bit: int | None = works(None, "Bits to quantise the frozen weights to: 4 or 8. Only with LoRA.")
    quantization_type: Literal["fp4", "nf4"] = works("nf4", "4 bit number format.")
    double_quantization: bool = works(True, "Quantise the quantisation's constants too (4 bit).")
    quantization_device_map: Literal["auto"] | None = not_yet(
        None, "Spread a quantised model over devices.", why.ONE_DEVICE
    )

    image_max_pixels: int = accepted(589824, "Largest image.", why.TEXT_ONLY)
    image_min_pixels: int = accepted(1024, "Smallest image.", why.TEXT_ONLY)
    image_do_pan_and_scan: bool = accepted(False, "Pan and scan images.", why.TEXT_ONLY)
    crop_to_patches: bool = accepted(False, "Crop images to patches.", why.TEXT_ONLY)
    video_max_pixels: int = accepted(65536, "Largest video frame.", why.TEXT_ONLY)
    video_min_pixels: int = accepted(256, "Smallest video frame.", why.TEXT_ONLY)
    video_fps: float = accepted(2.0, "Video frames per second.", why.TEXT_ONLY)
    video_maxlen: int = accepted(128, "Most frames of a video.", why.TEXT_ONLY)
    use_audio_in_video: bool = accepted(False, "Use the sound of videos.", why.TEXT_ONLY)
    audio_sampling_rate: int = accepted(16000, "Sound samples per second.", why.TEXT_ONLY)

    export_dir: str | None = works(None, "Where `surefoot export` writes the merged model.")
    export_size: int = works(5, "Largest size of a weights file, in GB.", ge=1)
    export_device: Literal["cpu", "auto"] = works("cpu", "Where to merge; `auto` takes the GPU.")
    export_quantization_bit: int | None = not_yet(
        None, "Bits to quantise the exported model to.", why.EXPORT_QUANTIZED, purposes=USE
    )
    export_quantization_dataset: str | None = accepted(None, "Calibration data.", why.WITH_EXPORT_BITS)
    export_quantization_nsamples: int = accepted(128, "Calibration samples.", why.WITH_EXPORT_BITS)
    export_quantization_maxlen: int = accepted(1024, "Length of calibration samples.", why.WITH_EXPORT_BITS)
    export_legacy_format: bool = not_yet(False, "Write .bin files.", why.SAFETENSORS_ONLY, purposes=USE)
    export_hub_model_id: str | None = works(None, "Hub repository that the export is uploaded to.")

    vllm_maxlen: int = accepted(4096, "Longest sequence in vLLM.", why.WITH_VLLM)
    vllm_gpu_util: float = accepted(0.7, "Share of GPU memory for vLLM.", why.WITH_VLLM)
    vllm_enforce_eager: bool = accepted(False, "No CUDA graphs in vLLM.", why.WITH_VLLM)
    vllm_max_lora_rank: int = accepted(32, "Largest LoRA rank in vLLM.", why.WITH_VLLM)
    vllm_config: SettingsOrPath | None = accepted(None, "More settings for vLLM.", why.WITH_VLLM)
    sglang_maxlen: int = accepted(4096, "Longest sequence in SGLang.", why.WITH_SGLANG)
    sglang_mem_fraction: float = accepted(0.7, "Share of GPU memory for SGLang.", why.WITH_SGLANG)
    sglang_tp_size: int = accepted(-1, "GPUs that share a model in SGLang.", why.WITH_SGLANG)
    sglang_config: SettingsOrPath | None = accepted(None, "More settings for SGLang.", why.WITH_SGLANG)
    sglang_lora_backend: Literal["triton", "flashinfer"] = accepted(
        "triton", "LoRA kernels in SGLang.", why.WITH_SGLANG
    )

    use_kt: bool = not_yet(False, "Train experts on the CPU with KTransformers.", why.BACKENDS)
    kt_cpu_activation: Literal["retain", "recompute"] | None = accepted(
        None, "Keep or recompute the CPU experts' activations.", why.WITH_KT
    )
    kt_weight_path: str | None = accepted(None, "Quantised expert weights.", why.WITH_KT)
    kt_non_expert_weight_path: str | None = accepted(None, "Weights besides the experts.", why.WITH_KT)
    kt_expert_checkpoint_path: str | None = accepted(None, "Expert weights to convert.", why.WITH_KT)
    kt_use_lora_experts: bool | None = accepted(None, "Add LoRA experts on the GPU.", why.WITH_KT)
    kt_lora_expert_num: int | None = accepted(None, "Number of LoRA experts.", why.WITH_KT)
    kt_lora_expert_intermediate_size: int | None = accepted(None, "Width of LoRA experts.", why.WITH_KT)

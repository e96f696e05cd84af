"""LLaMA-Factory's keys about what is trained, and towards what (99)."""

from __future__ import annotations

from typing import Literal

from surefoot.config import reasons as why
from surefoot.config.key import Keys, accepted, not_yet, works
from surefoot.config.values import Names


class FinetuningKeys(Keys):
    """Which weights train, by which objective."""

    stage: Literal["pt", "sft", "rm", "ppo", "dpo", "kto"] = works(
        "sft",
        "The objective: `sft` learns answers, `pt` learns plain text.",
        refused={
            "rm": why.PREFERENCES,
            "ppo": why.PREFERENCES,
            "dpo": why.PREFERENCES,
            "kto": why.PREFERENCES,
        },
    )
    finetuning_type: Literal["lora", "oft", "freeze", "full"] = works(
        "lora", "Which weights train: adapters, some layers, or all.", refused={"oft": why.OFT}
    )
    pure_bf16: bool = not_yet(False, "Keep trained weights in bf16.", why.PURE_BF16)

    freeze_trainable_layers: int = works(2, "Layers that train under `freeze`: the last n, or the first if negative.")
    freeze_trainable_modules: Names = works(["all"], "Modules that train inside those layers.")
    freeze_extra_modules: Names | None = works(None, "Modules outside the layers that train too.")

    lora_rank: int = works(8, "Rank of the LoRA matrices.", ge=1)
    lora_alpha: int = works(None, "Scale of LoRA: the update is multiplied by alpha / rank. Default: twice the rank.")
    lora_dropout: float = works(0.0, "Dropout before the LoRA matrices.", ge=0, lt=1)
    lora_target: Names = works(["all"], "Modules that get LoRA; `all` takes every linear layer but the head.")
    additional_target: Names | None = works(None, "Modules that train whole and are saved with the adapter.")
    use_rslora: bool = works(False, "Scale by alpha / sqrt(rank).")
    use_dora: bool = works(False, "Train direction and magnitude apart (DoRA).")
    create_new_adapter: bool = works(False, "Merge the loaded adapters and train a new one.")
    loraplus_lr_ratio: float | None = not_yet(None, "Learning rate of B over that of A (LoRA+).", why.LORA_PLUS)
    loraplus_lr_embedding: float = accepted(
        1e-6, "Learning rate of embeddings in LoRA+.", why.only_with("loraplus_lr_ratio")
    )
    pissa_init: bool = not_yet(False, "Start LoRA from the weights' largest singular directions.", why.PISSA)
    pissa_iter: int = accepted(16, "Iterations of PiSSA's decomposition.", why.WITH_PISSA)
    pissa_convert: bool = accepted(False, "Save PiSSA as a plain LoRA.", why.WITH_PISSA)

    oft_rank: int = accepted(0, "Rank of OFT.", why.WITH_OFT)
    oft_block_size: int = accepted(32, "Block size of OFT.", why.WITH_OFT)
    oft_target: Names = accepted(["all"], "Modules that get OFT.", why.WITH_OFT)
    module_dropout: float = accepted(0.0, "Dropout of OFT.", why.WITH_OFT)
    use_llama_pro: bool = not_yet(False, "Train only added blocks.", why.LLAMA_PRO)

    pref_beta: float = accepted(0.1, "Strength of the reference model's pull.", why.WITH_PREFERENCES)
    pref_ftx: float = accepted(0.0, "Share of plain SFT loss.", why.WITH_PREFERENCES)
    pref_bco_weight: float = accepted(0.0, "Share of BCO loss.", why.WITH_PREFERENCES)
    pref_loss: Literal["sigmoid", "hinge", "ipo", "kto_pair", "orpo", "simpo"] = accepted(
        "sigmoid", "Kind of preference loss.", why.WITH_PREFERENCES
    )
    dpo_label_smoothing: float = accepted(0.0, "Label noise assumed by DPO.", why.WITH_PREFERENCES)
    kto_chosen_weight: float = accepted(1.0, "Weight of good answers in KTO.", why.WITH_KTO)
    kto_rejected_weight: float = accepted(1.0, "Weight of bad answers in KTO.", why.WITH_KTO)
    simpo_gamma: float = accepted(0.5, "Margin of SimPO.", why.WITH_PREFERENCES)
    ld_alpha: float | None = accepted(None, "Weight of the tokens beyond the shorter answer.", why.WITH_PREFERENCES)
    ref_model: str | None = accepted(None, "Reference model.", why.WITH_PREFERENCES)
    ref_model_adapters: str | None = accepted(None, "Adapters of the reference model.", why.WITH_PREFERENCES)
    ref_model_quantization_bit: Literal[4, 8] | None = accepted(
        None, "Bits of the reference model.", why.WITH_PREFERENCES
    )
    reward_model: str | None = accepted(None, "Reward model.", why.WITH_PPO)
    reward_model_adapters: str | None = accepted(None, "Adapters of the reward model.", why.WITH_PPO)
    reward_model_quantization_bit: Literal[4, 8] | None = accepted(None, "Bits of the reward model.", why.WITH_PPO)
    reward_model_type: Literal["lora", "full", "api"] = accepted("lora", "Kind of reward model.", why.WITH_PPO)
    ppo_buffer_size: int = accepted(1, "Batches in PPO's buffer.", why.WITH_PPO)
    ppo_epochs: int = accepted(4, "Passes over PPO's buffer.", why.WITH_PPO)
    ppo_score_norm: bool = accepted(False, "Normalise rewards.", why.WITH_PPO)
    ppo_target: float = accepted(6.0, "Target divergence of PPO.", why.WITH_PPO)
    ppo_whiten_rewards: bool = accepted(False, "Whiten rewards.", why.WITH_PPO)

    use_galore: bool = not_yet(False, "GaLore: optimizer in a low-rank space.", why.OPTIMIZER)
    galore_target: Names = accepted(["all"], "Modules under GaLore.", why.WITH_GALORE)
    galore_rank: int = accepted(16, "Rank of GaLore.", why.WITH_GALORE)
    galore_update_interval: int = accepted(200, "Steps between GaLore's projections.", why.WITH_GALORE)
    galore_scale: float = accepted(2.0, "Scale of GaLore.", why.WITH_GALORE)
    galore_proj_type: Literal["std", "reverse_std", "right", "left", "full"] = accepted(
        "std", "Projection of GaLore.", why.WITH_GALORE
    )
    galore_layerwise: bool = accepted(False, "Update layer by layer.", why.WITH_GALORE)
    use_apollo: bool = not_yet(False, "APOLLO: optimizer in a low-rank space.", why.OPTIMIZER)
    apollo_target: Names = accepted(["all"], "Modules under APOLLO.", why.WITH_APOLLO)
    apollo_rank: int = accepted(16, "Rank of APOLLO.", why.WITH_APOLLO)
    apollo_update_interval: int = accepted(200, "Steps between APOLLO's projections.", why.WITH_APOLLO)
    apollo_scale: float = accepted(32.0, "Scale of APOLLO.", why.WITH_APOLLO)
    apollo_proj: Literal["svd", "random"] = accepted("random", "How APOLLO projects.", why.WITH_APOLLO)
    apollo_proj_type: Literal["std", "right", "left"] = accepted("std", "Projection of APOLLO.", why.WITH_APOLLO)
    apollo_scale_type: Literal["channel", "tensor"] = accepted("channel", "What APOLLO scales.", why.WITH_APOLLO)
    apollo_layerwise: bool = accepted(False, "Update layer by layer.", why.WITH_APOLLO)
    apollo_scale_front: bool = accepted(False, "Limit growth before scaling.", why.WITH_APOLLO)
    use_badam: bool = not_yet(False, "BAdam: optimizer over one block at a time.", why.OPTIMIZER)
    badam_mode: Literal["layer", "ratio"] = accepted("layer", "What a block of BAdam is.", why.WITH_BADAM)
    badam_start_block: int | None = accepted(None, "First block of BAdam.", why.WITH_BADAM)
    badam_switch_mode: Literal["ascending", "descending", "random", "fixed"] | None = accepted(
        "ascending", "Order of BAdam's blocks.", why.WITH_BADAM
    )
    badam_switch_interval: int | None = accepted(50, "Steps on a block of BAdam.", why.WITH_BADAM)
    badam_update_ratio: float = accepted(0.05, "Share that BAdam updates.", why.WITH_BADAM)
    badam_mask_mode: Literal["adjacent", "scatter"] = accepted(
        "adjacent", "Which weights share a mask.", why.WITH_BADAM
    )
    badam_verbose: int = accepted(0, "How much BAdam prints.", why.WITH_BADAM)
    use_adam_mini: bool = not_yet(False, "Adam-mini: one second moment a block.", why.OPTIMIZER)
    use_muon: bool = not_yet(False, "Muon: orthogonalised updates.", why.OPTIMIZER)

    use_mca: bool = not_yet(False, "Train with Megatron through mcore-adapter.", why.BACKENDS)
    use_megatron_bridge: bool = not_yet(False, "Train with Megatron Bridge.", why.BACKENDS)
    use_hyper_parallel: bool = not_yet(False, "Train with HyperParallel.", why.BACKENDS)
    hyper_parallel_args: str | None = accepted(None, "Settings of HyperParallel.", why.WITH_HYPER_PARALLEL)
    hyper_parallel_cp_size: int = accepted(1, "GPUs that share a sequence.", why.WITH_HYPER_PARALLEL)

    use_dft_loss: bool = not_yet(False, "DFT: weigh tokens by their probability.", why.SFT_LOSSES)
    use_asft_loss: bool = not_yet(False, "ASFT: DFT held near a reference model.", why.SFT_LOSSES)
    asft_alpha: float = accepted(0.1, "Pull of ASFT's reference model.", why.only_with("use_asft_loss"))
    use_eaft_loss: bool = not_yet(False, "EAFT: weigh tokens by entropy.", why.SFT_LOSSES)
    eaft_alpha: float = accepted(1.0, "Strength of EAFT's weighing.", why.only_with("use_eaft_loss"))
    freeze_vision_tower: bool = accepted(True, "Keep the vision tower as it is.", why.TEXT_ONLY)
    freeze_multi_modal_projector: bool = accepted(True, "Keep the projector as it is.", why.TEXT_ONLY)
    freeze_language_model: bool = not_yet(False, "Keep the language model as it is.", why.TEXT_ONLY_REFUSED)

    compute_accuracy: bool = works(False, "Report the share of trained tokens that are guessed right in evaluation.")
    disable_shuffling: bool = works(False, "Train on the rows in their given order.")
    early_stopping_steps: int | None = works(None, "Stop after this many evaluations without improvement.", ge=1)
    plot_loss: bool = works(False, "Draw the loss curves into the output folder.")
    include_effective_tokens_per_second: bool = accepted(False, "Log real tokens per second.", why.ALWAYS_COUNTED)

    use_swanlab: bool = works(False, "Log to SwanLab; the same as `report_to: swanlab`.")
    swanlab_project: str | None = works("llamafactory", "SwanLab project.")
    swanlab_workspace: str | None = works(None, "SwanLab workspace.")
    swanlab_run_name: str | None = works(None, "SwanLab experiment; default: `run_name`.")
    swanlab_mode: Literal["cloud", "local"] = works("cloud", "Where SwanLab keeps its logs.")
    swanlab_api_key: str | None = not_yet(None, "Key for SwanLab.", why.SWANLAB_LOGIN, secret=True)
    swanlab_logdir: str | None = works(None, "Folder of SwanLab's logs.")
    swanlab_lark_webhook_url: str | None = not_yet(None, "Where SwanLab reports to Lark.", why.LARK)
    swanlab_lark_secret: str | None = accepted(
        None, "Secret for Lark.", why.only_with("swanlab_lark_webhook_url"), secret=True
    )

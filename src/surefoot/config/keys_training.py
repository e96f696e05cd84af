"""LLaMA-Factory's keys about the training run: transformers' 4.57 arguments and LLaMA-Factory's few more (154)."""

from __future__ import annotations

from typing import Any, Literal

from surefoot.config import reasons as why
from surefoot.config.key import Keys, accepted, not_yet, works
from surefoot.config.values import (
    REFUSED_OPTIMIZERS,
    REFUSED_TRACKERS,
    Interval,
    LogLevel,
    Names,
    Optimizer,
    SaveInterval,
    Scheduler,
    Settings,
    SettingsOrPath,
    Trackers,
)


class TrainingKeys(Keys):
    """How long, how fast, on what schedule, and what is written."""

    output_dir: str = works(None, "Folder of the run. Default: `saves/<model>-<finetuning_type>-<YAML's name>`.")
    overwrite_output_dir: bool = works(False, "Start anew although the folder holds a run.")
    do_train: bool = works(False, "Train; implied by `surefoot train`.")
    do_eval: bool = works(False, "Evaluate when training is done.")
    do_predict: bool = not_yet(False, "Generate answers for the evaluation data.", why.PREDICT)

    per_device_train_batch_size: int = works(8, "Samples of a batch.", ge=1)
    per_device_eval_batch_size: int = accepted(8, "Samples of a batch in evaluation.", why.EVAL_PACKED)
    per_gpu_train_batch_size: int | None = not_yet(None, "Old name.", why.OLD_BATCH_SIZE)
    per_gpu_eval_batch_size: int | None = not_yet(None, "Old name.", why.OLD_BATCH_SIZE)
    gradient_accumulation_steps: int = works(1, "Batches whose gradients make one optimizer step.", ge=1)
    num_train_epochs: float = works(3.0, "Passes over the data.", gt=0)
    max_steps: int = works(-1, "Optimizer steps; if positive, wins over `num_train_epochs`.", ge=-1)

    learning_rate: float = works(5e-5, "Peak learning rate.", ge=0)
    lr_scheduler_type: Scheduler = works(
        "linear", "Course of the learning rate after warmup.", refused={"reduce_lr_on_plateau": why.PLATEAU}
    )
    lr_scheduler_kwargs: Settings | None = works(None, "Settings of that course, such as `num_cycles`.")
    warmup_ratio: float = works(0.0, "Share of the steps on which the learning rate rises.", ge=0, le=1)
    warmup_steps: int | float = works(0, "Steps on which it rises; wins over the ratio. Below 1, a share.", ge=0)
    optim: Optimizer = works("adamw_torch_fused", "Optimizer.", refused=REFUSED_OPTIMIZERS)
    optim_args: str | None = works(None, "More settings of the optimizer, as `momentum=0.9,nesterov=true`.")
    optim_target_modules: Names | None = accepted(None, "Modules under a low-rank optimizer.", why.WITH_GALORE)
    adafactor: bool = works(False, "The same as `optim: adafactor`.")
    weight_decay: float = works(0.0, "Weight decay, on weights that are not norms or biases.", ge=0)
    adam_beta1: float = works(0.9, "Decay of Adam's mean.", ge=0, lt=1)
    adam_beta2: float = works(0.999, "Decay of Adam's square.", ge=0, lt=1)
    adam_epsilon: float = works(1e-8, "Adam's epsilon.", gt=0)
    max_grad_norm: float = works(1.0, "Longer gradients are shortened to this norm; 0 for never.", ge=0)
    label_smoothing_factor: float = works(0.0, "Share of the target spread over all tokens.", ge=0, lt=1)
    neftune_noise_alpha: float | None = works(None, "Noise on the embeddings while training (NEFTune).", ge=0)

    bf16: bool = works(False, "Mixed precision with bfloat16.")
    fp16: bool = works(False, "Mixed precision with float16 and loss scaling.")
    tf32: bool | None = not_yet(None, "TF32 in fp32 matrix products.", why.TF32, harmless=(False,))
    bf16_full_eval: bool = accepted(False, "Evaluate wholly in bfloat16.", why.EVAL_DTYPE)
    fp16_full_eval: bool = accepted(False, "Evaluate wholly in float16.", why.EVAL_DTYPE)
    fp16_opt_level: str = accepted("O1", "Apex's level.", why.TORCH_AUTOCAST)
    half_precision_backend: Literal["auto", "apex", "cpu_amp"] = accepted("auto", "Old.", why.TORCH_AUTOCAST)
    fp16_backend: Literal["auto", "apex", "cpu_amp"] = accepted("auto", "Old.", why.TORCH_AUTOCAST)
    fp8: bool = works(False, "Multiply with the frozen weights of LoRA in 8 bit floating point, on a GPU that can.")
    fp8_backend: str = accepted("auto", "What computes in FP8.", why.FP8_BY_TORCH)
    fp8_enable_fsdp_float8_all_gather: bool = accepted(False, "Gather in FP8.", why.FP8_BY_TORCH)

    seed: int = works(42, "Random seed.", ge=0, le=2**32 - 1)
    data_seed: int | None = works(None, "Seed of the order of samples; default: `seed`.", ge=0, le=2**32 - 1)
    full_determinism: bool = works(False, "Deterministic algorithms only; slower.")
    use_cpu: bool = works(False, "The same as `device: cpu`.")
    no_cuda: bool = works(False, "Old name of `use_cpu`.")
    use_mps_device: bool = not_yet(False, "Use an Apple GPU.", why.APPLE)

    eval_strategy: Interval = works("no", "Evaluate never, every `eval_steps`, or every epoch.")
    eval_steps: int | float | None = works(None, "Steps between evaluations, or a share below 1.", ge=0)
    eval_delay: int | float = works(0, "Steps or epochs before the first evaluation.", ge=0)
    eval_on_start: bool = not_yet(False, "Evaluate before the first step.", why.EVAL_LATER)
    eval_accumulation_steps: int | None = accepted(None, "Batches before predictions move.", why.EVAL_LOSS_ONLY)
    prediction_loss_only: bool = accepted(False, "Evaluation returns only the loss.", why.EVAL_LOSS_ONLY)
    include_inputs_for_metrics: bool = accepted(False, "Hand inputs to metrics.", why.EVAL_LOSS_ONLY)
    include_for_metrics: list[str] = accepted([], "What to hand to metrics.", why.EVAL_LOSS_ONLY)
    eval_do_concat_batches: bool = accepted(True, "Join the batches' predictions.", why.EVAL_LOSS_ONLY)
    batch_eval_metrics: bool = accepted(False, "Compute metrics batch by batch.", why.EVAL_LOSS_ONLY)
    eval_use_gather_object: bool = accepted(False, "How predictions are gathered.", why.MAIN_SPEAKS)
    predict_with_generate: bool = not_yet(False, "Generate in evaluation, for BLEU and ROUGE.", why.PREDICT)
    generation_max_length: int | None = accepted(None, "Longest generated text.", why.WITH_GENERATE)
    generation_num_beams: int | None = accepted(None, "Beams when generating.", why.WITH_GENERATE)
    generation_config: str | None = accepted(None, "Settings of generating.", why.WITH_GENERATE)
    load_best_model_at_end: bool = works(False, "End with the checkpoint that evaluated best.")
    metric_for_best_model: str | None = works(None, "Which metric decides; default: `loss`.")
    greater_is_better: bool | None = works(None, "Whether more is better; default: not for losses.")

    save_strategy: SaveInterval = works(
        "steps", "Save never, every `save_steps`, every epoch, or whenever the evaluation is the best so far."
    )
    save_steps: int | float = works(500, "Steps between checkpoints, or a share below 1.", ge=0)
    save_total_limit: int | None = works(None, "Most checkpoints to keep; none or 0 for all.", ge=0)
    save_only_model: bool = works(False, "Save weights without what resuming needs.")
    save_safetensors: bool = not_yet(True, "Write safetensors.", why.SAFETENSORS_ONLY)
    save_on_each_node: bool = accepted(False, "Save on every node.", why.MAIN_SPEAKS)
    resume_from_checkpoint: bool | str | None = works(
        None, "Checkpoint to go on from; true for the last, false for never. Default: the last, if there is one."
    )
    ignore_data_skip: bool = not_yet(False, "Resume at the start of the data.", why.DATA_POSITION)
    restore_callback_states_from_checkpoint: bool = accepted(False, "Restore callbacks.", why.WHOLE_STATE)

    logging_strategy: Interval = works("steps", "Log never, every `logging_steps`, or every epoch.")
    logging_steps: int | float = works(500, "Steps between log lines, or a share below 1.", ge=0)
    logging_first_step: bool = works(False, "Log the first step too.")
    logging_dir: str | None = works(None, "Folder of TensorBoard's logs.")
    logging_nan_inf_filter: bool = accepted(True, "Hide losses that are not finite.", why.NEVER_FILTERED)
    report_to: Trackers = works(None, "Trackers to log to. Default: none.", refused=REFUSED_TRACKERS)
    run_name: str | None = works(None, "Name of the run in trackers.")
    project: str = works("huggingface", "Project in trackers.")
    trackio_space_id: str | None = not_yet(
        "trackio", "Space that trackio logs to.", why.TRACKIO_SPACE, harmless=(None,)
    )
    disable_tqdm: bool | None = accepted(None, "No progress bars.", why.BARS_ON_TERMINALS)
    log_level: LogLevel = accepted("passive", "How much is printed.", why.OWN_LOGGING)
    log_level_replica: LogLevel = accepted("warning", "How much other processes print.", why.OWN_LOGGING)
    log_on_each_node: bool = accepted(True, "Print on every node.", why.MAIN_SPEAKS)
    include_tokens_per_second: bool = accepted(False, "Log tokens per second.", why.ALWAYS_COUNTED)
    include_num_input_tokens_seen: bool | Literal["all", "non_padding", "no"] = accepted(
        False, "Count tokens.", why.ALWAYS_COUNTED
    )
    skip_memory_metrics: bool = accepted(True, "Do not measure memory.", why.ALWAYS_MEASURED)

    dataloader_drop_last: bool = not_yet(False, "Drop the last batch of an epoch if it is not full.", why.EVERY_SAMPLE)
    dataloader_num_workers: int = accepted(0, "Loader processes.", why.TOKEN_TABLE)
    dataloader_prefetch_factor: int | None = accepted(None, "Batches loaded ahead.", why.TOKEN_TABLE)
    dataloader_pin_memory: bool = accepted(True, "Pin memory.", why.TOKEN_TABLE)
    dataloader_persistent_workers: bool = accepted(False, "Keep loader processes.", why.TOKEN_TABLE)
    group_by_length: bool = accepted(False, "Batch samples of like length.", why.PACKED)
    length_column_name: str = accepted("length", "Column of lengths.", why.PACKED)
    remove_unused_columns: bool = accepted(True, "Drop other columns.", why.OWN_COLUMNS)
    label_names: Names | None = accepted(None, "Columns of labels.", why.OWN_COLUMNS)

    gradient_checkpointing: bool = accepted(False, "Recompute layers.", why.RECOMPUTE)
    gradient_checkpointing_kwargs: Settings | None = accepted(None, "How to recompute.", why.RECOMPUTE)
    auto_find_batch_size: bool = accepted(False, "Halve the batch when memory is short.", why.OUT_OF_MEMORY)
    torch_empty_cache_steps: int | None = accepted(None, "Steps between emptying caches.", why.OUT_OF_MEMORY)
    torch_compile: bool = accepted(False, "Compile the model.", why.OWN_COMPILE)
    torch_compile_backend: str | None = accepted(None, "What compiles.", why.OWN_COMPILE)
    torch_compile_mode: str | None = accepted(None, "How to compile.", why.OWN_COMPILE)
    torchdynamo: str | None = accepted(None, "Old name of the backend.", why.OWN_COMPILE)
    jit_mode_eval: bool = accepted(False, "Trace for evaluation.", why.OWN_COMPILE)
    use_liger_kernel: bool = accepted(False, "Use Liger kernels.", why.OWN_KERNELS)
    liger_kernel_config: Settings | None = accepted(None, "Which Liger kernels.", why.OWN_KERNELS)
    average_tokens_across_devices: bool = accepted(True, "Average over all devices' tokens.", why.TOKEN_MEAN)
    debug: str | list[str] = accepted("", "Watch for overflow.", why.GUARD_WATCHES)

    deepspeed: SettingsOrPath | None = works(None, "DeepSpeed's settings, a JSON file of ZeRO stage 0 to 3.")
    fsdp: bool | str | list[str] | None = works(None, "Shard the model over the processes, and how.")
    fsdp_config: SettingsOrPath | None = works(None, "Settings of it, or their file.")
    fsdp_min_num_params: int = accepted(0, "Old.", why.SHARD_LAYERS)
    fsdp_transformer_layer_cls_to_wrap: str | None = accepted(None, "Old.", why.SHARD_LAYERS)
    accelerator_config: SettingsOrPath | None = not_yet(None, "Settings of accelerate.", why.DISTRIBUTED)
    parallelism_config: Any | None = not_yet(None, "How to spread the model.", why.DISTRIBUTED)
    local_rank: int = accepted(-1, "Number of this process.", why.BY_LAUNCHER)
    ddp_backend: Literal["nccl", "gloo", "mpi", "ccl", "hccl", "cncl", "mccl"] | None = works(
        None, "How processes talk.", refused=dict.fromkeys(("mpi", "ccl", "hccl", "cncl", "mccl"), why.TALK)
    )
    ddp_timeout: int = works(1800, "Seconds that processes wait for each other.", ge=1)
    ddp_find_unused_parameters: bool | None = accepted(None, "Look for unused weights.", why.OWN_SUM)
    ddp_bucket_cap_mb: int | None = accepted(None, "Size of gradient buckets.", why.OWN_SUM)
    ddp_broadcast_buffers: bool | None = accepted(None, "Share buffers.", why.OWN_SUM)
    master_addr: str | None = accepted(None, "Address of the first process.", why.BY_LAUNCHER)
    master_port: str | int | None = accepted(None, "Its port.", why.BY_LAUNCHER)
    ray_num_workers: int = accepted(1, "Processes under Ray.", why.RAY)
    ray_init_kwargs: SettingsOrPath | None = accepted(None, "Settings of Ray.", why.RAY)
    ray_scope: str | None = accepted("last", "Which trial of a search counts.", why.RAY)

    enable_torch_profiler: bool = not_yet(False, "Record with torch's profiler.", why.PROFILE)
    profiler_output_dir: str | None = accepted(None, "Folder of its records.", why.PROFILER)
    profiler_wait_steps: int = accepted(1, "Steps before each recording.", why.PROFILER)
    profiler_warmup_steps: int = accepted(1, "Steps of warming up.", why.PROFILER)
    profiler_active_steps: int = accepted(1, "Steps recorded.", why.PROFILER)
    profiler_repeat: int = accepted(1, "Recordings.", why.PROFILER)
    profiler_record_shapes: bool = accepted(True, "Record shapes.", why.PROFILER)
    profiler_profile_memory: bool = accepted(True, "Record memory.", why.PROFILER)
    profiler_with_stack: bool = accepted(True, "Record stacks.", why.PROFILER)
    profile_modules: str | None = not_yet(None, "Modules to time.", why.PROFILE)

    push_to_hub: bool = not_yet(False, "Upload the result.", why.UPLOAD)
    hub_model_id: str | None = accepted(None, "Repository.", why.UPLOAD_DETAIL)
    hub_strategy: Literal["end", "every_save", "checkpoint", "all_checkpoints"] = accepted(
        "every_save", "When to upload.", why.UPLOAD_DETAIL
    )
    hub_token: str | None = accepted(None, "Token to upload with.", why.UPLOAD_DETAIL, secret=True)
    hub_private_repo: bool | None = accepted(None, "Make it private.", why.UPLOAD_DETAIL)
    hub_always_push: bool = accepted(False, "Upload although one is under way.", why.UPLOAD_DETAIL)
    hub_revision: str | None = accepted(None, "Branch.", why.UPLOAD_DETAIL)
    push_to_hub_model_id: str | None = accepted(None, "Old name of the repository.", why.UPLOAD_DETAIL)
    push_to_hub_organization: str | None = accepted(None, "Old.", why.UPLOAD_DETAIL)
    push_to_hub_token: str | None = accepted(None, "Old name of the token.", why.UPLOAD_DETAIL, secret=True)

    use_legacy_prediction_loop: bool = accepted(False, "Old loop.", why.TRAINER_DETAIL)
    past_index: int = accepted(-1, "Reuse a model's past state.", why.TRAINER_DETAIL)
    sortish_sampler: bool = accepted(False, "Old sampler.", why.TRAINER_DETAIL)
    mp_parameters: str = accepted("", "For SageMaker.", why.OTHER_HARDWARE)
    tpu_num_cores: int | None = accepted(None, "TPU cores.", why.OTHER_HARDWARE)
    tpu_metrics_debug: bool = accepted(False, "TPU metrics.", why.OTHER_HARDWARE)

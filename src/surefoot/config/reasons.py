"""Why a key has nothing to do, or is refused and what to use instead: one sentence each, in both languages."""

from __future__ import annotations

from surefoot.config.key import Reason


def only_with(switch: str) -> Reason:
    """Explain a key that tunes a feature which is not there yet, and so does nothing alone."""
    return Reason(
        f"It is read only together with `{switch}`, which is not there yet.",
        f"仅与 `{switch}` 搭配时才会读取，而后者尚未支持。",
    )


# Accepted, nothing to do: Surefoot reaches the same end another way.
OWN_KERNELS = Reason(
    "Surefoot has its own fast path (packed passes, a loss that never builds whole logits) and needs no such kernels.",
    "Surefoot 自带快速路径（打包计算、从不构造完整 logits 的损失），不需要这类内核。",
)
OWN_COMPILE = Reason(
    "Surefoot compiles decoder layers itself where it is asked to; see `compile`.",
    "需要时由 Surefoot 自行编译解码层；见 `compile`。",
)
RECOMPUTE = Reason(
    "Recomputing is a memory decision here: layers are recomputed only when memory asks for it, always non-reentrant. "
    "To forbid it, set `disable_gradient_checkpointing: true`.",
    "重计算在这里取决于显存：只有显存不足时才重算某些层，且总是非重入式。"
    "若要禁止，设 `disable_gradient_checkpointing: true`。",
)
LOADING = Reason(
    "Weights are always loaded file by file, without a second copy in memory.",
    "权重总是逐文件加载，内存中不会出现第二份副本。",
)
FAST_TOKENIZER = Reason(
    "transformers 5 loads the fast tokenizer wherever there is one.",
    "transformers 5 只要有快速分词器就会加载它。",
)
OFFLOAD = Reason(
    "Weights are not spilled to disk; a model that does not fit is refused with the memory it needs.",
    "权重不会溢出到磁盘；放不下的模型会被拒绝，并说明所需内存。",
)
OTHER_HUBS = Reason(
    "Models come from a folder, the Hugging Face hub or the demo package; download from other hubs first.",
    "模型来自本地文件夹、Hugging Face hub 或演示包；其他平台的模型请先下载。",
)
TEXT_ONLY = Reason(
    "It concerns images, videos and audio; models are trained on text only so far.",
    "只与图像、视频和音频有关；目前只训练文本模型。",
)
BY_LAUNCHER = Reason(
    "The launcher (torchrun, `accelerate launch`, or `surefoot train` itself) tells it through the environment.",
    "由启动器（torchrun、`accelerate launch` 或 `surefoot train` 自身）通过环境变量告知各进程。",
)
MAIN_SPEAKS = Reason(
    "One process writes and speaks for all; with several machines, `output_dir` must be on a disk that all see.",
    "由一个进程统一写入和输出；多机时 `output_dir` 须位于所有机器都能访问的磁盘上。",
)
ONCE_A_MACHINE = Reason(
    "The first process of each machine encodes the rows into its cache, and the others read them there.",
    "每台机器由首个进程将数据编码进缓存，其余进程从缓存读取。",
)
OWN_SUM = Reason(
    "Gradients are summed once a step in one piece, without DDP's wrapper; there is nothing to tune.",
    "梯度每步一次整体求和，不经过 DDP 封装，无需调整。",
)
TALK = Reason(
    "Processes talk through NCCL (RCCL on AMD), or gloo on the CPU; leave it out.",
    "进程间通过 NCCL（AMD 上为 RCCL）通信，CPU 上用 gloo；请去掉该键。",
)
TOKEN_TABLE = Reason(
    "Tokenised rows lie memory-mapped on disk and are read in place; no loader processes are needed.",
    "分词后的样本以内存映射方式存放，直接读取；不需要加载进程。",
)
PACKED = Reason(
    "The samples of a step are packed without padding, so grouping them by length saves nothing.",
    "每一步的样本打包后没有填充，按长度分组不会带来收益。",
)
ALWAYS_COUNTED = Reason(
    "Tokens and tokens per second are always counted and logged.",
    "词元数和每秒词元数总会统计并记录。",
)
TOKEN_MEAN = Reason(
    "The loss is always the mean over all trained tokens of the optimizer step.",
    "损失总是该优化步内所有被训练词元的平均值。",
)
NEVER_FILTERED = Reason(
    "A loss that is not finite is never hidden: the step is stopped before the update and named.",
    "非有限的损失从不隐藏：在更新之前就停止该步并说明。",
)
GUARD_WATCHES = Reason(
    "The guard watches every step for overflow; see `guard`.",
    "守护模块会监视每一步是否溢出；见 `guard`。",
)
OUT_OF_MEMORY = Reason(
    "Out of memory halves the pass and goes on with the same batch; the memory plan needs no help.",
    "显存不足时会把单次计算量减半并继续同一批次；显存规划无需额外设置。",
)
EVAL_LOSS_ONLY = Reason(
    "Evaluation keeps sums of loss and accuracy, never whole logits, so there is nothing to collect or to move.",
    "评估只保留损失与准确率的累计值，从不保存完整 logits，因此没有需要收集或搬移的内容。",
)
EVAL_PACKED = Reason(
    "Evaluation packs as many rows as memory holds; its loss is the mean over all its tokens, whatever the batches.",
    "评估会按显存容量打包；其损失是全部被训练词元的平均值，与批次大小无关。",
)
BARS_ON_TERMINALS = Reason(
    "Bars are drawn on a terminal only; output that goes to a file has none.",
    "进度条只在终端显示；输出到文件时没有进度条。",
)
PARAMETERS_COUNTED = Reason(
    "The run prints how many parameters there are and how many train, not each of them.",
    "运行会打印参数总数和训练的参数数，而不逐个列出。",
)
EVAL_DTYPE = Reason(
    "Evaluation runs in the precision of training.",
    "评估使用与训练相同的精度。",
)
TORCH_AUTOCAST = Reason(
    "Mixed precision is torch's own autocast; there is no other backend to choose.",
    "混合精度使用 torch 自带的 autocast，没有其他后端可选。",
)
OWN_LOGGING = Reason(
    "What is printed does not depend on log levels: progress goes to the console, everything else to the run's files.",
    "输出内容与日志级别无关：进度显示在终端，其余写入运行目录。",
)
OWN_COLUMNS = Reason(
    "Rows are turned into token ids and labels before training; no other columns reach the model.",
    "数据在训练前已转成词元和标签，其他列不会进入模型。",
)
WHOLE_STATE = Reason(
    "A resumed run always restores its whole state.",
    "恢复运行时总是还原全部状态。",
)
ALWAYS_MEASURED = Reason(
    "Peak memory is always measured and logged; it costs nothing.",
    "峰值显存总会测量并记录，没有额外开销。",
)
TRAINER_DETAIL = Reason(
    "It tunes an inner part of transformers' Trainer that Surefoot does not have.",
    "它调节的是 transformers Trainer 的内部细节，Surefoot 中不存在。",
)
OTHER_HARDWARE = Reason(
    "It concerns TPUs or SageMaker, on which Surefoot does not run.",
    "只与 TPU 或 SageMaker 有关，Surefoot 不在其上运行。",
)
RAY = Reason(
    "It is read only when USE_RAY is set; runs through Ray are not there yet.",
    "仅在设置 USE_RAY 时读取；尚不支持通过 Ray 运行。",
)
PROFILER = only_with("enable_torch_profiler")
UPLOAD_DETAIL = only_with("push_to_hub")
WITH_VLLM = only_with("infer_backend: vllm")
WITH_SGLANG = only_with("infer_backend: sglang")
WITH_PREFERENCES = only_with("stage: dpo")
WITH_KTO = only_with("stage: kto")
WITH_PPO = only_with("stage: ppo")
WITH_OFT = only_with("finetuning_type: oft")
WITH_GALORE = only_with("use_galore")
WITH_APOLLO = only_with("use_apollo")
WITH_BADAM = only_with("use_badam")
WITH_GENERATE = only_with("predict_with_generate")
WITH_KT = only_with("use_kt")
WITH_HYPER_PARALLEL = only_with("use_hyper_parallel")
WITH_PISSA = only_with("pissa_init")
WITH_EXPORT_BITS = only_with("export_quantization_bit")

SHARD_LAYERS = Reason(
    "With `fsdp` each decoder layer is sharded by itself.",
    "使用 `fsdp` 时，每个解码层单独切分。",
)

# Not yet: refused by name, with what to use instead.
ONE_DEVICE = Reason(
    "A model lives on one device so far; leave it out.",
    "目前模型只放在一个设备上；请去掉该键。",
)
EXPORT_QUANTIZED = Reason(
    "Export writes 32 or 16 bit weights; leave it out and quantise the exported folder with your tool of choice.",
    "导出只写 32/16 位权重；请去掉该键，再用其他工具量化导出的文件夹。",
)
FLASH = Reason(
    "flash-attn is not used yet; `flash_attn: auto` packs the samples for torch's own attention and needs no package.",
    "尚不使用 flash-attn；`flash_attn: auto` 会把样本打包交给 torch 自带的注意力，无需额外安装。",
)
LONGLORA = Reason(
    "Shifted attention also fails in LLaMA-Factory with today's transformers; use `rope_scaling` for longer inputs.",
    "移位注意力在当前 transformers 下于 LLaMA-Factory 中同样失效；更长输入请用 `rope_scaling`。",
)
DEPTHS = Reason(
    "Mixture of depths is not supported; train the model as it is.",
    "不支持 mixture-of-depths；请按原模型训练。",
)
MOE_LOSS = Reason(
    "The router's auxiliary loss is not added yet; leave it out (LoRA usually leaves the router as it is).",
    "尚不添加路由辅助损失；请去掉该键（LoRA 通常不改动路由）。",
)
DESCRIBED_TOKENS = Reason(
    "New tokens start from the mean of the embeddings plus noise; name them in `add_special_tokens` instead.",
    "新词元以嵌入均值加噪声初始化；请改用 `add_special_tokens` 列出它们。",
)
SAFETENSORS_ONLY = Reason(
    "Weights are always written as safetensors, which every current tool reads; leave it out.",
    "权重总是写成 safetensors，所有现行工具都能读取；请去掉该键。",
)
UPLOAD = Reason(
    "Surefoot uploads nothing; leave it out and upload the finished folder with `hf upload`.",
    "Surefoot 不会上传任何内容；请去掉该键，完成后用 `hf upload` 上传文件夹。",
)
ENGINES = Reason(
    "Chat generates through transformers; leave it out, or serve the exported folder with vLLM or SGLang.",
    "对话通过 transformers 生成；请去掉该键，或用 vLLM / SGLang 部署导出的文件夹。",
)
BACKENDS = Reason(
    "Other training backends are not supported; leave it out to train with Surefoot's own loop.",
    "不支持其他训练后端；请去掉该键，使用 Surefoot 自己的训练循环。",
)
DISTRIBUTED = Reason(
    "Leave it out: `surefoot train` uses every card, each with the whole model, or shards it by `fsdp: full_shard`.",
    "请去掉该键：`surefoot train` 会使用所有卡，每张卡保存完整模型；或用 `fsdp: full_shard` 切分模型。",
)
PREFERENCES = Reason(
    "Preference stages come in a later version; `stage: sft` on the chosen answers trains today.",
    "偏好训练阶段将在后续版本提供；目前可用 `stage: sft` 训练被选中的回答。",
)
OFT = Reason(
    "OFT is not there yet; use `finetuning_type: lora`.",
    "尚不支持 OFT；请用 `finetuning_type: lora`。",
)
PISSA = Reason(
    "PiSSA is not there yet; leave it out for plain LoRA, or add `use_rslora: true`.",
    "尚不支持 PiSSA；请去掉该键使用普通 LoRA，或加上 `use_rslora: true`。",
)
LORA_PLUS = Reason(
    "Two learning rates for the LoRA matrices are not there yet; leave it out and raise `learning_rate` a little.",
    "尚不支持为两个 LoRA 矩阵设不同学习率；请去掉该键并略微提高 `learning_rate`。",
)
LLAMA_PRO = Reason(
    "Block expansion is not there yet; use `finetuning_type: freeze` with `freeze_trainable_layers`.",
    "尚不支持块扩展；请用 `finetuning_type: freeze` 配合 `freeze_trainable_layers`。",
)
OPTIMIZER = Reason(
    "It needs an extra package and is not there yet; use `optim: adamw_torch`, or `optim: adafactor` to save memory.",
    "它需要额外的包，尚不支持；请用 `optim: adamw_torch`，或用 `optim: adafactor` 节省显存。",
)
PURE_BF16 = Reason(
    "Trained weights are always kept in fp32, which loses no small updates; use `bf16: true`.",
    "被训练的权重总以 fp32 保存，不会丢失微小更新；请用 `bf16: true`。",
)
SFT_LOSSES = Reason(
    "This loss is not there yet; leave it out for the usual cross-entropy.",
    "尚不支持该损失；请去掉该键，使用普通交叉熵。",
)
PREDICT = Reason(
    "Answering a whole data set is not there yet; score with `do_eval: true`, or ask the model in `surefoot chat`.",
    "尚不支持为整个数据集生成回答；请用 `do_eval: true` 评分，或用 `surefoot chat` 提问。",
)
TEXT_ONLY_REFUSED = Reason(
    "Only language models are trained so far, so nothing would be left to train; leave it out.",
    "目前只训练语言模型，冻结后便没有可训练的部分；请去掉该键。",
)
EVAL_LATER = Reason(
    "The first evaluation comes after `eval_steps`; leave it out, or score the base model with `surefoot chat`.",
    "首次评估在 `eval_steps` 步之后；请去掉该键，或用 `surefoot chat` 试用基础模型。",
)
EVERY_SAMPLE = Reason(
    "Every sample of an epoch is trained on, so the last step may be smaller; leave it out.",
    "每个 epoch 的所有样本都会训练，最后一步可能较小；请去掉该键。",
)
SWANLAB_LOGIN = Reason(
    "Keys do not belong in a YAML; leave it out and log in once with `swanlab login`.",
    "密钥不应写进 YAML；请去掉该键，并用 `swanlab login` 登录一次。",
)
PAD_LABELS = Reason(
    "Padding is never trained on; leave it out.",
    "填充部分从不参与训练；请去掉该键。",
)
PROFILE = Reason(
    "The profiler is not built in; leave it out (`trainer_log.jsonl` has tokens per second for every logged step).",
    "未内置性能分析器；请去掉该键（`trainer_log.jsonl` 中每个记录步都有每秒词元数）。",
)
FP8_BY_TORCH = Reason(
    "torch's own products compute in 8 bits here, on one card; there is nothing to choose.",
    "此处由 torch 自身在单卡上做 8 位乘法，无可选项。",
)
OLD_BATCH_SIZE = Reason(
    "It is the old name; use `per_device_train_batch_size` or `per_device_eval_batch_size`.",
    "这是旧名称；请用 `per_device_train_batch_size` 或 `per_device_eval_batch_size`。",
)
TF32 = Reason(
    "TF32 is not switched yet; use `bf16: true` for speed.",
    "尚不支持切换 TF32；如需提速请用 `bf16: true`。",
)
APPLE = Reason(
    "Apple GPUs are not supported; use `device: cpu`.",
    "不支持 Apple GPU；请用 `device: cpu`。",
)
DATA_POSITION = Reason(
    "A resumed run always goes on at the sample where it stopped; leave it out.",
    "恢复运行总是从停下的样本继续；请去掉该键。",
)
PLATEAU = Reason(
    "A schedule that waits for the evaluation is not there yet; use `cosine` or `linear` with `early_stopping_steps`.",
    "尚不支持依赖评估结果的调度；请用 `cosine` 或 `linear` 配合 `early_stopping_steps`。",
)
TRACKER = Reason(
    "Name the trackers one by one: tensorboard, wandb, mlflow, swanlab, trackio, or none.",
    "请逐个写出追踪器：tensorboard、wandb、mlflow、swanlab、trackio，或 none。",
)
TRACKIO_SPACE = Reason(
    "trackio logs into a local folder here; leave it out.",
    "这里的 trackio 只记录到本地文件夹；请去掉该键。",
)
LARK = Reason(
    "Messages to Lark are not sent; leave it out.",
    "不发送飞书消息；请去掉该键。",
)

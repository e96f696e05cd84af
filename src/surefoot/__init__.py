"""Surefoot fine-tunes language models on AMD GPUs, NVIDIA GPUs and plain CPU."""

__version__ = "0.1.0"

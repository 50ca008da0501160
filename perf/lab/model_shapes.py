"""Shapes of decoders for the laboratory: those that engines are built from."""

from build_engines.model_shapes import (
    LLAMA3_8B,
    MODELS,
    QWEN25_7B,
    QWEN25_32B,
    SMOLLM2_135M,
    ModelShape,
)

__all__ = ["LLAMA3_8B", "MODELS", "QWEN25_7B", "QWEN25_32B", "SMOLLM2_135M", "ModelShape"]

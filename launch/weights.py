"""How many bytes a model's weights take on its GPUs.

Read from what is on this machine: a checkpoint's own count or its files' sizes, or a shape's
configuration. Nothing is downloaded or opened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from launch.kv import DTYPE_BYTES, model_config
from launch.models import is_shape, model_folder, shape_config


def weight_bytes(model: str, dtype: str) -> int | None:
    """Of a checkpoint as it lies on this machine, or of a shape in `dtype`; None for a model that
    is not here."""
    if is_shape(model):
        shape = shape_config(model)
        weights = _parameters(shape) * DTYPE_BYTES.get(dtype, 2)
        return _halved(weights, shape) if shape.get("quantization_config") else weights
    folder = model_folder(model)
    if folder is None:
        return None
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        return int(index["metadata"]["total_size"])
    except (OSError, ValueError, KeyError, TypeError):
        found = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return found or None


def in_fp8(model: str, weights: int) -> int | None:
    """What `weights` bytes of 16 bits a value come to in FP8, whose embeddings stay as they are;
    None where they are quantized already."""
    config = model_config(model)
    config = config.get("text_config", config)
    sizes = config.get("vocab_size"), config.get("hidden_size")
    if config.get("quantization_config") or not all(isinstance(size, int) for size in sizes):
        return None
    return _halved(weights, config)


def _halved(weights: int, config: Mapping[str, Any]) -> int:
    """`weights` bytes of 16 bits a value where all but the embeddings take 8."""
    embeddings: int = 2 * config["vocab_size"] * config["hidden_size"]
    embeddings *= 1 if config.get("tie_word_embeddings") else 2
    return (weights - embeddings) // 2 + embeddings


def _parameters(shape: Mapping[str, Any]) -> int:
    """Parameters of a Qwen3-MoE, as every shipped shape is."""
    hidden, head_dim = shape["hidden_size"], shape["head_dim"]
    queries = shape["num_attention_heads"] * head_dim
    keys = shape["num_key_value_heads"] * head_dim
    attention = 2 * hidden * queries + 2 * hidden * keys + 2 * head_dim
    expert = 3 * hidden * shape["moe_intermediate_size"]
    experts = shape["num_experts"] * (expert + hidden)
    layers = shape["num_hidden_layers"] * (attention + experts + 2 * hidden)
    ends = (1 if shape["tie_word_embeddings"] else 2) * shape["vocab_size"] * hidden
    return int(layers + ends + hidden)

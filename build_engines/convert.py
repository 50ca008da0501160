"""A SmolLM2 model (Llama family) in a GGUF file as a Hugging Face checkpoint.

Owns the mapping of names and layouts. Invariant: every tensor of the file is written, dequantised,
under its transformers name; a field or tensor that is missing or not known is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from build_engines.rotary import add_older_names
from tokenflow.errors import TokenFlowError

if TYPE_CHECKING:
    import torch

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of it that is done, in [0, 1]."""


class FetchError(TokenFlowError):
    """The checkpoint cannot be fetched, converted or stored; the message says what to do."""


def convert_gguf(gguf_path: Path, model: Path, progress: Progress) -> None:
    """Write config, generation config, tokenizer and bfloat16 weights of `gguf_path` to `model`.

    gguf_path: in the names and layouts of llama.cpp. model: an existing folder.
    Raises FetchError when a package is missing or the file is not a SmolLM2 model.
    """
    try:
        import gguf
        import safetensors.torch
        import transformers
    except ImportError as error:
        raise FetchError(f"converting the checkpoint needs {error.name}: pip install it") from error
    progress("converting", 0.0)
    reader = gguf.GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama" or fields.get(_SPLITTER_FIELD) != "smollm":
        raise FetchError(f"{gguf_path} is not a SmolLM2 model")
    try:
        config = _make_config(transformers, fields)
        weights = dict(_weights(gguf, reader, config, progress))
    except KeyError as error:
        raise FetchError(f"{gguf_path}: {error} is missing or not known") from error
    config.save_pretrained(model)
    add_older_names(model)
    _write_tokenizer(transformers, gguf_path, config, model)
    safetensors.torch.save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    (model / "model.safetensors").chmod(0o644)  # safetensors writes it for the owner only


def _make_config(transformers: Any, fields: dict[str, Any]) -> Any:
    return transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.rope.dimension_count"],
        max_position_embeddings=fields["llama.context_length"],
        # GGUF keeps it as float32; the checkpoint it was made from says 1e-05.
        rms_norm_eps=round(fields["llama.attention.layer_norm_rms_epsilon"], 12),
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        dtype="bfloat16",
    )


def _write_tokenizer(transformers: Any, gguf_path: Path, config: Any, model: Path) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer = transformers.AutoTokenizer.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name
    )
    # The GGUF names its splitting rule only; transformers falls back to plain GPT-2's.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(model)
    transformers.GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]),
        pad_token_id=config.pad_token_id,
    ).save_pretrained(model)


_SPLITTER_FIELD = "tokenizer.ggml.pre"
_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _weights(
    gguf: Any, reader: Any, config: Any, progress: Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor under its transformers name, dequantised, bfloat16."""
    import torch

    for done, tensor in enumerate(reader.tensors):
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.split(".")  # blk.<layer>.<kind>.weight or <kind>.weight
        kind = parts[-2]
        name = f"{_TENSOR_NAMES[kind]}.weight"
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{name}"
        if kind in ("attn_q", "attn_k"):
            # GGUF stores rotary pairs interleaved; transformers' Llama wants them as two halves.
            heads = config.num_attention_heads if kind == "attn_q" else config.num_key_value_heads
            rows, columns = array.shape
            array = array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2)
            array = array.reshape(rows, columns)
        yield name, torch.tensor(array, dtype=torch.bfloat16)
        progress("converting", (done + 1) / len(reader.tensors))

"""A tiny random decoder checkpoint with a real tokenizer, for tests and dry runs.

Owns its recipe: same family and seed, same bytes. The tokenizer is a byte-level BPE made on the
spot, so that it encodes and decodes any text (emoji included). The model speaks nonsense; its
weights are wide enough that its logits differ clearly from token to token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from build_engines.rotary import add_older_names
from tokenflow.errors import ConfigError

if TYPE_CHECKING:
    import torch

VOCAB_SIZE = 384
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_CORPUS = (
    "The reader reads the stream at a steady pace and the buffer grows while nobody waits.",
    "When a newcomer arrives, whoever has the most unread text can pause for a moment.",
    "The cache keeps what was computed, so that the stream continues where it stopped.",
    "0 1 2 3 4 5 6 7 8 9 10 20 30 40 50 60 70 80 90 100",
)


def make_tiny_model(
    target: Path, family: Literal["llama", "qwen2"] = "llama", seed: int = 0
) -> Path:
    """Write a checkpoint folder (float32 safetensors) to `target`; returns `target`.

    family: "llama" (tied embeddings, 2 layers) or "qwen2" (biases, untied head, 3 layers); both
        have 4 query heads on 2 KV heads of 16 and a vocabulary of 384.
    Raises ConfigError for another family.
    """
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "float32",
    }
    if family == "llama":
        config = LlamaConfig(**shape, num_hidden_layers=2, tie_word_embeddings=True)
        kind = LlamaForCausalLM
    elif family == "qwen2":
        config = Qwen2Config(**shape, num_hidden_layers=3, tie_word_embeddings=False)
        kind = Qwen2ForCausalLM
    else:
        raise ConfigError("family", f"must be 'llama' or 'qwen2', got {family!r}")
    config.architectures = [kind.__name__]

    target.mkdir(parents=True, exist_ok=True)
    weights = _random_weights(kind, config, seed)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(target)
    add_older_names(target)
    (target / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2})
    )
    _write_tokenizer(target)
    return target


def _random_weights(kind: Any, config: Any, seed: int) -> dict[str, torch.Tensor]:
    import torch

    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in kind(config).named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in sorted(shapes.items()):
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.1 * noise if "norm" in name else 0.2 * noise
    return weights


def _write_tokenizer(target: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")

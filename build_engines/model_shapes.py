"""Shapes of decoders, and what follows from them: parameters, bytes, FLOPs.

Owns the arithmetic and the published shapes, for engine builds and the laboratory alike.
Invariant: everything is derived from the shape; no count is written down. A multiply-add is two
FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder with grouped-query attention and a gated MLP (Llama's layout).

    tied_embeddings: the head is the embedding. qkv_bias: as Qwen2.5 has. dtype_bytes: of weights,
    activations and KV alike.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    dtype_bytes: int = 2

    @property
    def num_layer_matrix_params(self) -> int:
        """Parameters of the matrices of all layers: what every token is multiplied with."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp)

    @property
    def num_head_params(self) -> int:
        """Parameters of the matrix that makes logits."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """All parameters, a tied matrix once."""
        biases = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.qkv_bias
        vectors = self.num_layers * (2 * self.hidden_size + biases) + self.hidden_size
        num_tables = 1 if self.tied_embeddings else 2
        return self.num_layer_matrix_params + num_tables * self.num_head_params + vectors

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights."""
        return self.num_params * self.dtype_bytes

    @property
    def read_weight_bytes(self) -> int:
        """Bytes of weights that a step reads: of the embedding only the rows of its tokens, which
        are left out."""
        return (self.num_layer_matrix_params + self.num_head_params) * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def linear_flops_per_token(self) -> int:
        """FLOPs of one token in the matrices of all layers; the head is not among them."""
        return 2 * self.num_layer_matrix_params

    @property
    def head_flops_per_token(self) -> int:
        """FLOPs of the logits of one token."""
        return 2 * self.num_head_params

    @property
    def attention_flops_per_pair(self) -> int:
        """FLOPs of one token looking at one position, all layers: a product with the key and one
        with the value, each query head its own."""
        return 4 * self.num_layers * self.num_heads * self.head_dim


LLAMA3_8B = ModelShape(
    name="llama3-8b",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14_336,
    vocab_size=128_256,
)
QWEN25_7B = ModelShape(
    name="qwen2.5-7b",
    num_layers=28,
    hidden_size=3584,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=18_944,
    vocab_size=152_064,
    qkv_bias=True,
)
QWEN25_32B = ModelShape(
    name="qwen2.5-32b",
    num_layers=64,
    hidden_size=5120,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=27_648,
    vocab_size=152_064,
    qkv_bias=True,
)
SMOLLM2_135M = ModelShape(
    name="smollm2-135m",
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49_152,
    tied_embeddings=True,
)

MODELS: dict[str, ModelShape] = {
    model.name: model for model in (LLAMA3_8B, QWEN25_7B, QWEN25_32B, SMOLLM2_135M)
}
"""By name. Sources: the config.json files of the published checkpoints."""

"""GPUs as a cost model needs them: what data sheets say, and what share of it programs reach.

Owns the constants, each with its source. Peaks are the vendor's; the shares of them that a serving
engine reaches are typical published values, chosen before anything was compared and fitted to
nothing (perf/lab/published.py shows how far off they are). Sizes are decimal, as on the data
sheets: 141 GB is 141e9 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from build_engines.gpu_memory import GPU_MEMORY


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU and its links.

    tensor_flops: dense bf16 with fp32 accumulation, FLOP/s. memory_bytes, memory_bytes_per_s: data
        sheet. pcie_bytes_per_s: what one large pinned copy reaches, each direction.
    duplex_share: of the sum of both directions, what they reach when both copy at once.
    link_bytes_per_s, link_latency_s: between two GPUs of a tensor-parallel group, one direction;
        the latency is that of one small all-reduce.
    gemm_share: of tensor_flops, in the linear layers of a large prefill, with everything that runs
        between the GEMMs (norms, activations) counted in.
    attention_share: of tensor_flops, in the attention of a prefill.
    bandwidth_share: of memory_bytes_per_s, in a decode step (weights and paged KV).
    step_overhead_s: launch and host work of one step that nothing hides.
    decode_computes: False: decoding takes the time of what it reads and writes, and none for its
        arithmetic, nor do any logits. No GPU is like that, simple models are (assumptions.py).
    """

    name: str
    tensor_flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    pcie_bytes_per_s: float
    duplex_share: float
    link_bytes_per_s: float
    link_latency_s: float
    gemm_share: float
    attention_share: float
    bandwidth_share: float
    step_overhead_s: float
    decode_computes: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("name", "decode_computes"):
                continue
            if not value > 0:
                raise ValueError(f"{field.name} must be > 0, got {value!r}")
            if field.name.endswith("_share") and value > 1:
                raise ValueError(f"{field.name} must be <= 1, got {value!r}")


H200 = Gpu(
    name="h200",
    tensor_flops=989.5e12,
    memory_bytes=GPU_MEMORY["h200"].memory_bytes,
    memory_bytes_per_s=4.8e12,
    pcie_bytes_per_s=53e9,
    duplex_share=0.85,
    link_bytes_per_s=375e9,
    link_latency_s=10e-6,
    gemm_share=0.65,
    attention_share=0.5,
    bandwidth_share=0.80,
    step_overhead_s=1e-3,
)
"""H200 SXM. Data sheet: 1,979 bf16 TFLOPS with sparsity, so half of it dense; 141 GB HBM3e with
4.8 TB/s; PCIe 5.0 x16; NVLink 900 GB/s, 450 each way.

pcie_bytes_per_s: 52.8 GB/s is what users of NVIDIA's nvbandwidth report for an H100, of 63 on the
wire. link_bytes_per_s: 376 to 380 GB/s one way is what users of NCCL report for an HGX H100.
"""

RTX_4090 = Gpu(
    name="4090",
    tensor_flops=165.2e12,
    memory_bytes=GPU_MEMORY["4090"].memory_bytes,
    memory_bytes_per_s=1.008e12,
    pcie_bytes_per_s=25e9,
    duplex_share=0.85,
    link_bytes_per_s=20e9,
    link_latency_s=30e-6,
    gemm_share=0.70,
    attention_share=0.5,
    bandwidth_share=0.85,
    step_overhead_s=1e-3,
)
"""GeForce RTX 4090. Vendor's Ada architecture paper: 165.2 bf16 tensor TFLOPS dense with fp32
accumulation; 24 GB GDDR6X, 384 bit at 21 Gbit/s = 1,008 GB/s; PCIe 4.0 x16, no NVLink.

pcie_bytes_per_s: 25 GB/s is what nvbandwidth's users report for pinned copies on PCIe 4.0 x16, of
31.5 on the wire. link_bytes_per_s: two of them talk through host memory over the same slots, hence
less than a copy, and a longer latency.
"""

RTX_A6000 = Gpu(
    name="a6000",
    tensor_flops=154.8e12,
    memory_bytes=GPU_MEMORY["a6000"].memory_bytes,
    memory_bytes_per_s=768e9,
    pcie_bytes_per_s=25e9,
    duplex_share=0.85,
    link_bytes_per_s=50e9,
    link_latency_s=15e-6,
    gemm_share=0.65,
    attention_share=0.5,
    bandwidth_share=0.85,
    step_overhead_s=1e-3,
)
"""RTX A6000. Data sheet: 309.7 tensor TFLOPS with sparsity, so 154.8 dense (the same rate with fp32
accumulation, unlike GeForce boards of its generation); 48 GB GDDR6, 768 GB/s; PCIe 4.0 x16; NVLink
bridge 112.5 GB/s, 56 each way. pcie_bytes_per_s: as RTX_4090.
"""

# Why these shares. gemm_share: vendors' libraries reach 70 to 80 % of the dense peak in single
# large bf16 GEMMs on Hopper and Ampere, where power limits the clock, and a little more on Ada; the
# operations between them take the rest. attention_share: FlashAttention-2 and -3 report 35 to 75 %
# of peak, by architecture and length. bandwidth_share: streaming kernels reach 90 to 93 % of what
# HBM and GDDR have; small matrices and paged reads lose some of that. step_overhead_s: with
# captured graphs, launching costs tenths of a millisecond; sampling, choosing the next batch and
# preparing it are hidden only in part. duplex_share: between 0.7 (reported for one machine: 24 + 11
# of 2 x 25 GB/s) and 1 (full duplex on paper).

GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in (H200, RTX_4090, RTX_A6000)}
"""By name: h200, 4090, a6000."""

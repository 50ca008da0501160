"""A build plan as a person reads it: commands, what each flag is for, where the memory goes.

Owns the wording and the order. Same plan, same text.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from build_engines.build_plan import BuildPlan
from build_engines.memory_budget import Budget, gb
from build_engines.recipes import PAUSE_RESUME_FLAGS

_WIDTH = 100


def plan_text(plan: BuildPlan) -> str:
    """The plan for a terminal, without a newline at its end."""
    parts = (_head(plan), _commands(plan), _memory(plan), _readers(plan), _caveat())
    return "\n\n".join(parts)


def _head(plan: BuildPlan) -> str:
    gpus = plan.gpu.name if plan.request.tp == 1 else f"{plan.request.tp} x {plan.gpu.name}"
    limits = plan.limits
    return "\n".join(
        (
            f"{plan.request.model}, {plan.kind.name}, on {gpus} "
            f"({plan.shape.num_params:,} parameters, {plan.family.architecture})",
            f"  up to {limits.max_batch_size} streams and {limits.max_num_tokens:,} tokens in a "
            f"step, {limits.max_seq_len:,} tokens a stream, {limits.tokens_per_block} a KV block",
        )
    )


def _commands(plan: BuildPlan) -> str:
    lines = ["Commands (TensorRT-LLM 1.2.1):"]
    for number, step in enumerate(plan.steps, 1):
        lines.append(f"  {number}. {step.name}")
        lines += [f"     {line}" for line in _wrapped(step.argv)]
    lines.append("  of these flags, pause and resume need:")
    lines += [f"     {flag} {value}: {why}" for flag, value, why in PAUSE_RESUME_FLAGS]
    if plan.kind.name == "fp8":
        lines.append(
            f"  calibration loads the model in bfloat16, {gb(2 * plan.shape.num_params)} over the "
            "GPUs that it sees"
        )
    lines.append(f"  disk: {gb(plan.disk_bytes)} for the converted checkpoint and the engine")
    return "\n".join(lines)


def _wrapped(argv: tuple[str, ...]) -> Iterator[str]:
    """Shell lines; a flag stays beside its value."""
    words, line = [shlex.quote(word) for word in argv], ""
    groups: list[str] = []
    for word in words:
        if groups and not word.startswith("--") and groups[-1].startswith("--"):
            groups[-1] += f" {word}"
        else:
            groups.append(word)
    for group in groups:
        if line and len(line) + len(group) > _WIDTH - 10:
            yield f"{line} \\"
            line = f"  {group}"
        else:
            line = f"{line} {group}" if line else group
    yield line


def _memory(plan: BuildPlan) -> str:
    budget = plan.budget
    rows = (
        ("GPU", budget.gpu_bytes, "data sheet" if plan.request.gpu_bytes is None else "given"),
        ("weights", budget.weight_bytes, "from the shape"),
        ("activations", budget.activation_bytes, "estimate from above, by max_num_tokens"),
        ("buffers", budget.buffer_bytes, "estimate from above, by max_batch_size"),
        ("reserve", budget.reserve_bytes, "CUDA, libraries"),
        ("KV pool", budget.pool_bytes, f"{budget.free_fraction:g} of what is left"),
    )
    title = "Memory of each GPU:" if plan.request.tp > 1 else "Memory of the GPU:"
    lines = [title]
    lines += [f"  {name:<12} {gb(size):>10}  {note}" for name, size, note in rows]
    lines += [
        f"  KV: {budget.kv_bytes_per_token:,} bytes a token, {budget.block_bytes:,} a block; "
        f"{budget.num_blocks:,} blocks, {budget.num_blocks * budget.tokens_per_block:,} tokens",
        f"  host: {gb(budget.host_bytes)} pinned, {budget.num_host_blocks:,} blocks"
        if budget.host_bytes
        else "  host: none (--host-gb puts memory behind the pool for paused streams)",
    ]
    return "\n".join(lines)


def _readers(plan: BuildPlan) -> str:
    budget = plan.budget
    lines = [
        f"Readers, {budget.context_tokens:,} tokens each (--context):",
        f"  {budget.num_device_readers:,} with their KV on the GPU, "
        f"{budget.num_running_readers:,} of them in a step",
    ]
    if budget.host_bytes:
        lines.append(f"  {budget.num_host_readers:,} more, paused, with their KV on the host")
    lines.append(f"  {_longest(budget, plan.limits.max_seq_len)}")
    return "\n".join(lines)


def _longest(budget: Budget, max_seq_len: int) -> str:
    blocks = -(-max_seq_len // budget.tokens_per_block)
    return f"{budget.num_blocks // blocks:,} of full length ({max_seq_len:,} tokens) on the GPU"


def _caveat() -> str:
    return (
        "Weights and KV follow from the shape. Activations and buffers are bounds from logs of\n"
        "other engines; TensorRT-LLM logs its own when it loads this one. How many readers are\n"
        "kept supplied depends on their rate too: tokenflow size."
    )

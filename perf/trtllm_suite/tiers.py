"""Sections on KV: the host tier, and the mirror of the cache that KV events make."""

from __future__ import annotations

from perf.trtllm_suite.compare import compare
from perf.trtllm_suite.engines import Engines
from perf.trtllm_suite.resume import Paused
from perf.trtllm_suite.streams import Streams
from perf.trtllm_suite.values import Findings, NotHere
from tokenflow.kv_mirror import KvMirror


def _mirror(streams: Streams) -> KvMirror:
    """Raises NotHere where the engine tells no events."""
    if streams.mirror is None:
        raise NotHere(
            "this engine tells no KV events (an engine of several GPUs is driven by an "
            "orchestrator, which has none)"
        )
    return streams.mirror


def check_host(engines: Engines) -> Findings:
    """A paused request whose blocks were driven out of the device pool comes back from the host."""
    found, shape = Findings(), engines.shape
    length, pause_at = shape.output_len, shape.output_len // 2
    with engines.streams() as streams:
        num_host = engines.executor.num_host_blocks
        if not num_host:
            raise NotHere("this engine has no host tier (kv_cache_host_memory_bytes)")
        prompt = engines.prompts.make(shape.prompt_lens[2])
        reference = streams.run(prompt, length, streams.new_salt()).values
        request = Paused(streams, prompt, length, [pause_at])
        request.step(resume=False)
        known = (*prompt, *request.token_ids)
        for _ in range(shape.num_pool_blocks * shape.tokens_per_block // shape.seq_len + 1):
            other = engines.prompts.make(shape.seq_len - 2)
            streams.run(other, 2, streams.new_salt())
        streams.read_events()
        before = None if streams.mirror is None else streams.mirror.locate(known)
        request.resume()
        request.run()
        num_reused = request.resumes[-1].num_reused_blocks
        found.figures = {
            "num_host_blocks": num_host,
            "num_blocks_before_resume": (len(known) - 1) // shape.tokens_per_block,
            "num_reused_blocks": num_reused,
            "resume_first_token_s": round(request.resumes[-1].first_token_s, 4),
        }
        if num_reused < (len(known) - 1) // shape.tokens_per_block:
            found.faults.append(
                f"the resume found {num_reused} blocks of "
                f"{(len(known) - 1) // shape.tokens_per_block}"
            )
        if before is not None:
            found.figures["num_on_host_before_resume"] = before.num_host_blocks
            if not before.num_host_blocks:
                found.faults.append("no block of the paused request was on the host by then")
        same = compare(reference, request.values)
        found.figures["output"] = same.figures()
        found.faults += same.faults("after the host", engines.tolerance)
        _note_tiers(found, streams)
    return found


def _note_tiers(found: Findings, streams: Streams) -> None:
    tiers = [entry.kv_tier_stats for entry in streams.stats if entry.kv_tier_stats is not None]
    if not tiers:
        found.remarks.append("the engine's figures of both tiers are unknown")
        return
    found.figures["num_offloads"] = tiers[-1].num_offloads_completed
    found.figures["num_onboards"] = tiers[-1].num_onboards_completed
    if not tiers[-1].num_onboards_completed:
        found.faults.append("no KV event told of a block that came back from the host")


def check_events(engines: Engines) -> Findings:
    """What the mirror says of the cache is what requests find there."""
    found, shape = Findings(), engines.shape
    size = shape.tokens_per_block
    rows = []
    with engines.streams() as streams:
        mirror = _mirror(streams)
        runs = []
        for index in range(6):
            prompt = engines.prompts.make(shape.prompt_lens[index % 3] + index)
            output = streams.run(prompt, size + index)
            runs.append((*prompt, *output.token_ids))
        streams.settle()
        for known in runs:
            mirrored = mirror.locate(known[:-1]).num_tokens // size
            output = streams.run(known, 1)
            rows.append({"num_tokens": len(known), "num_mirrored_blocks": mirrored,
                         "num_reused_blocks": output.num_reused_blocks})  # fmt: skip
            if not mirrored <= output.num_reused_blocks <= mirrored + 1:
                found.faults.append(
                    f"of {len(known)} tokens the mirror knows {mirrored} full blocks, "
                    f"the engine found {output.num_reused_blocks}"
                )
        streams.settle()
        found.figures = {
            "requests": rows,
            "num_gaps": mirror.num_gaps,
            "num_blocks_per_level": mirror.num_blocks_per_level,
            "num_mirrored_device_blocks": mirror.num_device_blocks,
            "num_mirrored_host_blocks": mirror.num_host_blocks,
        }
        _check_bounds(found, mirror, engines)
    return found


def _check_bounds(found: Findings, mirror: KvMirror, engines: Engines) -> None:
    if mirror.num_gaps or not mirror.is_complete:
        found.faults.append(f"events are missing: {mirror.num_gaps} gaps in their ids")
    sizes = (engines.executor.info.num_blocks, engines.executor.num_host_blocks)
    if mirror.num_blocks_per_level and mirror.num_blocks_per_level[0] != sizes[0]:
        found.faults.append(
            f"events tell of {mirror.num_blocks_per_level[0]} device blocks, "
            f"the engine has {sizes[0]}"
        )
    for name, num, limit in (
        ("device", mirror.num_device_blocks, sizes[0]),
        ("host", mirror.num_host_blocks, sizes[1]),
    ):
        if num > limit:
            found.faults.append(f"the mirror holds {num} {name} blocks, there are {limit}")

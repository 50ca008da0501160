"""What the benchmark of the KV tiers is made of: models, stepped streams, checks, bursts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from perf.analysis import BenchmarkError
from perf.kv import content, resumes
from perf.kv.bursts import Burst, burst_requests
from perf.kv.content import NUM_HOST_BLOCKS
from perf.kv.filling import FillingRunner
from perf.kv.models import Model, open_model
from perf.kv.resumes import HOST_FULL, ResumeScale
from perf.kv.scales import SCALES
from perf.kv.stepping import EngineSize, SteppedEngine, Stream
from tests.perf.tiny_kv import tiny_model
from tokenflow.errors import ConfigError
from tokenflow.executor.api import Request
from tokenflow.inflight.runner import CopyDirection, SequenceChunk
from tokenflow.inflight.torch_memory import allocate_rows
from tokenflow.inflight.torch_runs import CopyRun
from tokenflow.inflight.torch_transport import ArrayMemory, ThreadTransport

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


@pytest.fixture
def engine(model: Model) -> Iterator[SteppedEngine]:
    made = SteppedEngine(
        model, EngineSize(num_device_blocks=40, num_host_blocks=12, kv_tiering=True)
    )
    yield made
    made.close()


def test_random_models_are_the_same_every_time_and_serve_several_runners(model: Model) -> None:
    other = tiny_model()
    assert torch.equal(model.decoder.head_weight, other.decoder.head_weight)
    weights = [m.decoder.model.embed_tokens.weight for m in (model, other)]
    assert torch.equal(*weights)
    assert float(weights[0].std()) == pytest.approx(0.02, rel=0.1)
    ends = []
    for one in (model, model, other):
        engine = SteppedEngine(one, EngineSize(num_device_blocks=4))
        stream = Stream([5, 6, 7, 8])
        engine.start(stream)
        for _ in range(8):
            engine.until_token(stream)
        ends.append(stream.token_ids)
    assert ends[0] == ends[1] == ends[2]


def test_taking_all_blocks_leaves_a_stream_nothing_but_its_copies(engine: SteppedEngine) -> None:
    engine.start_crowd(2, 31)  # in between, they need blocks of their own
    stream = Stream(engine.new_prompt(70))
    engine.start(stream)
    engine.until_token(stream)
    engine.cancel(stream)
    assert engine.locate(stream).num_device_blocks == stream.num_blocks == 3
    engine.offload_all(stream)
    engine.take_all_blocks()
    found = engine.locate(stream)
    assert (found.num_device_blocks, found.num_host_blocks) == (0, 3)
    engine.prefetch_all(stream)
    assert engine.locate(stream).num_device_blocks == 3
    assert engine.stats.num_onboards_completed == 3
    before = list(stream.token_ids)
    engine.start(stream)
    assert engine.until_token(stream) > 0
    assert stream.token_ids[:-1] == before
    assert engine.stats.num_onboards_completed == 3


def test_full_tiers_hold_the_stream_on_the_host_and_nothing_is_empty(model: Model) -> None:
    scale = ResumeScale(num_others=2, num_repeats=1)
    size = resumes._size(scale, 70, num_hosted=2, kv_tiering=False)
    engine = SteppedEngine(model, size)
    try:
        bed = resumes._bed(engine, scale, 70, is_full=True)
        for _ in range(2):
            resumes._prepare(engine, bed.stream, HOST_FULL)
            assert engine.num_empty_blocks() == (0, 0)
            before = engine.stats
            engine.start(bed.stream)
            engine.until_token(bed.stream)
            num_onboards = engine.stats.num_onboards_completed - before.num_onboards_completed
            assert num_onboards == bed.stream.num_blocks
            assert engine.stats.num_offloads_completed - before.num_offloads_completed >= 3
            engine.cancel(bed.stream)
    finally:
        engine.close()


def test_what_only_fills_blocks_is_not_computed_and_the_others_are(model: Model) -> None:
    made = []
    for fills in (False, True):
        runner = FillingRunner(model.runner(), 32)
        runner.allocate_kv(6, 32, 0)
        runner.fillers |= {8, 9}
        runner.add_request(7, Request(input_token_ids=(5, 6, 7), max_tokens=2))
        chunks = [SequenceChunk(7, (5, 6, 7), 0, (3,), True, 0)]
        if fills:
            filler = SequenceChunk(8, (1,) * 40, 0, (4, 5), True, 0)
            chunks = [filler, *chunks, SequenceChunk(9, (1,) * 9, 0, (0,), False, 0)]
        output = runner.forward(chunks)
        made.append((output.token_ids, output.log_probs))
        if fills:
            assert runner.forward([filler]).token_ids == [0]  # alone, it is no work at all
        runner.remove_request(7)
        runner.remove_request(8)
    (tokens, log_probs), filled = made
    assert filled == ([0, *tokens], [0.0, *log_probs])


def test_copies_that_go_astray_are_found(model: Model) -> None:
    """Each in the pool where it leaves wrong bytes."""

    class Astray(ArrayMemory):
        wrong_way: CopyDirection | None = None

        def copy(self, direction: CopyDirection, run: CopyRun) -> None:
            if direction is self.wrong_way and run.host_block == 7:
                run = CopyRun(run.device_block, run.host_block - 1, run.num_blocks)
            super().copy(direction, run)

    def check(wrong_way: CopyDirection | None) -> None:
        pool = torch.zeros((content.NUM_DEVICE_BLOCKS, 64), dtype=torch.uint8)
        memory = Astray(pool.numpy(), allocate_rows(NUM_HOST_BLOCKS, 64))
        memory.wrong_way = wrong_way
        transport = ThreadTransport(memory)
        try:
            content.check(pool, transport, 30)
        finally:
            transport.close()

    for wrong_way in CopyDirection:
        with pytest.raises(BenchmarkError, match="wrong bytes"):
            check(wrong_way)
    check(None)


def test_what_a_way_takes_for_granted_is_looked_up(engine: SteppedEngine) -> None:
    stream = Stream(engine.new_prompt(40))
    engine.start(stream)
    engine.until_token(stream)
    engine.cancel(stream)
    with pytest.raises(BenchmarkError, match="before recompute"):
        resumes._prepare(engine, stream, resumes.RECOMPUTE)  # the host has it


def test_a_request_that_fails_ends_the_measurement(engine: SteppedEngine) -> None:
    stream = Stream(engine.new_prompt(40 * 32 + 1))
    engine.start(stream)
    with pytest.raises(BenchmarkError, match="exceeds maximum input length"):
        engine.until_token(stream)


def test_a_burst_is_the_same_every_time() -> None:
    burst = Burst()
    requests = burst_requests(burst, 1000)
    assert requests == burst_requests(burst, 1000)
    assert requests != burst_requests(replace(burst, seed=1), 1000)
    assert [r.send_offset_s for r in requests] == sorted(r.send_offset_s for r in requests)


@pytest.mark.parametrize("name", list(SCALES))
def test_every_burst_is_short_of_blocks_and_not_of_slots(name: str) -> None:
    for scale in SCALES[name].values():
        burst = scale.burst
        num_blocks = [
            -(-(len(r.input_token_ids) + r.max_tokens) // 32) for r in burst_requests(burst, 1000)
        ]
        assert sum(num_blocks) > 1.5 * burst.num_device_blocks
        assert max(num_blocks) * burst.max_batch_size > 1.5 * burst.num_device_blocks
        assert sum(num_blocks) <= burst.num_host_blocks


def test_an_unknown_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gpt_model_path"):
        open_model(str(tmp_path), "cpu", "float32", 1)

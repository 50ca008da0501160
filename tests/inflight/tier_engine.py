"""A batcher in small on two tiers of KV: sequences, the copies and chunks of a step, and checks."""

from dataclasses import dataclass

from tests.inflight.mirror import history_of, stored_blocks
from tests.inflight.paces import WhenTold
from tokenflow.executor.api import KvCacheConfig, Request
from tokenflow.inflight.block_store import SequenceBlocks
from tokenflow.inflight.kv_cache import KvCacheManager
from tokenflow.inflight.runner import CopyDirection, SequenceChunk
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import counting
from tokenflow.inflight.tiers import HostTier

MIN_PRIORITY = 30
VOCAB = 4


@dataclass(eq=False)
class Running:
    """A sequence with blocks."""

    request_id: int
    token_ids: list[int]
    salt: int | None
    blocks: SequenceBlocks
    num_computed: int


class TierEngine:
    """Sequences on a manager that decides and a scripted runner that holds the blocks.

    past: tokens and salt of the last ones that ended. moves_wait: copies were recorded that no step
    has made yet. num_to_fail: so many of the transfers that are waited for next fail. copy_fails:
    so do copies inside the device.
    """

    def __init__(self, num_blocks, num_host_blocks, size, *, partial, copies, **host):
        self.num_to_fail, self.copy_fails = 0, False
        self.pace = WhenTold(self.fate)
        self.runner = ScriptedRunner(counting(VOCAB), VOCAB, pace=self.pace)
        self.runner.allocate_kv(num_blocks, size, num_host_blocks)
        tier = HostTier(
            num_blocks=num_host_blocks,
            transport=self.runner.transport,
            min_priority=MIN_PRIORITY,
            **host,
        )
        config = KvCacheConfig(
            max_tokens=num_blocks * size,
            event_buffer_max_size=10_000,
            enable_partial_reuse=partial,
            copy_on_partial_reuse=copies,
        )
        self.kv = KvCacheManager(config, size, tier)
        self.size = size
        self.running: list[Running] = []
        self.past = [([0, 1] * 6, None)]
        self.next_id = 1
        self.moves_wait = False

    def take_blocks(self, token_ids, salt, retention):
        if len(token_ids) > self.kv.num_total_blocks * self.size:
            return
        fits = self.kv.num_blocks_for(len(token_ids)) <= self.kv.num_free_blocks
        blocks = self.kv.allocate(token_ids, salt, retention)
        if blocks is None:
            assert not fits, "refused although there is room"
            return
        self.moves_wait = True
        assert blocks.num_reused_tokens < len(token_ids)
        request = Request(input_token_ids=tuple(token_ids), max_tokens=99)
        self.runner.add_request(self.next_id, request)
        self.running.append(
            Running(self.next_id, list(token_ids), salt, blocks, blocks.num_reused_tokens)
        )
        self.next_id += 1

    def end(self, run, *, ended):
        self.past = [*self.past[-5:], (run.token_ids, run.salt)]
        self.kv.release(run.blocks, run.token_ids, run.num_computed, ended=ended)
        self.forget(run)

    def discard(self, run):
        self.kv.discard(run.blocks)
        self.forget(run)

    def forget(self, run):
        self.running.remove(run)
        self.runner.remove_request(run.request_id)

    # -- a step --------------------------------------------------------------------------------

    def fate(self, transfer):
        """Why a transfer that was waited for fails, or None."""
        self.num_to_fail -= 1
        return "planned" if self.num_to_fail >= 0 else None

    def make_moves(self):
        """False if the step failed."""
        link_may_fail = self.num_to_fail > 0
        failure = self.kv.run_moves(self.copy_blocks)
        self.moves_wait = False
        damaged = self.kv.take_damaged()
        if not link_may_fail and failure is None:
            assert not damaged
        for run in list(self.running):
            if failure is not None or run.blocks in damaged:
                self.discard(run)
        self.kv.forget_lost()
        return failure is None

    def copy_blocks(self, copies):
        if self.copy_fails:
            raise RuntimeError("planned")
        self.runner.copy_blocks(copies)

    def compute(self, chunks):
        if chunks:
            self.runner.forward(
                [
                    SequenceChunk(
                        run.request_id,
                        run.token_ids[run.num_computed : run.num_computed + count],
                        run.num_computed,
                        run.blocks.slots(self.kv.num_blocks_for(run.num_computed + count)),
                        False,
                        0,
                    )
                    for run, count in chunks
                ]
            )

    # -- what must hold ------------------------------------------------------------------------

    def check_figures(self, flights):
        """The published figures, counted another way. Nobody but the copy owns the slots of a block
        that was forgotten while it was copied."""
        s, stored, tiers = self.kv.tier_stats(), stored_blocks(self.kv), self.kv._tiers
        gone = sum(f.block.parent is None for f in flights)
        onboards = sum(f.direction is CopyDirection.ONBOARD for f in flights)
        to_device = sum(f.direction is CopyDirection.ONBOARD or not f.block.parent for f in flights)
        to_host = sum(f.direction is CopyDirection.OFFLOAD or not f.block.parent for f in flights)
        assert to_device + to_host == len(flights) + gone
        used = {slot for run in self.running for slot in run.blocks.slots(99)}
        cached = sum(b.slot is not None and b.ref_count == 0 for b in stored)
        copied = sum(b.host_slot is not None for b in stored)
        assert (
            s.num_device_used_blocks,
            s.num_device_cached_blocks,
            s.num_device_in_transit_blocks,
            s.num_host_cached_blocks,
            s.num_host_in_transit_blocks,
        ) == (len(used), cached, to_device, copied, to_host)
        free = len(tiers.free_device_slots)
        assert len(used) + cached + to_device + free == s.num_device_blocks
        assert copied + to_host + len(tiers.free_host_slots) == s.num_host_blocks
        assert s.num_onboards_started == (
            s.num_onboards_completed + s.num_onboards_failed + onboards
        )
        assert s.num_offloads_started == (
            s.num_offloads_completed + s.num_offloads_failed + len(flights) - onboards
        )

    def check_content(self):
        for block in stored_blocks(self.kv):
            history = history_of(block)
            start = len(history) - len(block.token_ids)
            if block.slot is not None:
                self.check_cells(self.runner._blocks[block.slot], history, start)
            if block.host_slot is not None:
                self.check_cells(self.host_blocks[block.host_slot], history, start)
        for run in self.running:
            for i, slot in enumerate(run.blocks.slots(self.kv.num_blocks_for(run.num_computed))):
                history = run.token_ids[: min((i + 1) * self.size, run.num_computed)]
                self.check_cells(self.runner._blocks[slot], history, i * self.size)

    @property
    def host_blocks(self):
        return self.runner.transport._host_blocks

    def check_cells(self, cells, history, start):
        """`cells` begin with the KV of history[start:]."""
        fingerprint = 0
        for position, token_id in enumerate(history):
            fingerprint = hash((fingerprint, token_id))
            if position >= start:
                assert cells[position - start] == (token_id, fingerprint)

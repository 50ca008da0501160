"""A cache of two tiers on the scripted runner's memory, for tests of which block goes where."""

from datetime import timedelta

from tokenflow.executor.api import (
    KvCacheConfig,
    KvCacheRetentionConfig,
    TokenRangeRetentionConfig,
)
from tokenflow.inflight.kv_cache import KvCacheManager
from tokenflow.inflight.scripted_runner import ScriptedRunner
from tokenflow.inflight.scripts import script_by_name
from tokenflow.inflight.tiers import HostTier

SIZE = 4
A, B, C, D, E, F = ([n] * SIZE for n in range(1, 7))


def tokens(*groups):
    return [token for group in groups for token in group]


class Cache:
    """A KvCacheManager on the scripted runner's memory, with every copy checked there."""

    def __init__(self, num_blocks, num_host, *, inclusive=False, pace=None, **host):
        self.runner = ScriptedRunner(script_by_name("counting", 64), 64, pace=pace)
        self.runner.allocate_kv(num_blocks, SIZE, num_host)
        config = KvCacheConfig(max_tokens=num_blocks * SIZE, event_buffer_max_size=100)
        self.kv = KvCacheManager(
            config,
            SIZE,
            HostTier(
                num_blocks=num_host,
                transport=self.runner.transport,
                inclusive=inclusive,
                **host,
            ),
        )
        self.now = 0.0

    def at(self, now):
        """A boundary at this instant."""
        self.now = now
        self.kv.begin(now)

    def start(self, token_ids, retention=None):
        """A sequence whose tokens are all computed."""
        sequence = self.kv.allocate(token_ids, None, retention)
        assert sequence is not None
        assert self.kv.run_moves(self.runner.copy_blocks) is None
        for block in sequence.blocks[sequence.num_reused_tokens // SIZE :]:
            self.runner._blocks[block.slot] = [(7, 7)] * SIZE
        return sequence

    def put(self, token_ids, retention=None, *, ended=False):
        """Compute and release; returns the sequence."""
        sequence = self.start(token_ids, retention)
        self.kv.release(sequence, token_ids, len(token_ids), ended=ended)
        self.kv.check_integrity()
        return sequence

    def where(self, token_ids):
        """(blocks on the device, blocks on the host only, of the former with a copy)"""
        self.kv.begin(self.now)
        found = self.kv.ahead.locate([*token_ids, 0])
        return found.num_device_blocks, found.num_host_blocks, found.num_copied_blocks

    def events(self):
        self.kv.flush_events()
        return [event.data for event in self.kv.events.get_latest_events(0)]


def keep(priority, *, decode=35, duration_s=None, end=None):
    duration = None if duration_s is None else timedelta(seconds=duration_s)
    return KvCacheRetentionConfig(
        token_range_retention_configs=(
            TokenRangeRetentionConfig(
                token_start=0, token_end=end, priority=priority, duration_ms=duration
            ),
        ),
        decode_retention_priority=decode,
    )

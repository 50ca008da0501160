"""Engines of a run: each in a process of its own, as in the server.

Owns the one that sections share, which is started when it is first wanted and again after it was
lost, and its log. Invariant: after `close` none of their processes is left.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from perf.trtllm_suite.compare import tolerance_of
from perf.trtllm_suite.environment import describe_engine
from perf.trtllm_suite.shape import Shape, fit_shape, make_prompts
from perf.trtllm_suite.streams import Streams
from perf.trtllm_suite.values import Deadline, Settings
from tokenflow.config import ServingConfig, parse_parameters
from tokenflow.executor.remote import RemoteExecutor
from tokenflow.executor.trtllm_engine import read_built_engine

_LOG_TAIL_LINES = 40


class Engines:
    """folder: for logs. Raises ConfigError for an engine that cannot serve, SuiteError for one that
    is too small for the sections."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.built = read_built_engine(str(settings.engine))
        self.shape: Shape = fit_shape(self.built, settings)
        self.prompts = make_prompts(self.built, settings.tokenizer)
        about = describe_engine(settings.engine)
        self.tolerance = settings.log_prob_tolerance or tolerance_of(
            str(about["dtype"]), bool(about["is_quantized"])
        )
        self.log_path = folder / "engine.log"
        self.config(self.shape.parameters())  # refused here rather than in every section
        self.load_s = 0.0
        self._shared: RemoteExecutor | None = None
        self._streams: Streams | None = None

    def config(self, parameters: Mapping[str, str]) -> ServingConfig:
        """The engine's, with the run's own parameters over `parameters`. Raises ConfigError."""
        return parse_parameters(
            {
                "engine": "trtllm",
                "gpt_model_path": str(self.settings.engine),
                **parameters,
                **self.settings.parameters,
            }
        )

    def start(self, config: ServingConfig) -> RemoteExecutor:
        """A running engine of the caller's, who shuts it down. Raises EngineError."""
        return RemoteExecutor(
            config, load_timeout_s=self.settings.load_limit_s, log_path=self.log_path
        )

    @property
    def executor(self) -> RemoteExecutor:
        """The shared engine."""
        if self._shared is not None and not self._shared.can_enqueue_requests():
            self.close()
        if self._shared is None:
            start_time = time.monotonic()
            self._shared = self.start(self.config(self.shape.parameters()))
            self.load_s = time.monotonic() - start_time
            self._streams = Streams(self._shared, self.built.tokens_per_block)
        return self._shared

    @contextlib.contextmanager
    def streams(self) -> Iterator[Streams]:
        """Requests on the shared engine, which runs empty before and after. After an error the next
        section gets another engine."""
        executor, streams = self.executor, self._streams
        assert streams is not None, "started with its engine"
        streams.deadline = Deadline(self.settings.section_limit_s)
        streams.settle()
        try:
            yield streams
        except BaseException:
            self.close()  # whatever went wrong in it, the next section has another engine
            raise
        if executor.can_enqueue_requests():
            streams.end_all()

    def close(self) -> None:
        """End the shared engine. Idempotent."""
        shared, self._shared, self._streams = self._shared, None, None
        if shared is not None:
            shared.shutdown()

    def log_tail(self) -> tuple[str, ...]:
        """The last lines that engines wrote."""
        try:
            lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ()
        return tuple(lines[-_LOG_TAIL_LINES:])

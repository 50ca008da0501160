"""TritonPythonModel: initialize, execute, finalize, and nothing else.

Owns the order in which the parts start and stop. `execute` only posts. No exception leaves a
thread or `execute`; `initialize` raises with one sentence that names what is wrong; `finalize` is
bounded in time.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import threading
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from tokenflow.clock import MonotonicClock
from tokenflow.config import ServingConfig, parse_parameters
from tokenflow.errors import ConfigError, InvalidRequestError, TokenFlowError
from tokenflow.executor.factory import served_config, start_engine
from tokenflow.executor.supervisor import EngineSupervisor
from tokenflow.runtime import Runtime
from tokenflow.trace import JsonLinesTracer
from triton_backend.metrics_export import MetricsExporter
from triton_backend.repository import require_one_instance
from triton_backend.senders import Sender
from triton_backend.service import TextService, load_tokenizer
from triton_backend.triton_io import TritonChannel, metric_kinds, read_request
from triton_backend.warden import start_warden
from triton_backend.watchdog import ServerWatchdog

logger = logging.getLogger("tokenflow")

_TRITON_PARAMETERS = frozenset({"FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH"})
_SHUTDOWN_S = 6.0
_ENGINE_SHUTDOWN_S = 10.0


class TritonPythonModel:
    """The text model `ensemble`."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine and the threads. Raises TritonModelException when the model cannot be
        served as configured."""
        _log_to_server()
        try:
            self._start(args)
        except TokenFlowError as error:
            raise pb_utils.TritonModelException(f"{args['model_name']}: {error}") from error

    def execute(self, requests: list[Any]) -> None:
        """Hand the requests over; answers come from the sender thread."""
        for request in requests:
            channel = TritonChannel(request)
            try:
                raw = read_request(request)
            except InvalidRequestError as error:
                self._service.refuse(channel, str(error))
            except Exception:
                logger.exception("a request could not be read")
                self._service.refuse(channel, "the request could not be read")
            else:
                self._service.accept(
                    raw.request_id, raw.tensors, raw.parameters, raw.requested_outputs, channel
                )

    def is_ready(self) -> bool:
        """False while no engine serves. Triton calls it from 26.03 on when somebody asks for the
        model's readiness; before, the gauge tokenflow_healthy alone says the same."""
        return self._runtime.gauges().healthy

    def finalize(self) -> None:
        """End what still runs, stop the engine and the threads."""
        logger.info("unloading")
        self._service.shutdown(_SHUTDOWN_S)
        self._watchdog.stop()
        self._warden.terminate()
        self._warden.wait()
        _shut_down_engine(self._engine, _ENGINE_SHUTDOWN_S)
        if self._tracer is not None:
            self._tracer.close()
        logger.info("unloaded")

    def _start(self, args: dict[str, str]) -> None:
        model_config = json.loads(args["model_config"])
        if not model_config.get("model_transaction_policy", {}).get("decoupled", False):
            raise ConfigError(
                "model_transaction_policy", "this model streams; it must say decoupled: true"
            )
        require_one_instance(model_config)
        config = parse_parameters(_own_parameters(model_config))
        tokenizer = load_tokenizer(config)
        self._tracer = _open_tracer(config)
        clock = MonotonicClock()
        self._engine = EngineSupervisor(
            lambda stop: start_engine(config, _log_progress, stop),
            max_restarts=config.max_engine_restarts,
            window_s=config.engine_restart_window_s,
            clock=clock,
        )
        try:
            config = served_config(config, self._engine.executor)
            sender = Sender(
                clock,
                poll_period_s=config.cancellation_check_period_ms / 1000,
                tick_period_s=config.stats_check_period_ms / 1000,
            )
            runtime = Runtime(
                self._engine.executor,
                config,
                emit=sender.post,
                tracer=self._tracer,
                keeper=self._engine,
            )
            self._runtime = runtime
            labels = {"model": args["model_name"], "version": args["model_version"]}
            exporter = MetricsExporter(metric_kinds(), runtime, labels)
            self._service = TextService(
                config, tokenizer, runtime, sender, clock, lambda: secrets.randbits(64)
            )
            self._watchdog = ServerWatchdog(self._engine.shutdown)
            self._watchdog.start()
            self._warden = start_warden(os.getppid(), os.getpid())
            self._service.start(on_tick=exporter.update)
        except BaseException:
            _shut_down_engine(self._engine, _ENGINE_SHUTDOWN_S)
            raise
        logger.info("%s is ready (%s engine, %s)", args["model_name"], config.engine,
                    config.scheduling_policy)  # fmt: skip


def _own_parameters(model_config: dict[str, Any]) -> dict[str, str]:
    return {
        key: value["string_value"]
        for key, value in model_config.get("parameters", {}).items()
        if key not in _TRITON_PARAMETERS
    }


def _open_tracer(config: ServingConfig) -> JsonLinesTracer | None:
    if not config.trace_path:
        return None
    try:
        return JsonLinesTracer(Path(config.trace_path))
    except OSError as error:
        raise ConfigError("trace_path", str(error)) from error


def _log_progress(fraction: float, text: str) -> None:
    logger.info("engine: %3.0f %% %s", 100 * fraction, text)


def _shut_down_engine(engine: EngineSupervisor, limit_s: float) -> None:
    """Shut down, but never wait longer than `limit_s`: an engine in its own process dies with this
    one anyway."""
    thread = threading.Thread(target=engine.shutdown, name="tokenflow-engine-stop", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        logger.error("the engine did not stop within %.0f s", limit_s)


def _log_to_server() -> None:
    """Log to stderr, which is the server's log."""
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("tokenflow %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False

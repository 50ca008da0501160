"""`tokenflow serve`: a real tritonserver with this backend, in the foreground.

Owns the order of things: configuration, model, ports, repository, server, log, stop. Whatever
ends the command, the server is stopped and its temporary repository removed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenflow.cli.flags import add_config_flags, config_from_flags
from tokenflow.cli.model import ensure_model
from tokenflow.cli.signals import termination_as_ctrl_c
from tokenflow.config import ServingConfig
from tokenflow.errors import ConfigError
from tokenflow.progress import Waiting

if TYPE_CHECKING:
    from triton_backend.launcher import TritonServer

_SERVER_START_S = 120.0
_LOG_POLL_S = 0.2


def add_parser(commands: Any) -> None:
    """Add `serve` to the subcommands."""
    parser = commands.add_parser(
        "serve",
        help="start the server and print what to try",
        description="Starts tritonserver with this backend and a model, SmolLM2-135M unless "
        "--gpt-model-path says otherwise, prints what to try, and shows the server's log until "
        "Ctrl-C.",
    )
    network = parser.add_argument_group("network")
    network.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    network.add_argument("--http-port", type=int, default=8000, help="default: %(default)s")
    network.add_argument("--grpc-port", type=int, default=8001, help="default: %(default)s")
    network.add_argument("--metrics-port", type=int, default=8002, help="default: %(default)s")
    parser.add_argument(
        "--exit-timeout-s",
        type=_seconds,
        default=30,
        help="how long streams in flight may go on after Ctrl-C (default: %(default)s)",
    )
    add_config_flags(parser)
    parser.set_defaults(run=run)


def _seconds(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C, SIGTERM or the server's own end; 1 if it ended by itself."""
    from triton_backend.installation import Ports, require_free_ports
    from triton_backend.launcher import TritonServer
    from triton_backend.repository import render_repository

    config = config_from_flags(arguments)
    ports = Ports(
        http=arguments.http_port, grpc=arguments.grpc_port, metrics=arguments.metrics_port
    )
    require_free_ports(ports, arguments.host)
    _check_model_path(config)
    if not config.gpt_model_path and config.engine == "inflight":
        config = config_from_flags(arguments, gpt_model_path=str(ensure_model()))
    with tempfile.TemporaryDirectory(prefix="tokenflow-serve-") as scratch, termination_as_ctrl_c():
        server = TritonServer(
            render_repository(config, Path(scratch) / "repository"),
            ports=ports,
            host=arguments.host,
            log_path=Path(scratch) / "server.log",
            exit_timeout_s=arguments.exit_timeout_s,
        )
        try:
            _start(server, ready_limit_s(config))
            print(what_to_try(server.http_url, server.grpc_url, server.metrics_url), flush=True)
            _show_log(server)
            print("tokenflow: the server ended by itself", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("\ntokenflow: stopping …", file=sys.stderr)
            return 0
        finally:
            _stop(server)


def _check_model_path(config: ServingConfig) -> None:
    """Say here, in one line, what the server would say after loading half of itself."""
    path = config.gpt_model_path
    if path and not (Path(path) / "config.json").exists():
        raise ConfigError("gpt_model_path", f"no config.json in {path}: not a checkpoint folder")


def what_to_try(http_url: str, grpc_url: str, metrics_url: str) -> str:
    """Lines for a person: a curl command, the gRPC address, the metrics address."""
    body = {
        "text_input": "The lighthouse on the northern cape",
        "max_tokens": 60,
        "stream": True,
        "read_rate": 6.0,
    }
    url = f"http://{http_url}/v2/models/ensemble/generate_stream"
    return "\n".join(
        [
            "",
            "Ready. Try:",
            f"  curl -sN {url} -d {shlex.quote(json.dumps(body))}",
            f"gRPC streaming:  {grpc_url}  (model: ensemble)",
            f"metrics:         http://{metrics_url}/metrics",
            "Ctrl-C stops the server.",
            "",
        ]
    )


def ready_limit_s(config: ServingConfig) -> float:
    """How long a server may take until it serves: its engine gives up by itself, with a reason."""
    return config.engine_load_timeout_s + _SERVER_START_S


def _start(server: TritonServer, limit_s: float) -> None:
    with Waiting("loading the model") as waiting:
        server.start()
        server.wait_ready(limit_s, on_wait=waiting)


def _stop(server: TritonServer) -> None:
    """Stop in order; a second Ctrl-C stops at once."""
    try:
        server.stop()
    except KeyboardInterrupt:
        server.stop(timeout_s=0.0)


def _show_log(server: TritonServer) -> None:
    """Copy the server's log to stderr from here on, until the server ends."""
    with server.log_path.open(errors="replace") as log:
        log.seek(0, 2)
        while True:
            running = server.is_running()
            sys.stderr.write(log.read())
            sys.stderr.flush()
            if not running:
                return
            time.sleep(_LOG_POLL_S)

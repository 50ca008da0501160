"""Model repository, machine checks, launcher helpers, metrics, watchdog."""

from __future__ import annotations

import dataclasses
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tokenflow.answers import Counters
from tokenflow.config import ServingConfig, parse_parameters
from tokenflow.errors import ConfigError
from tokenflow.runtime import RuntimeGauges
from triton_backend import installation
from triton_backend.installation import Ports, check_machine, find_free_ports, require_free_ports
from triton_backend.launcher import remove_shared_memory
from triton_backend.metrics_export import MetricKinds, MetricsExporter
from triton_backend.repository import fill, find_templates, render_repository
from triton_backend.watchdog import ServerWatchdog

_CHECKOUT = Path(__file__).resolve().parents[2]
_PARAMETER = re.compile(r'key: "(\w+)" value: \{ string_value: "((?:[^"\\]|\\.)*)" \}')


def read_parameters(text: str) -> dict[str, str]:
    pairs = _PARAMETER.findall(text)
    return {key: value.replace('\\"', '"').replace("\\\\", "\\") for key, value in pairs}


def test_rendered_repository_says_what_the_config_says(tmp_path: Path) -> None:
    config = ServingConfig(
        gpt_model_path=str(tmp_path / 'my "model"'),
        default_read_rate=4.5,
        scheduling_policy="fcfs-reserve",
        enable_kv_cache_reuse=False,
    )
    folder = render_repository(config, tmp_path / "repo")
    text = (folder / "ensemble" / "config.pbtxt").read_text()
    code = [line for line in text.splitlines() if not line.startswith("#")]
    assert not any("${" in line for line in code)
    assert parse_parameters(read_parameters(text)) == config
    shim = (folder / "ensemble" / "1" / "model.py").read_text()
    assert "${" not in shim
    compile(shim, "model.py", "exec")


def test_template_has_exactly_the_fields_of_the_config() -> None:
    text = (find_templates() / "ensemble" / "config.pbtxt").read_text()
    parameters = read_parameters(text)
    assert list(parameters) == [field.name for field in dataclasses.fields(ServingConfig)]
    assert parse_parameters(parameters) == ServingConfig()  # unfilled means default


def test_what_only_begins_like_a_placeholder_is_a_value() -> None:
    assert parse_parameters({"trace_path": "${HOME}/trace"}).trace_path == "${HOME}/trace"
    with pytest.raises(ConfigError, match="max_batch_size: must be a whole number"):
        parse_parameters({"max_batch_size": "${size}6"})


def test_relative_paths_become_absolute(tmp_path: Path) -> None:
    folder = render_repository(ServingConfig(gpt_model_path="models/x"), tmp_path)
    parameters = read_parameters((folder / "ensemble" / "config.pbtxt").read_text())
    assert parameters["gpt_model_path"] == str(Path.cwd() / "models/x")
    assert parameters["tokenizer_dir"] == ""


def test_values_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace_path"):
        render_repository(ServingConfig(trace_path="a\nb"), tmp_path)
    with pytest.raises(ConfigError, match="nothing"):
        fill("${nothing}", {})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="model_repository"):
        render_repository(ServingConfig(), tmp_path / "file")


def test_shim_finds_the_checkout_without_installation(tmp_path: Path) -> None:
    folder = render_repository(ServingConfig(), tmp_path)
    code = (
        "import sys, types\n"
        f"sys.path[:] = [p for p in sys.path if p not in ('', {str(_CHECKOUT)!r})]\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]\n"
        "class Anything(types.ModuleType):\n"
        "    def __getattr__(self, name): return Anything\n"
        "sys.modules['triton_python_backend_utils'] = Anything('x')\n"
        "import runpy\n"
        f"print(runpy.run_path({str(folder / 'ensemble' / '1' / 'model.py')!r})"
        "['TritonPythonModel'].__module__)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "triton_backend.model", result.stderr


def test_a_known_python_room_in_shm_and_free_ports_are_no_problem(tmp_path: Path) -> None:
    """`tmp_path` stands for a /dev/shm of the size of a disk. What else the machine lacks, the
    server itself, is not for this test to say."""
    problems = check_machine(find_free_ports(), shm_path=tmp_path, python_version=(3, 12))
    words = ("Python 3.12:", str(tmp_path), "_port")
    assert not [problem for problem in problems if any(word in problem.what for word in words)]


def test_machine_problems_are_named_with_the_line_to_run(tmp_path: Path) -> None:
    problems = check_machine(python_version=(3, 13), shm_path=tmp_path / "none")
    assert ["Python 3.13" in problems[0].what, "none" in problems[-1].what] == [True, True]
    assert all(problem.fix for problem in problems)


def test_ports_in_use_are_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = dataclasses.replace(find_free_ports(), grpc=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"^grpc_port: {ports.grpc} "):
            require_free_ports(ports)
        problems = check_machine(ports)
        assert "grpc_port" in problems[-1].what
    require_free_ports(ports)


@pytest.mark.parametrize("host", ["192.0.2.1", "nosuch.invalid", "::1"])
def test_a_host_that_cannot_be_listened_on_is_no_ports_fault(host: str) -> None:
    with pytest.raises(ConfigError, match=f"^host: {host} cannot be used"):
        require_free_ports(find_free_ports(), host)


def test_free_ports_differ() -> None:
    assert len(set(dataclasses.astuple(find_free_ports()))) == 3
    assert Ports() == Ports(http=8000, grpc=8001, metrics=8002)


def test_backend_directory_and_environment(tmp_path: Path) -> None:
    found = installation.find_installation()
    target = found.make_backend_directory(tmp_path / "backends")
    assert {path.name for path in (target / "python").iterdir()} == {
        "libtriton_python.so", "triton_python_backend_stub", "triton_python_backend_utils.py",
    }  # fmt: skip
    environment = found.environment({"PATH": "/x", "LD_LIBRARY_PATH": "/y", "A": "b"})
    assert environment["PATH"] == f"{sys.prefix}/bin:/x"
    assert environment["LD_LIBRARY_PATH"].endswith(":/y")
    libpython = installation.find_libpython()
    assert libpython is not None
    assert str(libpython.parent) in environment["LD_LIBRARY_PATH"].split(":")
    assert environment["A"] == "b"


def test_only_files_of_the_own_prefix_are_removed() -> None:
    mine, other = Path("/dev/shm/tokenflow_test_a_1"), Path("/dev/shm/tokenflow_test_b_1")
    mine.touch()
    other.touch()
    try:
        assert remove_shared_memory("tokenflow_test_a_") == [mine]
        assert other.exists()
    finally:
        other.unlink()


class FakeMetric:
    def __init__(self, labels: dict[str, str], buckets: list[float] | None = None) -> None:
        self.labels, self.value = labels, 0.0
        self.observed: list[float] = []
        self.thread = threading.get_ident()

    def _touch(self) -> None:
        assert threading.get_ident() == self.thread

    def set(self, value: float) -> None:
        self._touch()
        self.value = value

    def increment(self, value: float) -> None:
        self._touch()
        assert value > 0
        self.value += value

    def observe(self, value: float) -> None:
        self._touch()
        self.observed.append(value)


class FakeFamily:
    made: ClassVar[dict[str, list[FakeMetric]]]

    def __init__(self, name: str, description: str, kind: Any) -> None:
        self.metrics = type(self).made.setdefault(name, [])

    def Metric(self, **kwargs: Any) -> FakeMetric:
        self.metrics.append(FakeMetric(**kwargs))
        return self.metrics[-1]


class FakeSource:
    def __init__(self) -> None:
        self.numbers = RuntimeGauges(num_total_blocks=10, num_free_blocks=10)
        self.ttft_s: list[float] = []

    def gauges(self) -> RuntimeGauges:
        return self.numbers

    def drain_ttft_s(self) -> list[float]:
        values, self.ttft_s = self.ttft_s, []
        return values


def test_metrics_follow_the_runtime() -> None:
    class Family(FakeFamily):
        made: ClassVar[dict[str, list[FakeMetric]]] = {}

    source = FakeSource()
    kinds = MetricKinds(family=Family, gauge="g", counter="c", histogram="h")
    exporter = MetricsExporter(kinds, source, {"model": "m", "version": "1"})
    assert not Family.made  # nothing is touched before the owning thread's first update

    def value(name: str, **labels: str) -> float:
        (metric,) = (
            m for m in Family.made[name] if m.labels == {"model": "m", "version": "1", **labels}
        )
        return metric.value

    exporter.update()
    source.numbers = RuntimeGauges(
        num_waiting=1, num_running=2, num_paused=3, num_held=2, num_total_blocks=10,
        num_free_blocks=4, healthy=False,
        counters=Counters(
            num_ok=5, num_failed=4, num_cancelled=3, num_timed_out=2, num_pauses=6,
            num_forced_pauses=1, num_resumes_from_cache=5, num_resumes_recomputed=2,
            num_lease_ends=7, num_engine_losses=1, num_recovered=3,
        ),
    )  # fmt: skip
    source.ttft_s = [0.2, 0.4]
    exporter.update()
    exporter.update()
    active = {m.labels["state"]: m.value for m in Family.made["tokenflow_active_requests"]}
    assert active == {"waiting": 1, "running": 2, "paused": 3}
    assert value("tokenflow_held_requests") == 2
    assert value("tokenflow_kv_blocks", state="used") == 6
    ended = {m.labels["outcome"]: m.value for m in Family.made["tokenflow_requests_total"]}
    assert ended == {"ok": 5, "failed": 4, "cancelled": 3, "timeout": 2}
    assert value("tokenflow_pauses_total", kind="planned") == 5
    assert value("tokenflow_pauses_total", kind="forced") == 1
    assert value("tokenflow_resumes_total", **{"from": "cache"}) == 5
    assert value("tokenflow_resumes_total", **{"from": "recompute"}) == 2
    assert value("tokenflow_lease_ends_total") == 7
    assert value("tokenflow_engine_losses_total") == 1
    assert value("tokenflow_recovered_requests_total") == 3
    assert value("tokenflow_healthy") == 0
    assert Family.made["tokenflow_ttft_seconds"][0].observed == [0.2, 0.4]


def test_watchdog_leaves_when_the_server_is_gone() -> None:
    parents = iter([10, 10, 1])
    lost, exits = [], []
    done = threading.Event()

    def exit(code: int) -> None:
        exits.append(code)
        done.set()

    watchdog = ServerWatchdog(
        lambda: lost.append(1), get_parent=lambda: next(parents), exit=exit, check_period_s=0.01
    )
    watchdog.start()
    assert done.wait(30)
    watchdog.stop()
    assert (lost, exits) == ([1], [1])


def test_watchdog_does_not_wait_for_a_cleanup_that_hangs() -> None:
    parents = iter([10, 1])
    hang, done = threading.Event(), threading.Event()
    watchdog = ServerWatchdog(
        lambda: hang.wait(600) and None, get_parent=lambda: next(parents),
        exit=lambda code: done.set(), check_period_s=0.01, cleanup_limit_s=0.05,
    )  # fmt: skip
    watchdog.start()
    assert done.wait(30)
    hang.set()
    watchdog.stop()


def test_watchdog_stops_when_told() -> None:
    watchdog = ServerWatchdog(lambda: None, exit=lambda code: None, check_period_s=0.01)
    watchdog.start()
    watchdog.stop()
    assert "tokenflow-watchdog" not in {thread.name for thread in threading.enumerate()}

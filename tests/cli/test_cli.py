"""The command line: help, flags made from the configuration, exit codes, what it prints."""

from __future__ import annotations

import argparse
import json
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tokenflow.cli import doctor, flags, main, serve
from tokenflow.config import ServingConfig, format_parameters
from tokenflow.errors import ConfigError
from tokenflow.progress import StageBar

ROOT = Path(__file__).resolve().parents[2]


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    flags.add_config_flags(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    "command", ["", "doctor", "model", "model fetch", "serve", "demo", "burst-pa"]
)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main.main([*command.split(), "--help"])
    assert stopped.value.code == 0
    assert "usage: tokenflow" in capsys.readouterr().out


def test_help_imports_neither_extras_nor_what_the_commands_run() -> None:
    code = (
        "import sys; from tokenflow.cli.main import build_parser; build_parser();"
        "print([m for m in ('torch', 'transformers', 'matplotlib', 'tritonclient', 'grpc',"
        " 'perf', 'build_engines', 'triton_backend') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


def test_flags_cover_every_parameter_and_nothing_else() -> None:
    values = format_parameters(ServingConfig(max_batch_size=3, scheduling_policy="fcfs-reserve"))
    given = [
        part for name, value in values.items() for part in (flags.flag_name(name), value) if value
    ]
    filled = [part for part in given if part]
    pairs = [f"{flags.flag_name(name)}={value}" for name, value in values.items() if value]
    assert len(filled) == 2 * len(pairs)
    assert flags.config_from_flags(parse(*pairs)) == ServingConfig(
        max_batch_size=3, scheduling_policy="fcfs-reserve"
    )
    assert flags.config_from_flags(parse()) == ServingConfig()


def test_a_flag_wins_over_what_the_command_fills_in() -> None:
    arguments = parse("--gpt-model-path", "/mine")
    assert flags.config_from_flags(arguments, gpt_model_path="/default").gpt_model_path == "/mine"
    assert flags.config_from_flags(parse(), gpt_model_path="/default").gpt_model_path == "/default"


def test_a_bad_value_names_its_parameter() -> None:
    with pytest.raises(ConfigError, match="max_batch_size: must be a whole number, got 'many'"):
        flags.config_from_flags(parse("--max-batch-size", "many"))


def test_a_configuration_error_is_one_line_and_exit_code_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.main(["serve", "--plan-interval-s", "-1"]) == 1
    error = capsys.readouterr().err
    assert error == "tokenflow: error: plan_interval_s: must be in [0.001, 10], got -1.0\n"


def test_a_taken_port_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main.main(["serve", "--engine", "scripted", "--http-port", str(port)]) == 1
    assert f"http_port: {port} cannot be used" in capsys.readouterr().err


def test_a_wrong_command_line_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["serve", "--engine", "warp"], ["nonsense"], ["demo", "--runs", "0"], []):
        with pytest.raises(SystemExit) as stopped:
            main.main(wrong)
        assert stopped.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_missing_model_says_what_to_run(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["demo", "--model", str(tmp_path)]) == 1
    assert "run: tokenflow model fetch" in capsys.readouterr().err


def test_a_wrong_setting_of_the_demo_is_refused(
    tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["demo", "--model", str(tmp_path), "--set", "max_batch_size"]) == 1
    assert "--set wants NAME=VALUE" in capsys.readouterr().err


def test_the_command_to_try_is_a_valid_request() -> None:
    text = serve.what_to_try("127.0.0.1:8000", "127.0.0.1:8001", "127.0.0.1:8002")
    line = next(line for line in text.splitlines() if line.strip().startswith("curl"))
    words = shlex.split(line)
    assert words[2] == "http://127.0.0.1:8000/v2/models/ensemble/generate_stream"
    body = json.loads(words[words.index("-d") + 1])
    assert body["stream"] is True
    assert body["max_tokens"] > 0
    assert "127.0.0.1:8001" in text


def test_serve_waits_for_as_long_as_an_engine_may_load() -> None:
    for limit_s in (ServingConfig().engine_load_timeout_s, 86_400.0):
        assert serve.ready_limit_s(ServingConfig(engine_load_timeout_s=limit_s)) > limit_s


def test_doctor_counts_only_problems(capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.run(argparse.Namespace())
    out = capsys.readouterr().out
    assert code == (1 if "[problem]" in out else 0)
    assert ("[ok]" in out) == (code == 0)


def test_a_bar_per_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with StageBar("model") as bar:
        for stage, fraction in (
            ("downloading", 0.0),
            ("downloading", 1.0),
            ("converting", 0.5),
            ("done", 1.0),
        ):
            bar(stage, fraction)
    error = capsys.readouterr().err
    assert "model: downloading" in error
    assert "100%" in error
    assert " 50%" in error
    assert "done" not in error

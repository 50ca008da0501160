"""`tokenflow size`: what it prints, and one clear error for each thing that cannot be."""

from __future__ import annotations

import json

import pytest

from tokenflow.cli import main

QUICK = (
    *("size", "--gpu", "4090", "--model", "llama3-8b", "--rate", "6"),
    *("--prompt-tokens", "64", "--output-tokens", "24", "--max-batch-size", "2"),
    *("--seeds", "1", "--policies", "tokenflow,fcfs-reserve"),
)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main.main([*QUICK, *arguments]) == 0
    return capsys.readouterr().out


def test_same_arguments_same_json(capsys: pytest.CaptureFixture[str]) -> None:
    first = run(capsys, "--requests", "10", "--json")
    assert first == run(capsys, "--requests", "10", "--json")
    record = json.loads(first)
    assert [one["policy"] for one in record["answers"]] == ["tokenflow", "fcfs-reserve"]
    assert all(one["load"] < one["failed_load"] for one in record["answers"])
    assert record["question"]["gpu"] == "4090"


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (("poisson",), "arrivals/s kept"),
        (("gamma", "--cv", "1.5"), "arrivals/s kept"),
        (("onoff", "--off-s", "2", "--on-s", "1", "--peak", "3"), "arrivals/s kept"),
        (("burst",), "requests at once kept"),
    ],
)
def test_every_kind_of_arrivals(
    capsys: pytest.CaptureFixture[str], kind: tuple[str, ...], line: str
) -> None:
    out = run(capsys, "--arrivals", *kind, *(() if kind == ("burst",) else ("--requests", "10")))
    assert line in out
    assert f"Arrivals: {kind[0]}" in out
    assert "Simulated: " in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--gpu h100", "--gpu: must be one of h200, 4090, a6000, got 'h100'"),
        ("--model gpt", "--model: must be one of llama3-8b, "),
        ("--arrivals never", "--arrivals: must be one of poisson, gamma, burst, onoff"),
        ("--policies best", "--policies: no such policy: 'best' (there are fcfs-reserve, "),
        ("--policies ,", "--policies: needs a name"),
        ("--policies disaggregated", "--policies: disaggregated needs 2 machines"),
        ("--seeds 3-1", "--seeds: must be like 1, 1,2,5 or 1-3, got '3-1'"),
        ("--seeds x", "--seeds: must be like"),
        ("--rate 0", "--rate: must be in [0.01, 10000], got 0"),
        ("--rate nan", "--rate: must be in"),
        ("--rate 900", "--rate: 900 tokens/s are more than one stream alone gets"),
        ("--tp 3", "--tp: llama3-8b cannot be split over 3 GPUs; --tp 4 does"),
        ("--model qwen2.5-32b", "do not fit on 1 4090 at --memory-fraction 0.9; --tp 4 does"),
        ("--memory-fraction 0.5", "do not fit on 1 4090 at --memory-fraction 0.5; --tp 2 does"),
        ("--memory-fraction 0.01", "no number of GPUs up to 64 does"),
        ("--output-tokens 30000", "a sequence of 60,128 tokens (twice the mean) do not fit"),
        ("--host-gb -1", "--host-gb: must be in"),
        ("--ttft-target 0.005", "--ttft-target: 0.005 s are less than the prefill of one prompt"),
        ("--max-stalled 2", "--max-stalled: must be in [0, 1], got 2"),
        ("--requests 2", "--requests: must be in"),
        ("--cv 2", "--cv: not with --arrivals poisson"),
        ("--arrivals burst --requests 50", "--requests: not with --arrivals burst"),
        ("--arrivals onoff --peak 4", "--peak: must be in [1, 3], got 4"),
    ],
)
def test_what_cannot_be_is_one_line_that_names_the_flag(
    capsys: pytest.CaptureFixture[str], arguments: str, words: str
) -> None:
    assert main.main([*QUICK, *arguments.split()]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("tokenflow: error: --")
    assert words in error
    assert error.count("\n") == 1


def test_a_wrong_command_line_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["size"], [*QUICK, "--tp", "x"], [*QUICK, "--nonsense"]):
        with pytest.raises(SystemExit) as stopped:
            main.main(wrong)
        assert stopped.value.code == 2
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main.main(["size", "--help"])
    assert stopped.value.code == 0
    assert "in virtual time" in capsys.readouterr().out

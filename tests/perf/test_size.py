"""`tokenflow size`: what its engine cannot be is said in terms of the command's flags."""

from __future__ import annotations

import pytest

from tokenflow.cli import main

MACHINE = ("size", "--gpu", "4090", "--model", "llama3-8b", "--rate", "6")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--host-gb 20000", "--host-gb: must be in [0, 16000], got 20000"),
        ("--max-num-tokens 16", "--max-num-tokens: must be in [256, "),
        (
            "--gpu h200 --model smollm2-135m --prompt-tokens 300000 --ttft-target 600 "
            "--policies fcfs-reserve,fcfs-reserve-unchunked",
            "--policies: fcfs-reserve-unchunked cannot run here: max_num_tokens: must be in",
        ),
        ("--max-batch-size 4096", "--max-num-tokens: must be in [4096, "),
    ],
)
def test_limits_that_do_not_go_together_name_the_flag(
    capsys: pytest.CaptureFixture[str], arguments: str, words: str
) -> None:
    assert main.main([*MACHINE, *arguments.split()]) == 1
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert words in error

"""The fit of the embedded engine, its measurement, and virtual time beside real time."""

import json
import random

import pytest

from perf.client import ClientRecord
from perf.cost_model import cells, embedded_table
from perf.lab.embedded import Step, embedded_engine, fit, from_json
from perf.lab.measure_embedded import BATCH_SIZES, CONTEXTS, PREFILLS, StepBench, measure
from perf.virtual_real import beside, format_result, main, path_s, real_full_step_s
from tokenflow.config import ServingConfig
from tokenflow.inflight.runner import SequenceChunk
from tokenflow.inflight.virtual_runner import VirtualRunner

TRUE = (0.045, 0.0013, 2.6e-6, 2600.0)


def seconds(num_gen, num_context, num_prefill):
    base, sequence, token, rate = TRUE
    return base + sequence * num_gen + token * num_context + num_prefill / rate


def grid(noise=0.0, seed=1):
    rng = random.Random(seed)
    work = [(n, n * c, 0) for n in (1, 2, 4, 8) for c in (64, 256, 640) for _ in range(6)]
    work += [(n, 128 * n, p) for n in (0, 4) for p in (32, 64, 128, 256) for _ in range(3)]
    return [Step(*one, seconds(*one) * (1 + rng.uniform(-noise, noise))) for one in work]


def check(costs, rel):
    base, sequence, token, rate = TRUE
    assert costs.step_base_s == pytest.approx(base, rel=rel)
    assert costs.step_per_sequence_s == pytest.approx(sequence, rel=3 * rel)
    assert costs.step_per_context_token_s == pytest.approx(token, rel=3 * rel)
    assert costs.prefill_tokens_per_s == pytest.approx(rate, rel=rel)


def test_a_linear_engine_is_found_again():
    check(fit(grid()), 1e-6)
    noisy = fit(grid(noise=0.03))
    check(noisy, 0.06)
    assert all(0.9 < factor < 1.1 for factor in noisy.factors)


def test_hiccups_do_not_move_the_fit_and_stay_in_the_jitter():
    steps = grid(noise=0.02)
    steps[::11] = [step._replace(seconds=3 * step.seconds) for step in steps[::11]]
    costs = fit(steps)
    check(costs, 0.08)
    assert max(costs.factors) == pytest.approx(3, rel=0.1)


def test_coefficients_never_become_negative():
    steps = [
        step._replace(seconds=0.05 + step.num_prefill_tokens / 2000 - 1e-6 * step.num_gen)
        for step in grid()
    ]
    costs = fit(steps)
    assert costs.step_per_sequence_s >= 0
    assert costs.step_per_context_token_s >= 0
    assert costs.step_base_s == pytest.approx(0.05, rel=0.01)


def test_steps_that_say_nothing_are_refused():
    with pytest.raises(ValueError, match="differ"):
        fit([Step(1, 100, 0, 0.05)] * 20)
    with pytest.raises(ValueError, match="duration"):
        fit([*grid(), Step(1, 1, 1, 0.0)])


def test_costs_survive_a_file_and_make_an_engine():
    costs = fit(grid(noise=0.02))
    again = from_json(json.loads(json.dumps(costs.as_json())))
    assert again.step_base_s == costs.step_base_s
    config = ServingConfig(batch_scheduler_policy="guaranteed_no_evict")
    exact = embedded_engine(costs, config)
    chunks = [
        SequenceChunk(1, (0,), 299, [0], True, 0),
        SequenceChunk(2, (0,) * 50, 0, [0], True, 0),
    ]
    assert exact.step_s(chunks, 0) == pytest.approx(seconds(1, 300, 50), rel=0.02)
    jitter = embedded_engine(costs, config, seed=1, level=2.0)
    assert jitter.step_factors == embedded_engine(costs, config, seed=1, level=2.0).step_factors
    assert jitter.step_factors != embedded_engine(costs, config, seed=2, level=2.0).step_factors
    assert set(jitter.step_factors) <= {2.0 * factor for factor in costs.factors}
    with pytest.raises(ValueError, match="auto"):
        embedded_engine(costs, ServingConfig())


def test_the_engine_is_that_of_the_configuration():
    named = {"batch_scheduler_policy": "guaranteed_no_evict"}
    changed = {"plan_interval_s": 0.5, "learn_output_lengths": False, "max_queue_size": 3}
    changed |= {"lease_tokens": 64, "max_batch_size": 5, "scheduling_policy": "fcfs-reserve"}
    changed |= {"max_num_tokens": 96, "max_seq_len": 512, "tokens_per_block": 16}
    costs, config = fit(grid()), ServingConfig(**named, **changed)
    played = embedded_engine(costs, config).config()
    assert {name: getattr(played, name) for name in changed} == changed
    with pytest.raises(ValueError, match="kv_cache_host_memory_bytes"):
        embedded_engine(costs, ServingConfig(**named, kv_cache_host_memory_bytes=1 << 30))


def test_the_grid_is_measured_whole_and_costs_what_it_says():
    """The bench on a runner without a model: every kind of step occurs, with what it read."""
    bench = StepBench(VirtualRunner(lambda chunks, step: 0.0))
    steps = measure(bench, 0.0)
    assert {step.num_gen for step in steps} == {0, 4, *BATCH_SIZES}
    assert {step.num_prefill_tokens for step in steps} == {0, *PREFILLS}
    decode = [step for step in steps if step.num_prefill_tokens == 0]
    for context in CONTEXTS:
        near = [s for s in decode if context < s.num_context_tokens / s.num_gen < context + 60]
        assert {step.num_gen for step in near} == set(BATCH_SIZES)
    assert all(step.seconds > 0 for step in steps)
    alone = [s for s in steps if s.num_gen == 0]
    assert [s.num_prefill_tokens for s in alone] == list(PREFILLS)


def test_the_table_has_a_line_for_each_kind_of_step():
    steps = grid()
    costs = fit(steps)
    result = {**costs.as_json(), "num_steps": len(steps), "cells": cells(steps, costs)}
    assert sum(cell["num_steps"] for cell in result["cells"]) == len(steps)
    assert len(embedded_table(result).splitlines()) == 3 + len(result["cells"])


def real_runs():
    """What a demo's result file holds, of a made-up machine."""
    requests = [
        {
            "request_id": f"{kind}-{i:02d}",
            "num_prompt_tokens": 40,
            "max_tokens": length,
            "read_rate": 4.0,
            "send_offset_s": start + 0.1 * i,
        }
        for kind, count, length, start in (("reader", 4, 60, 0.0), ("newcomer", 4, 12, 1.5))
        for i in range(count)
    ]
    runs = [
        {
            "policy": policy,
            "load": 0.5 + 0.01 * i,
            "ttft_p50_s": 1.0 + 0.1 * i,
            "ttft_p99_s": 1.5 + 0.1 * i,
            "raw_throughput": 50.0 + i,
        }
        for policy in ("fcfs", "tokenflow")
        for i in range(3)
    ]
    settings = {
        "max_batch_size": "4",
        "tokens_per_block": "32",
        "max_tokens_in_paged_kv_cache": "1024",
        "batch_scheduler_policy": "guaranteed_no_evict",
    }
    return {"runs": runs, "settings": settings, "workload": {"requests": requests}}


def test_virtual_runs_lie_beside_real_ones():
    real, costs = real_runs(), fit(grid(noise=0.02))
    assert real_full_step_s(real, 4) == pytest.approx(4 * 0.51 / 32)
    result = beside(real, costs, 2)
    assert result == beside(real, costs, 2)
    for mode in ("alone", "beside"):
        assert len(result[mode]) == 6
        for row in result[mode]:
            value, low, high = row["virtual"]
            assert low <= value <= high
            assert (row["num_real"], row["num_virtual"]) == (3, 2)
    # slower steps, fewer tokens a second: the level is applied
    assert result["level"] > 1.05
    alone, beside_it = (
        next(row["virtual"][0] for row in result[mode] if row["measure"] == "raw_throughput")
        for mode in ("alone", "beside")
    )
    assert beside_it < alone
    text = format_result(result)
    assert "alone: steps × 1.000" in text
    assert "overlap" in text


def test_the_path_of_the_real_runs_is_added_to_first_tokens():
    events = [
        {"event": "iteration", "time": 0.0},
        {"event": "arrival", "request_id": "a", "time": 10.02},
        {"event": "first_token", "request_id": "a", "time": 10.50},
        {"event": "pause", "request_id": "a", "time": 10.60},
    ]
    client = ClientRecord(
        request_id="a",
        kind="newcomer",
        read_rate=4.0,
        max_tokens=2,
        num_prompt_tokens=8,
        send_time=10.0,
    )
    client.token_times += [10.53, 10.70]
    assert path_s(events, [client]) == pytest.approx([0.05])
    real, costs = real_runs(), fit(grid())
    without, added = (beside({**real, "path_s": path}, costs, 1) for path in (0.0, 0.05))
    for before, after in zip(without["alone"], added["alone"], strict=True):
        shift = 0.0 if before["measure"] == "raw_throughput" else 0.05
        assert after["virtual"][0] == pytest.approx(before["virtual"][0] + shift)


def test_overlap_is_that_of_the_intervals():
    real, costs = real_runs(), fit(grid())
    for row in beside(real, costs, 2)["alone"]:
        (_, low, high), (_, real_low, real_high) = row["virtual"], row["real"]
        assert row["overlap"] == (max(low, real_low) <= min(high, real_high))


def test_the_command_reads_and_writes_files(tmp_path, capsys):
    (tmp_path / "demo.json").write_text(json.dumps(real_runs()))
    (tmp_path / "costs.json").write_text(json.dumps(fit(grid(noise=0.01)).as_json()))
    files = ["--real", tmp_path / "demo.json", "--costs", tmp_path / "costs.json"]
    arguments = [*map(str, files), "--output", str(tmp_path / "out.json"), "--virtual-runs", "1"]
    assert main(arguments) == 0
    assert "written" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["full_step_s"]["real"] > 0
    with pytest.raises(SystemExit):
        main(["--costs", str(tmp_path / "missing.json")])


@pytest.mark.parametrize("flag", ["--real", "--costs"])
def test_a_file_of_another_kind_is_one_clear_error(tmp_path, capsys, flag):
    files = {"--real": tmp_path / "demo.json", "--costs": tmp_path / "costs.json"}
    files["--real"].write_text(json.dumps(real_runs()))
    files["--costs"].write_text(json.dumps(fit(grid()).as_json()))
    arguments = [str(part) for pair in files.items() for part in pair]
    for content in ("", "[]", "{}"):
        files[flag].write_text(content)
        with pytest.raises(SystemExit) as error:
            main([*arguments, "--output", str(tmp_path / "out.json")])
        assert error.value.code == 2
        assert f"{files[flag]} holds something else" in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(SystemExit):
        main([*arguments, "--virtual-runs", "0"])
    assert "must be > 0" in capsys.readouterr().err

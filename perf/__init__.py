"""Everything that is measured, each by a command of this folder (`python -m perf.NAME`).

Bursts on a real server: `demo` and `burst_pa`, with `workloads`, `client`, `harness`, `analysis`,
`comparison`. Kills and long runs on one: `soak`, `kills`, `slow_readers`, with `long_runs/`. The
product in virtual time: `lease`, with `virtual/`, which tests of the scheduler use too. Costs of
single parts: `plan_cost`, `channel`, `engine_step`. The two tiers of KV: `kv_tiers`, with `kv/`.
`report` writes the tables of the documents from `results/`.
"""

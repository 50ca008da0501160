"""The parts of `perf.soak`, `perf.kills` and `perf.slow_readers`.

`known_*` make questions whose answers are known, `heard` and `streams` are clients that check what
they get, `soak_load` and `kill_*` are what happens meanwhile, `server_processes` is what it costs.
"""

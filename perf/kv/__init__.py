"""The parts of `python -m perf.kv_tiers`: models, the stepped engine, and its five sections."""

"""The laboratory: what runs in virtual time are made of, and what comes of them.

Hardware, models and their costs from first principles, workloads, policies under test, measures and
their intervals. The product itself in virtual time is perf/virtual; commands lie in perf/.
"""

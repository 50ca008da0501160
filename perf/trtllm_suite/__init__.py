"""What `perf/verify_trtllm.sh` and `make test-trtllm` check on TensorRT-LLM: the adapter on a GPU.

    values.py        settings, results of sections, deadlines
    environment.py   what is reported of the machine: card, driver, versions, engine
    shape.py         how long prompts and outputs are for a built engine, and what prompts say
    streams.py       requests on an engine, with a mirror of its KV cache
    engines.py       engines, each in a process of its own, loaded once and shared by sections
    compare.py       two outputs of one request: where they part, and whether that may be
    resume.py        sections: exactness, reuse, cancel latency, leases
    tiers.py         sections: host tier, KV events
    burst.py         section: a burst under three policies, through the whole runtime
    sections.py      the sections by name, and their running
    report.py        the one file that comes out, written and read
    command.py       the program: `python -m perf.trtllm_suite ENGINE`

The engine runs in a process of its own, as in the server, so an engine that dies or hangs costs a
section and not the report. Sections only use the executor's surface and the runtime: nothing here
knows which TensorRT-LLM is below.
"""

"""A strict double of `tensorrt_llm.bindings.executor`, for machines without TensorRT-LLM.

Its classes are made from `trtllm_api.json`, which records what the bindings of TensorRT-LLM 1.2.x
declare, and refuse what the real ones refuse. Behind `Executor` stands the in-flight core of the
embedded engine. It is no model of TensorRT-LLM's speed or memory, and proves nothing about a GPU.

    schema.py      the JSON, as Python values
    checks.py      which Python values an argument takes
    objects.py     the classes and enums
    methods.py     what their methods do
    convert.py     values of the double <-> values of the in-flight core
    lora.py        adapters: which are there, and whose KV is whose
    folder.py      the engine folder: how it is written and read
    parallel.py    leader, orchestrator, ranks
    executor.py    Executor
    events.py      KVCacheEventManager
    bindings.py    all of it put together as a module: `make_module`
    site/          goes on PYTHONPATH to make `tensorrt_llm.bindings.executor` importable

`python -m tests.trtllm_double -- command …` runs a command with it importable.
"""

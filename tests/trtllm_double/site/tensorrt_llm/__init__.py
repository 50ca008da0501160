"""Not TensorRT-LLM: a double of its Executor bindings (tests/trtllm_double)."""

__version__ = "1.2.1+double"

"""A Triton model on TensorRT-LLM's Executor, the way models on it are ordinarily written.

It shares nothing with TokenFlow: no scheduler, no pauses, its own threads and bookkeeping. It is
here to show that the double of the bindings serves users of that interface other than our adapter.

Rows of a batch become requests of the executor. A lock covers enqueueing and the bookkeeping, so
that the awaiter never meets an id that is not known yet. Threads: one that waits for responses and
sends them, one that looks for clients that left, one that reads statistics.
"""

import json
import threading
import time
from datetime import timedelta

import numpy as np
import tensorrt_llm.bindings.executor as trtllm
import triton_python_backend_utils as pb_utils


class Parameters:
    """The model's parameters; None for one that is empty or was never filled in."""

    def __init__(self, config):
        self._texts = {
            name: entry["string_value"] for name, entry in config.get("parameters", {}).items()
        }

    def get(self, name, kind=str):
        text = self._texts.get(name, "")
        if not text or text.startswith("${"):
            return None
        return text.lower() == "true" if kind is bool else kind(text)


def known(**values):
    """Without those that are None: the bindings refuse None where a default would do."""
    return {name: value for name, value in values.items() if value is not None}


def make_executor(parameters):
    policies = {
        "max_utilization": trtllm.CapacitySchedulerPolicy.MAX_UTILIZATION,
        "guaranteed_no_evict": trtllm.CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
    }
    kv_cache = trtllm.KvCacheConfig(
        **known(
            enable_block_reuse=parameters.get("enable_kv_cache_reuse", bool),
            max_tokens=parameters.get("max_tokens_in_paged_kv_cache", int),
            free_gpu_memory_fraction=parameters.get("kv_cache_free_gpu_mem_fraction", float),
        )
    )
    config = trtllm.ExecutorConfig(
        scheduler_config=trtllm.SchedulerConfig(
            policies[parameters.get("batch_scheduler_policy") or "guaranteed_no_evict"]
        ),
        kv_cache_config=kv_cache,
        batching_type=trtllm.BatchingType.INFLIGHT,
        **known(
            enable_chunked_context=parameters.get("enable_chunked_context", bool),
            max_queue_size=parameters.get("max_queue_size", int),
        ),
    )
    folder = parameters.get("gpt_model_path")
    return trtllm.Executor(folder, trtllm.ModelType.DECODER_ONLY, config)


def read_input(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()


def read_value(request, name, row, kind):
    """One value of a row, or None where the client left the input out."""
    values = read_input(request, name)
    return None if values is None else kind(values.reshape(len(values), -1)[row, 0])


def read_words(request, name, row):
    """Words of a row: flat tokens, and where each word ends; -1 behind the last one."""
    values = read_input(request, name)
    if values is None:
        return None
    tokens, ends = values[row]
    words, start = [], 0
    for end in ends:
        if end > start:
            words.append([int(token) for token in tokens[start:end]])
            start = end
    return words


def make_request(request, row):
    ids = read_input(request, "input_ids")[row]
    length = read_value(request, "input_lengths", row, int)
    return trtllm.Request(
        input_token_ids=[int(token) for token in ids[:length]],
        max_tokens=read_value(request, "request_output_len", row, int),
        streaming=bool(read_value(request, "streaming", 0, bool)),
        sampling_config=trtllm.SamplingConfig(
            **known(
                top_k=read_value(request, "runtime_top_k", row, int),
                temperature=read_value(request, "temperature", row, float),
                seed=read_value(request, "seed", row, int),
            )
        ),
        output_config=trtllm.OutputConfig(
            exclude_input_from_output=True,
            **known(
                return_log_probs=read_value(request, "return_log_probs", row, bool),
                return_perf_metrics=read_value(request, "return_perf_metrics", row, bool),
            ),
        ),
        **known(
            end_id=read_value(request, "end_id", row, int),
            stop_words=read_words(request, "stop_words_list", row),
        ),
    )


def make_response(result, row):
    tokens = result.output_token_ids[0]
    tensors = [
        pb_utils.Tensor("output_ids", np.array([[tokens]], dtype=np.int32)),
        pb_utils.Tensor("sequence_length", np.array([[len(tokens)]], dtype=np.int32)),
        pb_utils.Tensor("batch_index", np.array([[row]], dtype=np.int32)),
        pb_utils.Tensor("sequence_index", np.array([[result.sequence_index]], dtype=np.int32)),
    ]
    if result.log_probs is not None:
        log_probs = np.array([result.log_probs], dtype=np.float32)
        tensors.append(pb_utils.Tensor("output_log_probs", log_probs))
    metrics = result.request_perf_metrics
    if metrics is not None:
        num_reused = np.array([[metrics.kv_cache_metrics.num_reused_blocks]], dtype=np.int32)
        tensors.append(pb_utils.Tensor("kv_cache_reused_blocks", num_reused))
    return pb_utils.InferenceResponse(tensors)


class Work:
    """A Triton request under way. rows: its requests in the executor, id -> row.

    Servers before 26.04 crash when a sender is asked about its client while, or after, the final
    response goes out: `lock` keeps both apart.
    """

    def __init__(self, request, rows):
        self.sender = request.get_response_sender()
        self.name = request.request_id()
        self.rows = rows
        self.is_cancelled = False
        self.is_ended = False
        self.lock = threading.Lock()

    def send(self, response, is_last):
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0
        with self.lock:
            self.is_ended = is_last
            self.sender.send(response, flags=flags)

    def has_left(self):
        """Its client left, which is told once."""
        with self.lock:
            if not self.is_ended and not self.is_cancelled and self.sender.is_cancelled():
                self.is_cancelled = True
                return True
        return False


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = Parameters(config)
        self.executor = make_executor(parameters)
        self.lock = threading.Lock()
        self.work_of_id = {}
        self.is_running = True
        self.family = pb_utils.MetricFamily(
            name="standin_engine",
            description="What the engine's last iteration said",
            kind=pb_utils.MetricFamily.GAUGE,
        )
        names = ("num_active_requests", "num_completed_requests", "used_num_blocks")
        # The family must outlive its gauges.
        self.gauges = {name: self.family.Metric(labels={"of": name}) for name in names}
        self.gauges["iterations"] = self.family.Metric(labels={"of": "iterations"})
        self.num_iterations = 0
        period_s = (parameters.get("cancellation_check_period_ms", int) or 100) / 1000
        stats_s = (parameters.get("stats_check_period_ms", int) or 100) / 1000
        self.threads = [
            threading.Thread(target=self.await_loop),
            threading.Thread(target=self.repeat, args=(self.cancel_those_who_left, period_s)),
            threading.Thread(target=self.repeat, args=(self.read_stats, stats_s)),
        ]
        for thread in self.threads:
            thread.start()

    def execute(self, requests):
        for request in requests:
            try:
                if read_value(request, "stop", 0, bool):
                    self.stop(request)
                else:
                    self.start(request)
            except Exception as error:  # whatever is wrong with a request is its client's to know
                self.refuse(request.get_response_sender(), str(error))

    def start(self, request):
        num_rows = len(read_input(request, "input_ids"))
        made = [make_request(request, row) for row in range(num_rows)]
        with self.lock:
            ids = self.executor.enqueue_requests(made)
            work = Work(request, {id: row for row, id in enumerate(ids)})
            self.work_of_id.update(dict.fromkeys(ids, work))

    def stop(self, request):
        name = request.request_id()
        if not name:
            raise ValueError("a stop request needs the id of the request that it stops")
        with self.lock:
            ids = [id for id, work in self.work_of_id.items() if work.name == name]
        for id in ids:
            self.executor.cancel_request(id)
        request.get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def refuse(self, sender, message):
        sender.send(
            pb_utils.InferenceResponse(error=pb_utils.TritonError(message)),
            flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        )

    def await_loop(self):
        while self.is_running:
            for response in self.executor.await_responses(timeout=timedelta(milliseconds=1)):
                self.answer(response)

    def answer(self, response):
        id = response.request_id
        with self.lock:
            work = self.work_of_id[id]
            is_end = response.has_error() or response.result.is_final
            row = work.rows[id]
            if is_end:
                del self.work_of_id[id], work.rows[id]
        is_last = is_end and not work.rows
        if response.has_error():
            error = pb_utils.TritonError(response.error_msg)
            work.send(pb_utils.InferenceResponse(error=error), is_last)
        else:
            work.send(make_response(response.result, row), is_last)

    def repeat(self, action, period_s):
        while self.is_running:
            action()
            time.sleep(period_s)

    def cancel_those_who_left(self):
        with self.lock:
            under_way = set(self.work_of_id.values())
        for work in under_way:
            if work.has_left():
                with self.lock:
                    ids = list(work.rows)
                for id in ids:
                    self.executor.cancel_request(id)

    def read_stats(self):
        for entry in self.executor.get_latest_iteration_stats():
            self.num_iterations += 1
            self.gauges["iterations"].set(self.num_iterations)
            self.gauges["num_active_requests"].set(entry.num_active_requests)
            self.gauges["num_completed_requests"].set(entry.num_completed_requests)
            self.gauges["used_num_blocks"].set(entry.kv_cache_stats.used_num_blocks)

    def finalize(self):
        self.is_running = False
        for thread in self.threads:
            thread.join()
        self.executor.shutdown()

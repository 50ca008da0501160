"""CUDA behind the seam of `torch_streams.py`: streams, events and pinned host memory.

Owns the calls into torch.cuda that copies between the tiers need, and the pinning of the host pool.

A block is one run of bytes in both pools, so a copy is one asynchronous memory copy by the GPU's
copy engines: no kernel competes with the step's, and no staging memory is needed. For that the host
pool must be pinned; the GPU reads and writes it directly. Memory that numpy allocated is registered
in place, because torch's pinned allocator rounds a request up to a power of two, which would waste
up to half of a large pool.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch

from tokenflow.errors import CapacityError
from tokenflow.inflight.runner import CopyDirection
from tokenflow.inflight.torch_memory import ByteRows
from tokenflow.inflight.torch_runs import CopyRun
from tokenflow.inflight.torch_streams import Mark, StreamTransport

_cuda: Any = torch.cuda
"""Its streams, events and runtime are untyped."""

_REGISTER_DEFAULT = 0
"""cudaHostRegisterDefault."""


class CudaRuntime(Protocol):
    """The calls of the CUDA runtime that pin memory; they return an error code, 0 = success."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        """Pin memory that exists. Takes its pages at once."""
        ...

    def cudaHostUnregister(self, pointer: int) -> int:
        """Undo it."""
        ...


def pin(host: ByteRows, runtime: CudaRuntime) -> None:
    """Pin the host pool in place. Raises CapacityError: copies out of pageable memory would be slow
    and would hold up whoever starts them, so there is no going on without."""
    code = int(runtime.cudaHostRegister(host.ctypes.data, host.nbytes, _REGISTER_DEFAULT))
    if code:
        raise CapacityError(
            f"a host KV pool of {host.nbytes} bytes cannot be pinned: CUDA error {code}"
            " (2 = not enough memory that may be locked)"
        )


class CudaMark:
    """An event recorded at the present end of a stream. Implements `torch_streams.Mark`."""

    def __init__(self, stream: Any) -> None:
        # blocking: a waiting thread sleeps instead of taking a core from the model's Python.
        self.event = _cuda.Event(enable_timing=True, blocking=True)
        self.event.record(stream)

    def is_reached(self) -> bool:
        """See Mark."""
        return bool(self.event.query())

    def wait(self) -> None:
        """See Mark."""
        self.event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """See Mark."""
        return float(cast(CudaMark, earlier).event.elapsed_time(self.event)) / 1e3


class CudaStream:
    """A CUDA stream for copies. Implements `torch_streams.CopyStream`.

    device: [num_blocks, block_bytes] on the GPU; host: the same of the host pool, pinned.
    """

    def __init__(self, device: torch.Tensor, host: torch.Tensor) -> None:
        self._stream = _cuda.Stream(device.device)
        self._device = device
        self._host = host

    def wait_for(self, mark: Mark) -> None:
        """See CopyStream."""
        self._stream.wait_event(cast(CudaMark, mark).event)

    @torch.inference_mode()
    def copy(self, direction: CopyDirection, run: CopyRun) -> None:
        """See CopyStream."""
        device = self._device.narrow(0, run.device_block, run.num_blocks)
        host = self._host.narrow(0, run.host_block, run.num_blocks)
        with _cuda.stream(self._stream):
            if direction is CopyDirection.OFFLOAD:
                host.copy_(device, non_blocking=True)
            else:
                device.copy_(host, non_blocking=True)

    def mark(self) -> CudaMark:
        """See CopyStream."""
        return CudaMark(self._stream)


def open_cuda_transport(device: torch.Tensor, host: ByteRows) -> StreamTransport:
    """Copies between `device` [num_blocks, block_bytes] on a GPU and `host`, which it pins.

    Steps must run on the stream that is torch's current one for the GPU in the thread that starts
    transfers. Raises CapacityError when the memory cannot be pinned.
    """
    runtime: CudaRuntime = _cuda.cudart()
    pin(host, runtime)
    pinned = torch.from_numpy(host)

    def release() -> None:
        # It fails only when the GPU is lost, and then no pages are locked any more.
        runtime.cudaHostUnregister(host.ctypes.data)

    return StreamTransport(
        {direction: CudaStream(device, pinned) for direction in CopyDirection},
        lambda: CudaMark(_cuda.current_stream(device.device)),
        len(device),
        len(host),
        release,
    )

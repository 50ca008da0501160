"""Reading single fields of a Triton request.

Owns the checks that every field shares: data type, shape, one value per request, finite numbers.
Works on plain numpy arrays; every failure is an InvalidRequestError that names the field. Shapes
are those of a model with a batch dimension: [1, 1] for a scalar, [1, n] for a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenflow.errors import InvalidRequestError, shortened

Tensor = npt.NDArray[Any]

MAX_ID_CHARACTERS = 4096
"""Triton repeats the id in every response, so a long one would fill the server's memory."""

_KIND_NAMES = {
    "O": "BYTES", "?": "BOOL", "i": "INT32", "f": "FP32", "Q": "UINT64", "e": "FP16",
}  # fmt: skip


class Fields:
    """The input tensors of one request, by name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        for name, tensor in tensors.items():
            if tensor.ndim > 0 and tensor.shape[0] > 1:
                raise InvalidRequestError(
                    name,
                    f"the batch size must be 1, got {tensor.shape[0]}; send one request per prompt",
                )

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def size(self, name: str) -> int:
        """Number of elements; 0 when the field is absent."""
        return int(self._tensors[name].size) if name in self._tensors else 0

    def text(self, name: str) -> str | None:
        """A BYTES scalar as text."""
        value = self._scalar(name, "O")
        return None if value is None else self._decoded(name, value)

    def texts(self, name: str) -> tuple[str, ...]:
        """A BYTES list as texts, empty ones included."""
        tensor = self._tensor(name, "O")
        if tensor is None:
            return ()
        return tuple(self._decoded(name, value) for value in tensor.reshape(-1).tolist())

    def boolean(self, name: str, default: bool) -> bool:
        """A BOOL scalar."""
        value = self._scalar(name, "?")
        return default if value is None else bool(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """An INT32 scalar in [low, high]."""
        value = self._scalar(name, "i")
        return None if value is None else self._bounded(name, value, low, high)

    def unsigned(self, name: str) -> int | None:
        """A UINT64 scalar."""
        value = self._scalar(name, "Q")
        return None if value is None else int(value)

    def number(
        self, name: str, low: float, high: float, *, above_low: bool = False, note: str = ""
    ) -> float | None:
        """An FP32 scalar in [low, high], or in (low, high] with `above_low`. note: what a refusal
        says besides."""
        value = self._scalar(name, "f")
        if value is None:
            return None
        low, high = float(np.float32(low)), float(np.float32(high))  # as a client can send them
        return check_number(name, value, low, high, above_low=above_low, note=note)

    def numbers(self, name: str) -> tuple[float, ...]:
        """An FP32 list of finite values."""
        tensor = self._tensor(name, "f")
        if tensor is None:
            return ()
        if not np.isfinite(tensor).all():
            raise InvalidRequestError(name, "must hold finite numbers")
        return tuple(tensor.reshape(-1).tolist())

    def matrix(self, name: str, kind: str, num_columns: int | None = None) -> Tensor:
        """An array of [1, rows, columns], which is there and not empty, as [rows, columns].
        kind: i (INT32) or e (FP16). num_columns: None = any."""
        tensor = self._tensor(name, kind)
        if tensor is None or tensor.ndim != 3 or num_columns not in (None, tensor.shape[2]):
            shape = None if tensor is None else list(tensor.shape)
            wanted = "columns" if num_columns is None else num_columns
            raise InvalidRequestError(name, f"must be of shape [1, rows, {wanted}], got {shape}")
        matrix: Tensor = tensor[0]
        return matrix

    def _tensor(self, name: str, kind: str) -> Tensor | None:
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        expected = np.dtype(
            {"i": "int32", "f": "float32", "Q": "uint64", "e": "float16"}.get(kind, kind)
        )
        if tensor.dtype != expected:
            raise InvalidRequestError(
                name, f"must be {_KIND_NAMES[kind]}, got an array of {tensor.dtype}"
            )
        return tensor

    def _scalar(self, name: str, kind: str) -> Any:
        tensor = self._tensor(name, kind)
        if tensor is None:
            return None
        if tensor.size != 1:
            raise InvalidRequestError(
                name, f"must be one value of shape [1, 1], got shape {list(tensor.shape)}"
            )
        return tensor.reshape(-1).tolist()[0]

    @staticmethod
    def _decoded(name: str, value: Any) -> str:
        if isinstance(value, str):
            return value
        if not isinstance(value, bytes):
            raise InvalidRequestError(name, f"must be BYTES, got {type(value).__name__}")
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequestError(
                name, f"is not valid UTF-8 (byte {error.start} of {len(value)})"
            ) from None

    @staticmethod
    def _bounded(name: str, value: int, low: int, high: int) -> int:
        if not low <= value <= high:
            raise InvalidRequestError(name, f"must be in [{low}, {high}], got {value}")
        return int(value)


def check_id(request_id: str) -> None:
    """Raises InvalidRequestError for an id that is too long."""
    if len(request_id) > MAX_ID_CHARACTERS:
        message = f"at most {MAX_ID_CHARACTERS} characters, got {len(request_id)}"
        raise InvalidRequestError("id", message)


def check_number(
    name: str,
    value: object,
    low: float,
    high: float,
    *,
    above_low: bool = False,
    note: str = "",
) -> float:
    """`value` (a number, or text of one as request parameters may carry) as a float in range.

    Raises InvalidRequestError for text that is no number, NaN, infinity or a value out of range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise InvalidRequestError(name, f"must be a number, got {shortened(repr(value))}")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise InvalidRequestError(name, f"must be a number, got {shortened(repr(value))}") from None
    inside = low < number <= high if above_low else low <= number <= high
    if not inside:  # NaN is inside nothing
        border = "(" if above_low else "["
        raise InvalidRequestError(
            name, f"must be in {border}{low:g}, {high:g}], got {number:g}{note}"
        )
    return number

"""A model's inputs and outputs under a graph: tensors of fixed address, a row a token or a request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import Enum

import torch
from torch import Tensor

from ..batch import ForwardBatch
from ..errors import BatchError


class Rows(str, Enum):
    """What the first dimension of a tensor counts."""

    TOKENS = "tokens"
    REQUESTS = "requests"


ModelFn = Callable[[Mapping[str, Tensor], ForwardBatch], Tensor | tuple[Tensor, ...]]
"""A model's forward: inputs by name and the batch give one or more tensors, all with the same kind of rows."""


class FixedInputs:
    """Copies of the model's inputs; every size of a step reads the same memory, rows past the step's hold zeros.

    Args:
        example: One tensor a name; its dtype and trailing dimensions hold for every step.
        max_tokens: Rows of the inputs with a row a token.
        max_requests: Rows of the others.
        device: Where the graph runs.
        request_inputs: Names of the inputs with a row a request.
    """

    def __init__(
        self,
        example: Mapping[str, Tensor],
        max_tokens: int,
        max_requests: int,
        device: torch.device,
        request_inputs: Collection[str] = (),
    ) -> None:
        self._by_request = frozenset(request_inputs)
        self._buffers: dict[str, Tensor] = {}
        for name, t in example.items():
            rows = max_requests if name in self._by_request else max_tokens
            self._buffers[name] = torch.zeros((rows, *t.shape[1:]), dtype=t.dtype, device=device)

    def view(self, tokens: int, requests: int) -> dict[str, Tensor]:
        """Return the inputs of a captured size."""
        return {name: t[: requests if name in self._by_request else tokens] for name, t in self._buffers.items()}

    def clear(self) -> None:
        """Zero everything: a capture runs over no step's inputs."""
        for t in self._buffers.values():
            t.zero_()

    def problems(self, inputs: Mapping[str, Tensor], tokens: int, requests: int) -> list[str]:
        """Return why a step's inputs do not fit what was captured."""
        found = []
        if set(inputs) != set(self._buffers):
            found.append(f"inputs {sorted(inputs)}; captured with {sorted(self._buffers)}")
        for name, buffer in self._buffers.items():
            value = inputs.get(name)
            if value is None:
                continue
            rows = requests if name in self._by_request else tokens
            if value.shape[:1] != (rows,) or value.shape[1:] != buffer.shape[1:] or value.dtype != buffer.dtype:
                found.append(
                    f"input {name!r} is {tuple(value.shape)} {value.dtype}; captured for this step as "
                    f"{(rows, *buffer.shape[1:])} {buffer.dtype}"
                )
        return found

    def load(
        self, inputs: Mapping[str, Tensor], *, tokens: int, requests: int, padded_tokens: int, padded_requests: int
    ) -> None:
        """Copy a step in; nothing synchronises.

        Args:
            inputs: By name.
            tokens: Query tokens of the step.
            requests: Its requests.
            padded_tokens: Rows that the graph reads.
            padded_requests: Likewise, for inputs with a row a request.

        Raises:
            BatchError: Names, shapes or dtypes differ from the capture's.
        """
        problems = self.problems(inputs, tokens, requests)
        if problems:
            raise BatchError(problems, remedy="give every step the inputs that the example had")
        for name, buffer in self._buffers.items():
            rows, padded = (requests, padded_requests) if name in self._by_request else (tokens, padded_tokens)
            buffer[:rows].copy_(inputs[name])
            if padded > rows:
                buffer[rows:padded].zero_()


def narrow(outputs: Tensor | tuple[Tensor, ...], rows: int) -> Tensor | tuple[Tensor, ...]:
    """Return the first rows of each output, as views."""
    return outputs[:rows] if isinstance(outputs, Tensor) else tuple(t[:rows] for t in outputs)


def check_outputs(outputs: Tensor | tuple[Tensor, ...], rows: int, kind: Rows) -> None:
    """Refuse outputs whose first dimension is not the captured number of rows.

    Raises:
        BatchError: Naming the output.
    """
    tensors = (outputs,) if isinstance(outputs, Tensor) else outputs
    wrong = [
        f"output {i} is {tuple(t.shape)}; must have {rows} rows, one of each of the captured {kind.value}"
        for i, t in enumerate(tensors)
        if t.dim() == 0 or t.shape[0] != rows
    ]
    if wrong:
        raise BatchError(wrong, remedy="name what the outputs' rows are: GraphOptions.output_rows")

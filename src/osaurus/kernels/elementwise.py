"""Functions of single numbers that give one number the same bits wherever it lies.

torch's CPU kernels take 32 floats at a time and round what is left over, and what is left at
the border between two threads, with other code: measured, SiLU of a row of 1,003 floats
differs in one of a thousand places from the same row inside a matrix. So numbers are laid out
in whole vectors, also for each thread. On other devices every number takes the same path.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

#: Floats that torch's widest vector loop takes at a time.
VECTOR = 32
#: Numbers from which on torch shares the work among threads (at::internal::GRAIN_SIZE).
GRAIN = 32768


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), x of any shape, float32."""
    return _in_vectors(F.silu, x)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), x of any shape, float32."""
    return _in_vectors(torch.sigmoid, x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), x of any shape, float32; x itself above 20."""
    return _in_vectors(F.softplus, x)


def gelu(x: Tensor) -> Tensor:
    """x times the normal distribution's share below x, x of any shape, float32."""
    return _in_vectors(F.gelu, x)


def gelu_tanh(x: Tensor) -> Tensor:
    """The same by its approximation with a hyperbolic tangent."""
    return _in_vectors(_gelu_tanh, x)


def exp(x: Tensor) -> Tensor:
    """e to the x, x of any shape, float32."""
    return _in_vectors(torch.exp, x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _in_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return function(x)
    count = x.numel()
    threads = max(1, min(torch.get_num_threads(), -(-count // GRAIN)))
    whole = VECTOR * threads
    if count % whole == 0 and x.is_contiguous():
        return function(x.view(-1)).view(x.shape)
    padded = x.new_zeros(-(-count // whole) * whole)
    padded[:count].view(x.shape).copy_(x)
    return function(padded)[:count].view(x.shape)

"""A packed mask: a bit a token, 32 tokens a word, the lowest first. Knows no tensors, since a
server that loads no model looks at masks too."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]


def allows(mask: Mask, token_id: int) -> bool:
    """Whether the mask has the token's bit."""
    word = token_id >> 5
    return 0 <= word < mask.size and bool((int(mask[word]) >> (token_id & 31)) & 1)

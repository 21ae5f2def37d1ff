"""Words about weights that settings, the command line and the loader share."""

from __future__ import annotations

from typing import Literal

#: What matrices in plain numbers become while they are loaded: 8 or 4 bits a weight.
QuantizeOnLoad = Literal["int8", "int4"]

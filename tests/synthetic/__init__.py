"""Small random models, one for each kind of memory, written for tests alone.

They compute what their families compute in kind, one token after another, with products of
single rows, so that how a prompt was cut and who else is in a batch change no bit.
"""

from synthetic.model import FAMILIES, SyntheticModel, build
from synthetic.rig import Lane, Rig

__all__ = ["FAMILIES", "Lane", "Rig", "SyntheticModel", "build"]

"""A local LLM inference runtime. The names below are the public ones, each loaded on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from osaurus.errors import OsaurusError
    from osaurus.types.chat import ChatRequest, Message, Tool, Usage
    from osaurus.types.events import (
        Chunk,
        Event,
        Info,
        PrefillProgress,
        Reasoning,
        ToolCall,
        ToolCallProgress,
    )
    from osaurus.types.sampling import SamplingParams

__version__ = "0.1.0"

_HOME_OF = {
    "OsaurusError": "osaurus.errors",
    "ChatRequest": "osaurus.types.chat",
    "Message": "osaurus.types.chat",
    "Tool": "osaurus.types.chat",
    "Usage": "osaurus.types.chat",
    "Chunk": "osaurus.types.events",
    "Event": "osaurus.types.events",
    "Info": "osaurus.types.events",
    "PrefillProgress": "osaurus.types.events",
    "Reasoning": "osaurus.types.events",
    "ToolCall": "osaurus.types.events",
    "ToolCallProgress": "osaurus.types.events",
    "SamplingParams": "osaurus.types.sampling",
}

__all__ = [
    "ChatRequest",
    "Chunk",
    "Event",
    "Info",
    "Message",
    "OsaurusError",
    "PrefillProgress",
    "Reasoning",
    "SamplingParams",
    "Tool",
    "ToolCall",
    "ToolCallProgress",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'osaurus' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)

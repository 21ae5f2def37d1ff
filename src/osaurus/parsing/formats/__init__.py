"""The table of tool formats. Adding one is a file in this folder and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from osaurus.parsing.formats.bare_json import BARE_JSON
from osaurus.parsing.formats.base import ToolFormat
from osaurus.parsing.formats.deepseek_v3 import DEEPSEEK_V3, DEEPSEEK_V31
from osaurus.parsing.formats.dsml import DSML
from osaurus.parsing.formats.gemma import GEMMA
from osaurus.parsing.formats.gemma4 import GEMMA4
from osaurus.parsing.formats.glm4 import GLM4
from osaurus.parsing.formats.granite import GRANITE
from osaurus.parsing.formats.hunyuan import HUNYUAN
from osaurus.parsing.formats.json_tags import FUNCTION_CALL, JSON_TAGS, LONGCAT, TOOLCALL
from osaurus.parsing.formats.kimi_k2 import KIMI_K2
from osaurus.parsing.formats.lfm2 import LFM2
from osaurus.parsing.formats.llama3 import LLAMA3
from osaurus.parsing.formats.minimax_m2 import MINIMAX_M2
from osaurus.parsing.formats.mistral import MISTRAL
from osaurus.parsing.formats.nemotron import NEMOTRON
from osaurus.parsing.formats.pythonic import PYTHONIC
from osaurus.parsing.formats.step import STEP
from osaurus.parsing.formats.xml_function import XML_FUNCTION
from osaurus.parsing.formats.zaya_xml import ZAYA_XML

#: By name. Harmony is not here: its messages are no envelopes (`parsing/harmony.py`).
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    each.name: each
    for each in (
        BARE_JSON,
        DEEPSEEK_V3,
        DEEPSEEK_V31,
        DSML,
        FUNCTION_CALL,
        GEMMA,
        GEMMA4,
        GLM4,
        GRANITE,
        HUNYUAN,
        JSON_TAGS,
        KIMI_K2,
        LFM2,
        LLAMA3,
        LONGCAT,
        MINIMAX_M2,
        MISTRAL,
        NEMOTRON,
        PYTHONIC,
        STEP,
        TOOLCALL,
        XML_FUNCTION,
        ZAYA_XML,
    )
}

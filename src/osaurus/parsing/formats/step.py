"""Step 3.5 and 3.7: the XML function body."""

from __future__ import annotations

from osaurus.parsing.call_syntax import xml_calls
from osaurus.parsing.formats.base import ToolFormat
from osaurus.parsing.formats.xml_function import QWEN_BARE, QWEN_OPENER, XML_ORPHANS

STEP = ToolFormat(
    name="step",
    openers=(QWEN_OPENER,),
    bare=(QWEN_BARE,),
    orphans=XML_ORPHANS,
    writes=(xml_calls("<tool_call>", "</tool_call>"),),
)

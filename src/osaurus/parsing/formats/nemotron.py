"""Nemotron 3: the XML function body; live checkpoints also write DSML envelopes."""

from __future__ import annotations

from osaurus.parsing.call_syntax import xml_calls
from osaurus.parsing.formats.base import ToolFormat
from osaurus.parsing.formats.dsml import DSML_OPENERS, DSML_ORPHANS
from osaurus.parsing.formats.xml_function import QWEN_BARE, QWEN_OPENER, XML_ORPHANS

NEMOTRON = ToolFormat(
    name="nemotron",
    openers=(QWEN_OPENER, *DSML_OPENERS),
    bare=(QWEN_BARE,),
    orphans=(*XML_ORPHANS, *DSML_ORPHANS),
    writes=(xml_calls("<tool_call>", "</tool_call>"),),
)

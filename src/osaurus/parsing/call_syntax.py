"""How a family writes calls, as a template that a grammar can be made from.

    begin CALL (between CALL)* end        CALL = open NAME middle ARGUMENTS close

Neither `between` nor `end` may begin with the other, nor with blanks that both share: lexers take
the longest token, and one of the two would never be seen.

The readers of `bodies/` take more than this: drift, other layouts, white space. What is written
under a grammar is the one layout that the family was trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: In `middle`, stands for a running number.
INDEX = "{index}"

#: json: one JSON object. tags: each argument between texts of its own, strings unquoted.
#: python: `key=literal, ...`. braces: `{key:value,...}` with strings between `quote`s.
ArgumentStyle = Literal["json", "tags", "python", "braces"]

IDENTIFIER = r"[A-Za-z_][A-Za-z0-9_]*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One argument in the style `tags`: `open` KEY `middle` VALUE `close`.

    `json_middle` stands in place of `middle` before a value that is JSON and no text, where the
    family tells the two apart. `stops` are texts that no value may hold, because the reader
    would see an end in them. With `is_stripped` the reader drops blanks around a value.
    """

    open: str
    middle: str
    close: str
    json_middle: str = ""
    stops: tuple[str, ...] = ()
    is_stripped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """`names` is what a function's name must match to be written; `is_quoted` says that names
    stand in a JSON string. `is_single`: a turn ends with its first call. `needs` are texts of
    the bundle's template or added tokens that tell this layout from the family's others.
    """

    open: str
    middle: str
    close: str
    begin: str = ""
    end: str = ""
    between: str = ""
    arguments: ArgumentStyle = "json"
    parameter: Parameter | None = None
    quote: str = ""
    names: str = r"[^<>\"'\r\n]{1,256}"
    is_quoted: bool = False
    is_single: bool = False
    needs: tuple[str, ...] = ()


def json_calls(
    begin: str = "",
    end: str = "",
    *,
    between: str = "",
    open: str = "",  # noqa: A002 - the field's name
    close: str = "",
    arguments: str = "arguments",
    needs: tuple[str, ...] = (),
) -> CallSyntax:
    """Calls as JSON objects of a name and arguments, each between `open` and `close`."""
    return CallSyntax(
        begin=begin,
        end=end,
        between=between,
        open=open + '{"name": "',
        middle=f'", "{arguments}": ',
        close="}" + close,
        names=r"[^\r\n]{1,256}",
        is_quoted=True,
        needs=needs,
    )


def xml_calls(opener: str, closer: str) -> CallSyntax:
    """The XML function body, one function in a wrapper."""
    return CallSyntax(
        open=f"{opener}\n<function=",
        middle=">\n",
        close=f"</function>\n{closer}",
        between="\n",
        arguments="tags",
        parameter=Parameter(
            open="<parameter=",
            middle=">\n",
            close="\n</parameter>\n",
            stops=("</parameter>", "<parameter=", "</function>", "<parameter>"),
        ),
    )


#: gpt-oss: a message to a function. The turn ends with it.
HARMONY_CALL = CallSyntax(
    open="<|channel|>commentary to=functions.",
    middle=" <|constrain|>json<|message|>",
    close="",
    names=r"[A-Za-z0-9_.\-]{1,64}",
    is_single=True,
)

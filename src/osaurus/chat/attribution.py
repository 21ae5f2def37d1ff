"""The line that some coding agents put before their system message, kept out of the prompt.

It is addressed to another vendor's billing and says nothing to a model, but it changes at every
request, and what changes at the start of a prompt makes all of it new to every prefix cache:

    x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;

The rule is anchored: only the very start of the first message, only where that is a system
message, only a name that speaks of billing or attribution, and only `key=value;` behind it.
The same words anywhere else are the client's own and stay.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from osaurus.types.chat import SYSTEM_ROLES, Message, Part, TextPart

#: Some gateways join the line and the prompt without a line break, so the pairs are matched
#: and not the line; the last pair may lack its semicolon where the line ends. Repetitions are
#: bounded, since this runs over whatever a client sends.
_LINE = re.compile(
    r"""\s* x-[a-z0-9-]{0,40}(?:billing|attribution)[a-z0-9-]{0,40}:
        (?: [ \t]* [a-z0-9_-]{1,64} = [^;\s]{0,256} (?: ; | (?=[ \t]*(?:[\r\n]|\Z)) ) ){1,32}
        \s*""",
    re.IGNORECASE | re.VERBOSE,
)


def without_attribution(messages: Sequence[Message]) -> tuple[Message, ...]:
    """`messages` without such a line; equal to them where there is none.

    A message, or a part of one, that held nothing else is left out, unless it is all there is.
    """
    if not messages or messages[0].role not in SYSTEM_ROLES:
        return tuple(messages)
    first, *others = messages
    content = _without_line(first.content)
    if content == first.content or not (content or others):
        return tuple(messages)
    return (replace(first, content=content), *others) if content else tuple(others)


def _without_line(content: str | tuple[Part, ...]) -> str | tuple[Part, ...]:
    if isinstance(content, str):
        found = _LINE.match(content)
        return content if found is None else content[found.end() :]
    if not content or not isinstance(content[0], TextPart):
        return content
    found = _LINE.match(content[0].text)
    if found is None:
        return content
    rest = content[0].text[found.end() :]
    return (replace(content[0], text=rest), *content[1:]) if rest else content[1:]

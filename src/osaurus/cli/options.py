"""Options that several verbs share, so that one spelling means one thing everywhere."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

Json = Annotated[
    bool, Parameter(name="--json", show_default=False, help="Print JSON with stable keys.")
]
Yes = Annotated[
    bool,
    Parameter(name=["--yes", "-y"], show_default=False, help="Answer yes to every question."),
]
Server = Annotated[
    str | None,
    Parameter(
        name="--server",
        env_var="OSAURUS_SERVER_URL",
        help="Address of a running server, e.g. http://127.0.0.1:1337.",
    ),
]

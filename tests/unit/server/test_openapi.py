"""The document names every route of the app, and only those."""

import json

from api.scripted_engine import ScriptedEngine, ScriptedSource, say_hello
from osaurus.chat.service import ChatEngine
from osaurus.runtime.pool import ModelRuntime
from osaurus.server.app import AppConfig, build_app
from osaurus.server.openapi import OPERATIONS, document
from osaurus.server.paths import normalize


def test_the_document_has_the_routes_of_the_app() -> None:
    source = ScriptedSource({"m": ScriptedEngine(say_hello)})
    app = build_app(ChatEngine(ModelRuntime(source)), AppConfig())
    served = {
        (method, route.path.replace(":path}", "}"))
        for route in app.routes
        for method in (route.methods or set()) - {"HEAD"}
    }
    said = {(op.method, normalize(op.path).path) for op in OPERATIONS}
    assert said == served


def test_every_reference_leads_somewhere_and_the_document_is_json() -> None:
    text = json.dumps(document())
    found = json.loads(text)
    schemas = found["components"]["schemas"]
    references = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert references <= set(schemas)
    temperature = schemas["ChatCompletionBody"]["properties"]["temperature"]
    assert temperature["type"] == ["number", "null"]

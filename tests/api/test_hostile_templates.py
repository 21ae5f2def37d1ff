"""Field case F49 over HTTP: a bundle's template can neither hang the server nor read its files."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from api.conftest import Running, Start
from api.scripted_engine import CHATML, ScriptedEngine, ScriptedSource
from osaurus.runtime.model import Listing, LoadedModel

HI = [{"role": "user", "content": "hi"}]
NESTED = (
    "{% set ns = namespace(s=[]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}"
    "{% endfor %}{{ ns.s }}"
)
SPIN = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


class _TwoTemplates(ScriptedSource):
    """Model "good" has a harmless template, model "bad" the one of the test."""

    bad = ""

    def load(self, listing: Listing) -> LoadedModel:
        self.template = self.bad if listing.model_id == "bad" else CHATML
        return super().load(listing)


def _serve(start: Start, bad: str) -> Running:
    source = _TwoTemplates({"good": ScriptedEngine(), "bad": ScriptedEngine()})
    source.bad = bad
    return start(source=source)


@pytest.mark.parametrize("bad", [NESTED, SPIN, "{{ 'x' * 10 ** 9 }}"])
def test_a_template_that_would_never_end_is_a_400_and_others_are_served_meanwhile(
    start: Start, bad: str
) -> None:
    running = _serve(start, bad)
    client = running.client().chat.completions
    client.create(model="good", messages=HI)

    def ask() -> float:
        began = time.monotonic()
        with pytest.raises(openai.BadRequestError) as caught:
            client.create(model="bad", messages=HI)
        assert caught.value.code == "chat_template_error"
        return time.monotonic() - began

    with ThreadPoolExecutor() as threads:
        hostile = threads.submit(ask)
        served = 0
        while not hostile.done():
            client.create(model="good", messages=HI)
            served += 1
        assert hostile.result() < 3  # two seconds, and a machine that does other things
    assert served > 3 or "10 ** 9" in bad  # which is refused at once


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ '' | attr('__class__') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('touch PATH') }}",
        "{{ '{0.__class__}'.format('') }}",
        "{% include 'PATH' %}",
        "{% import 'os' as os %}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_walks_or_includes_is_a_400_without_effect(
    start: Start, tmp_path: Path, attack: str
) -> None:
    touched = tmp_path / "touched"
    running = _serve(start, attack.replace("PATH", str(touched)))
    client = running.client().chat.completions
    with pytest.raises(openai.BadRequestError) as caught:
        client.create(model="bad", messages=HI)
    assert "Traceback" not in caught.value.message
    assert not touched.exists()
    assert client.create(model="good", messages=HI).choices[0].message.content == "Hello!"


def test_a_template_in_a_request_is_refused(start: Start) -> None:
    client = _serve(start, CHATML).client().chat.completions
    with pytest.raises(openai.BadRequestError) as caught:
        client.create(model="good", messages=HI, extra_body={"chat_template": CHATML})
    assert caught.value.param == "chat_template"

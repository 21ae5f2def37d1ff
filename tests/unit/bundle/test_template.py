"""Chat templates: the reference renderer's output, and field case F49: they are not programs."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from osaurus.bundle.bundle import Bundle, open_bundle
from osaurus.bundle.sandbox import RenderLimits
from osaurus.bundle.template import ChatTemplate
from osaurus.errors import TemplateError
from unit.bundle.made import CHAT, write_folder

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather in a city, e.g. "Köln" <b>now</b> & later',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Köln", "東京"]}},
            "required": ["city"],
        },
    },
}

#: Templates in the manner of the common families; each uses what its family's real one uses.
FAMILIES = {
    "chatml": CHAT,
    "chatml with a default system message": (
        "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe brief<|im_end|>\n' }}"
        "{% endif %}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
        "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "header ids, trimmed content, date": (
        "{{- bos_token }}\n{%- if not date_string is defined %}\n"
        "    {%- set date_string = strftime_now('%d %b %Y') %}\n{%- endif %}\n"
        "{%- if messages[0]['role'] == 'system' %}\n"
        "    {%- set system_message = messages[0]['content']|trim %}\n"
        "    {%- set messages = messages[1:] %}\n{%- else %}\n"
        "    {%- set system_message = '' %}\n{%- endif %}\n"
        "{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}\n"
        "{%- if tools is not none %}\n    {{- 'Environment: ipython\n' }}\n{%- endif %}\n"
        "{{- 'Today Date: ' + date_string + '\n\n' }}\n{{- system_message }}\n"
        "{%- for t in tools or [] %}\n    {{- t | tojson(indent=4) }}\n    {{- '\n\n' }}\n"
        "{%- endfor %}\n{{- '<|eot_id|>' }}\n{%- for message in messages %}\n"
        "    {%- if message.role == 'tool' or message.role == 'ipython' %}\n"
        "        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}\n"
        "        {%- if message.content is mapping or message.content is iterable %}\n"
        "            {{- message.content | tojson }}\n        {%- else %}\n"
        "            {{- message.content }}\n        {%- endif %}\n    {%- else %}\n"
        "        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + "
        "message['content'] | trim + '<|eot_id|>' }}\n    {%- endif %}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n"
        "    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{%- endif %}"
    ),
    "instruction brackets with strict turns": (
        "{%- if messages[0].role == 'system' %}{%- set system_message = messages[0].content %}"
        "{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}"
        "{%- endif %}{{- bos_token }}{%- for message in loop_messages %}"
        "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{- raise_exception('roles must alternate user/assistant') }}{%- endif %}"
        "{%- if message['role'] == 'user' %}{%- if loop.last and system_message is defined %}"
        "{{- '[INST] ' + system_message + '\n\n' + message['content'] + '[/INST]' }}{%- else %}"
        "{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}{%- else %}"
        "{{- ' ' + message['content'] + eos_token }}{%- endif %}{%- endfor %}"
    ),
    "turn markers, model role, namespace": (
        "{{ bos_token }}{%- set ns = namespace(system='', first=true) -%}"
        "{%- for message in messages -%}{%- if message['role'] == 'system' -%}"
        "{%- set ns.system = message['content'] + '\n\n' -%}{%- continue -%}{%- endif -%}"
        "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
        "{{ '<start_of_turn>' + role + '\n' + (ns.system if ns.first else '') }}"
        "{%- set ns.first = false -%}"
        "{%- if message['content'] is string -%}{{ message['content'] | trim }}"
        "{%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}"
        "{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}"
        "{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}"
        "{%- endif -%}{{ '<end_of_turn>\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
    ),
    "thinking switch and reversed search for the last question": (
        "{%- if tools %}{{- '<|im_start|>system\n# Tools\n<tools>' }}"
        "{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}"
        "{{- '\n</tools><|im_end|>\n' }}{%- endif %}"
        "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}"
        "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
        "{%- if ns.multi_step_tool and message.role == 'user' and message.content is string and not"
        "(message.content.startswith('<tool_response>') and "
        "message.content.endswith('</tool_response>')) %}{%- set ns.multi_step_tool = false %}"
        "{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}"
        "{%- for message in messages %}{%- if message.content is string %}"
        "{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}"
        "{%- if message.role == 'assistant' %}{%- set reasoning_content = '' %}"
        "{%- if '</think>' in content %}"
        "{%- set reasoning_content = content.split('</think>')[0].rstrip('\n')"
        ".split('<think>')[-1].lstrip('\n') %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
        "{{- '<|im_start|>assistant\n' }}{%- if loop.index0 > ns.last_query_index %}"
        "{{- '<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' }}{%- endif %}"
        "{{- content }}{%- if message.tool_calls %}{%- for tool_call in message.tool_calls %}"
        "{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}"
        '{{- \'<tool_call>\n{"name": "\' }}{{- tool_call.name }}{{- \'", "arguments": \' }}'
        "{{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}{%- endif %}"
        "{{- '<|im_end|>\n' }}{%- else %}{{- '<|im_start|>' + message.role + '\n' + content + "
        "'<|im_end|>\n' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}"
        "{{- '<|im_start|>assistant\n' }}{%- if enable_thinking is defined and enable_thinking is "
        "false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
    ),
    "macros, type rendering, dictsort": (
        "{%- macro kind(p) -%}{%- if p.enum is defined -%}{{ p.enum | join(' | ') }}"
        "{%- elif p.type == 'array' -%}{{ kind(p['items']) }}[]{%- else -%}{{ p.type }}"
        "{%- endif -%}"
        "{%- endmacro -%}{%- for tool in tools or [] %}{% set f = tool.function %}"
        "{{ f.name }}({% for name, p in f.parameters.properties | dictsort %}"
        "{{ name }}: {{ kind(p) }}{{ ', ' if not loop.last }}{% endfor %})\n{%- endfor %}"
        "{% for m in messages %}{{ '\n' if not loop.first }}{{ m.role | upper }}: "
        "{{ m.content | default('', true) }}{% endfor %}"
    ),
    "marked generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'A:' }}{% generation %}"
        "{% set inside = m.content %}{{ inside }}{{ eos_token }}{% endgeneration %}"
        "{% else %}{{ 'Q:' ~ m.content }}{% endif %}{{ inside is defined }}\n{% endfor %}"
    ),
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% if loop.index > 3 %}{% break %}{% endif %}[{{ loop.index }}/{{ loop.length }}"
        "{{ loop.cycle('a', 'b') }}{{ loop.previtem.role if loop.previtem }}]{{ m.content }}"
        "{% endfor %}"
    ),
    "string methods and tests": (
        "{%- for m in messages if m.role in ['user', 'assistant'] %}"
        "{{- m['content'].replace('\n', ' ').strip().title() if m.content is string }}"
        "{{- '%s|%03d' % (m.role, loop.index) }}{{ '{:>6}'.format(m.role[:3]) }}"
        "{{- m.get('name', 'nobody') }}{{ m.items() | list | length }}\n"
        "{% else %}nothing{% endfor -%}"
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}"
        "{{ messages | map(attribute='role') | unique | join(',') }}{{ (1, 2.5, true, none) }}"
    ),
    "call blocks, filters as blocks, set blocks": (
        "{% macro box(title) %}[{{ title }}:{{ caller() }}]{% endmacro %}"
        "{% for m in messages %}{% call box(m.role) %}{{ m.content }}{% endcall %}"
        "{% filter upper %}{{ m.role }}{% endfilter %}"
        "{% set line %}{{ loop.index }}. {{ m.role }}{% endset %}{{ line | length }}{{ line }}"
        "{% endfor %}"
    ),
    "special tokens and documents": (
        "{{ bos_token }}{{ unk_token }}{{ pad_token is defined }}{{ documents is none }}"
        "{{ custom_switch | default('unset') }}{{ messages | length }}{{ tools is none }}"
    ),
}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [{"role": "user", "content": "  Hi <b>there</b> & 'you'\n"}],
    "three turns": [
        {"role": "user", "content": "erste Frage?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nAntwort"},
        {"role": "user", "content": "und 東京 😀?"},
    ],
    "with a system message": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
    ],
    "with a tool call": [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": {"city": "Köln <&>"}},
                }
            ],
        },
        {"role": "tool", "content": '{"degrees": 21.5}'},
    ],
}


def reference(source: str, messages: Any, tools: Any = None, **kwargs: Any) -> str:
    rendered, _ = render_jinja_template(
        conversations=[copy.deepcopy(messages)], tools=tools, chat_template=source, **kwargs
    )
    return rendered[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [WEATHER]])
@pytest.mark.parametrize("switches", [{}, {"enable_thinking": False, "custom_switch": [1, "é"]}])
def test_templates_of_the_common_families_render_as_in_transformers(
    family: str, conversation: str, prompt: bool, tools: Any, switches: dict[str, Any]
) -> None:
    source, messages = FAMILIES[family], CONVERSATIONS[conversation]
    arguments = {**switches, "tools": tools, "add_generation_prompt": prompt}
    template = ChatTemplate(source, special_tokens=SPECIAL)
    expected = outcome(lambda: reference(source, messages, **SPECIAL, **arguments))
    found = outcome(lambda: template.render(messages, **arguments))
    if isinstance(expected, Exception):
        assert isinstance(found, TemplateError)
        assert str(expected) in found.message
    else:
        assert found == expected


def outcome(action: Callable[[], str]) -> str | Exception:
    try:
        return action()
    except Exception as error:  # noqa: BLE001 - the refusal itself is what is compared
        return error


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(json_values, st.sampled_from(["", "(indent=2)", "(sort_keys=True)", "(ensure_ascii=True)"]))
def test_tojson_writes_what_transformers_writes(value: Any, arguments: str) -> None:
    source = f"{{{{ value | tojson{arguments} }}}}"
    assert ChatTemplate(source).render([], value=value) == reference(source, [], value=value)


@pytest.mark.parametrize("source", ["{{ (text | fromjson).a }}", "{{ fromjson(text).a }}"])
def test_json_texts_can_be_read_as_filter_and_as_function(source: str) -> None:
    template = ChatTemplate(source)
    assert template.render([], text='{"a": "é<1>"}') == "é<1>"
    with pytest.raises(TemplateError, match="refused: fromjson was given a text that is not JSON"):
        template.render([], text="{")
    with pytest.raises(TemplateError, match="refused: fromjson needs a text, got dict"):
        template.render([], text={})


def test_the_default_models_template_renders_as_in_transformers(
    default_model_bundle: Bundle,
) -> None:
    template = default_model_bundle.load_template()
    assert template is not None
    special = default_model_bundle.load_tokenizer().special_tokens
    for messages in CONVERSATIONS.values():
        assert template.render(messages) == reference(
            template.source, messages, add_generation_prompt=True, **special
        )


def test_the_current_date_is_given_to_templates_that_ask() -> None:
    year = str(datetime.now().year)
    assert year in ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([])


# --- F49: templates are not programs --------------------------------------------------------

MESSAGES = [{"role": "user", "content": "hello", "parts": [{"text": "x"}]}]


def refusal(source: str, **kwargs: Any) -> str:
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(source, **kwargs).render(MESSAGES)
    assert "Traceback" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ '' | attr('__cla' ~ 'ss__') }}",
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['__builtins__'] }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ joiner.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ dict.__base__ }}",
        "{{ ''.format.__globals__ }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ '{0[__class__]}'.format('') }}{{ '{x.__class__}'.format_map({'x': 1}) }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ messages | selectattr('__class__') | list }}",
        "{{ messages | sort(attribute='__class__') }}",
        "{{ messages | groupby('__class__') }}",
        "{{ (messages | map('attr', '__class__') | list)[0] }}",
        "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
        "{% macro m() %}{% endmacro %}{{ m._func.__code__ }}",
        "{% for x in [1] %}{{ loop.__init__ }}{% endfor %}",
        "{{ lipsum.__globals__ }}",
        "{{ lipsum() }}",
        "{{ messages.pop.__self__ }}",
        "{{ ''.join.__self__.__class__ }}",
    ],
)
def test_f49_walks_to_the_interpreters_insides_are_refused(source: str) -> None:
    refusal(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% include 'other.jinja' %}",
        "{% include ['a', 'b'] ignore missing %}",
        "{% import 'os' as os %}",
        "{% from 'os' import system %}",
        "{% extends 'base' %}",
        "{% if false %}{% include 'other.jinja' %}{% endif %}",
    ],
)
def test_f49_other_files_are_not_loaded_not_even_when_missing(source: str) -> None:
    assert "loads another template" in refusal(source)


SPIN = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def doubling(start: str, step: str) -> str:
    return (
        f"{{% set ns = namespace(s={start}) %}}{{% for i in range(60) %}}"
        f"{{% set ns.s = {step} %}}{{% endfor %}}"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        SPIN,
        "{{ 'x' * 10 ** 9 }}",
        "{{ 10 ** 9 * 'x' }}",
        "{{ [0] * 10 ** 9 }}",
        doubling("'x'", "ns.s ~ ns.s"),
        "{% for i in range(9999) %}{{ ('[' ~ '0,' * 99999 ~ '0]') | fromjson }}{% endfor %}",
        "{{ ('[' * 99999) | fromjson }}",
        "{{ fromjson('[' ~ '[],' * 9999999 ~ '0]') }}",
        doubling("'x'", "ns.s + ns.s"),
        doubling("[1]", "ns.s + ns.s"),
        doubling("'x'", "[ns.s, ns.s] | join"),
        doubling("'xx'", "ns.s.replace('x', ns.s)"),
        doubling("'xx'", "ns.s | replace('x', ns.s)"),
        doubling("'x'", "t").replace(
            "{% set ns.s", "{% set t %}{{ ns.s * 2 }}{% endset %}{% set ns.s"
        ),
        "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(90) }}",
        "{% macro m(s) %}{{ m(s ~ s) }}{% endmacro %}{{ m('x') }}",
        "{% for x in [[[1]]] recursive %}{{ loop(x) }}{{ loop([[[1]]]) }}{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{{ 'x'.ljust(10 ** 9) }}",
        "{{ 'x'.center(10 ** 9) }}",
        "{{ 'x'.zfill(10 ** 9) }}",
        "{{ 'x' | center(10 ** 9) }}",
        "{{ 'a\nb' | indent(10 ** 9) }}",
        "{{ '\t'.expandtabs(10 ** 9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{w}}'.format(1, w=10 ** 9) }}",
        "{{ [1] | batch(10 ** 9, 0) | list }}",
        "{{ [1] | tojson(indent=10 ** 9) }}",
        "{{ 7 ** (10 ** 9) }}",
        "{{ ([range(99999)] * 9999) | map('list') | list | length }}",
        "{{ (['x' * 99999] * 9999) | map('replace', 'x', 'xyz') | list | length }}",
        "{{ 'x' * 9999 * 9999 }}",
    ],
)
def test_f49_loops_and_sizes_end_within_the_limit(source: str) -> None:
    start = time.monotonic()
    refusal(source)
    assert time.monotonic() - start < 3


def laughing(end: str, start: str = "[]", step: str = "[ns.s, ns.s]") -> str:
    """A value of sixty nested lists that are two times the same one each."""
    return doubling(start, step) + end


@pytest.mark.parametrize(
    "source",
    [
        laughing("{{ ns.s }}"),
        laughing("{{ ns.s | tojson }}"),
        laughing("{{ ns.s ~ '' }}"),
        laughing("{{ '%s' % (ns.s,) }}"),
        laughing("{{ {ns.s: 1} }}", "()", "(ns.s, ns.s)"),
        laughing("{{ ns.s }}", "{}", "{'a': ns.s, 'b': ns.s}"),
        "{{ ('a ' * 10 ** 7) | wordwrap(1) }}",
        "{{ ('a ' * 10 ** 7) | title }}",
        "{{ ([[0] * 1000] * 99999) | sum(start=[]) | length }}",
        "{{ 'x'.encode() * 10 ** 9 }}",
        "{{ ('x' * 10 ** 6).translate({120: 'y' * 10 ** 6}) | length }}",
        "{{ range(99999) | join(',' * 300000) }}",
        "{{ x }}" * 300_000,
    ],
    ids=lambda source: source[-40:],
)
def test_f49_single_operations_that_no_hook_sees_end_too(source: str) -> None:
    start = time.monotonic()
    refusal(source)
    assert time.monotonic() - start < 2.5
    assert ChatTemplate(CHAT).render(MESSAGES)


def test_lone_surrogates_and_large_texts_pass_through() -> None:
    text = "\ud83d x" * 1_000_000
    assert ChatTemplate("{{ text }}").render([], text=text) == text


def test_f49_other_threads_go_on_while_a_template_spins() -> None:
    spinning = ChatTemplate(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    )
    quick = ChatTemplate(CHAT)

    def spin() -> None:
        with pytest.raises(TemplateError):
            spinning.render(MESSAGES)

    thread = threading.Thread(target=spin)
    thread.start()
    done = 0
    while thread.is_alive():
        quick.render(MESSAGES)
        done += 1
    thread.join()
    assert done > 10


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0].pop('content') }}",
        "{{ messages[0].parts.insert(0, 1) }}",
        "{% set _ = messages[0].setdefault('x', 1) %}",
    ],
)
def test_f49_calls_that_change_what_was_passed_in_are_refused(source: str) -> None:
    before = copy.deepcopy(MESSAGES)
    refusal(source)
    assert before == MESSAGES


def test_f49_what_was_passed_in_is_never_the_callers_own() -> None:
    messages = copy.deepcopy(MESSAGES)
    source = "{% set ns = namespace(m=messages[0]) %}{% set ns.m = 1 %}{{ messages[0].role }}"
    assert ChatTemplate(source).render(messages) == "user"
    assert messages == MESSAGES


def test_f49_a_template_that_raises_is_quoted_without_a_stack_trace() -> None:
    message = refusal("{{ raise_exception('Only user and assistant roles, please!') }}")
    assert "Only user and assistant roles, please!" in message


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", "not valid"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages | nosuchfilter }}", "nosuchfilter"),
        ("{{ 'a' + 1 }}", "TypeError"),
    ],
)
def test_a_faulty_template_is_refused_in_its_own_words(source: str, words: str) -> None:
    assert words in refusal(source)


def test_the_limits_are_settable_and_named_in_the_message() -> None:
    limits = RenderLimits(max_output_chars=100, max_steps=50, max_items=9, timeout_s=60)
    assert "100" in refusal("{% for i in range(30) %}{{ 'abcdef' }}{% endfor %}", limits=limits)
    assert "50 loop turns" in refusal("{% for i in range(99) %}{% endfor %}", limits=limits)
    assert "limit is 9" in refusal("{{ ([1] * 10) | length }}", limits=limits)


def test_numbers_of_any_size_may_be_formatted_and_shown() -> None:
    source = "{{ '%d' % 1700000000 }}|{{ '{:,}'.format(10 ** 12) }}|{{ 123456789 | string }}"
    assert ChatTemplate(source).render([]) == "1700000000|1,000,000,000,000|123456789"


def test_many_threads_render_one_template() -> None:
    template = ChatTemplate(FAMILIES["turn markers, model role, namespace"], special_tokens=SPECIAL)
    results: list[str] = []

    def work(name: str) -> None:
        for _ in range(50):
            results.append(template.render([{"role": "user", "content": name}]))

    threads = [threading.Thread(target=work, args=(f"n{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 300
    assert len(set(results)) == 6


# --- where templates come from --------------------------------------------------------------


def test_a_template_file_wins_over_the_tokenizer_config(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file")
    assert open_bundle(tmp_path).chat_template == "file"


def test_a_template_in_its_own_json_file_wins_over_the_tokenizer_config(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    write_folder(tmp_path, tokenizer_config={"chat_template": named})
    own = tmp_path / "chat_template.json"
    own.write_text(json.dumps({"chat_template": "json"}))
    assert open_bundle(tmp_path).chat_templates == {"default": "json", "tool_use": "b"}
    own.write_text(json.dumps({"chat_template": [{"name": "tool_use", "template": "c"}]}))
    assert open_bundle(tmp_path).chat_templates == {"default": "a", "tool_use": "c"}
    (tmp_path / "chat_template.jinja").write_text("file")
    assert open_bundle(tmp_path).chat_template == "file"


def test_named_templates_are_kept_by_name(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    write_folder(tmp_path, tokenizer_config={"chat_template": named})
    extra = tmp_path / "additional_chat_templates"
    extra.mkdir()
    (extra / "rag.jinja").write_text("c")
    bundle = open_bundle(tmp_path)
    assert bundle.chat_template == "a"
    assert bundle.chat_templates == {"default": "a", "tool_use": "b", "rag": "c"}
    template = bundle.load_template()
    assert template is not None
    assert template.render([]) == template.render([], tools=[]) == "a"
    assert template.render([], tools=[WEATHER]) == "b"


def test_a_template_can_be_checked_before_it_is_needed() -> None:
    ChatTemplate("fine", tool_use="fine too").check()
    for broken in (ChatTemplate("{% if %}"), ChatTemplate("fine", tool_use="{% if %}")):
        with pytest.raises(TemplateError, match="not valid"):
            broken.check()


def test_a_bundle_without_a_template_has_none(tmp_path: Path) -> None:
    write_folder(tmp_path, tokenizer_config={"chat_template": None})
    bundle = open_bundle(tmp_path)
    assert bundle.chat_template is None
    assert bundle.load_template() is None

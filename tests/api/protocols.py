"""One question in every protocol's words, and every protocol's answer in one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

CHAT, LEGACY, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, OLLAMA, GENERATE = "/v1/messages", "/api/chat", "/api/generate"
ROUTES = (CHAT, LEGACY, RESPONSES, MESSAGES, OLLAMA, GENERATE)
#: Those that take a conversation, and so have one prompt.
CONVERSING = (CHAT, RESPONSES, MESSAGES, OLLAMA)

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def body_of(
    route: str,
    text: str = "hi",
    *,
    stream: bool = False,
    model: str = "m",
    limit: int | None = None,
    stop: Sequence[str] = (),
    has_tool: bool = False,
    seed: int | None = None,
    temperature: float | None = None,
) -> dict[str, Any]:
    """One question as each protocol spells it."""
    body: dict[str, Any] = {"model": model, "stream": stream, "temperature": temperature}
    tool = {"name": "get_weather", "description": "w", "parameters": WEATHER}
    match route:
        case "/v1/chat/completions" | "/v1/completions":
            is_chat = route == CHAT
            body |= (
                {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
            )
            body |= {"max_tokens": limit, "stop": list(stop), "seed": seed}
            if stream:
                body["stream_options"] = {"include_usage": True}
            if has_tool:
                body["tools"] = [{"type": "function", "function": tool}]
        case "/v1/responses":
            body |= {"input": text, "max_output_tokens": limit, "stop": list(stop), "seed": seed}
            if has_tool:
                body["tools"] = [{"type": "function", **tool}]
        case "/v1/messages":
            body |= {"messages": [{"role": "user", "content": text}], "max_tokens": limit or 1000}
            body["stop_sequences"] = list(stop)
            if has_tool:
                body["tools"] = [{"name": "get_weather", "description": "w",
                                  "input_schema": WEATHER}]  # fmt: skip
        case _:
            is_chat = route == OLLAMA
            body |= (
                {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
            )
            body["options"] = {
                "temperature": temperature,
                "num_predict": limit,
                "stop": list(stop),
                "seed": seed,
            }
            if has_tool:
                body["tools"] = [{"type": "function", "function": tool}]
    return body


@dataclass
class Answer:
    """`end` is `stop`, `length` or `calls`, whatever the protocol calls it."""

    text: str = ""
    thinking: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    end: str = ""
    prompt_tokens: int = -1
    completion_tokens: int = -1


def answer_of(route: str, response: httpx2.Response) -> Answer:
    assert response.status_code == 200, response.text
    is_json = response.headers["content-type"] == "application/json"
    whole = response.json() if is_json else _joined(route, response.text)
    return _READERS[route](whole)


def _joined(route: str, text: str) -> dict[str, Any]:
    """The whole answer that a stream's frames add up to."""
    if route in (OLLAMA, GENERATE):
        lines = [json.loads(line) for line in text.splitlines()]
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        whole = lines[-1]
        if route == GENERATE:
            return whole | {"response": "".join(line["response"] for line in lines)}
        messages = [line["message"] for line in lines]
        calls = [call for one in messages for call in one.get("tool_calls", ())]
        texts = {
            name: "".join(one.get(name, "") for one in messages) for name in ("content", "thinking")
        }
        return whole | {"message": {**texts, "tool_calls": calls}}
    frames = [frame.rpartition("data: ")[2] for frame in text.split("\n\n") if "data: " in frame]
    if route in (CHAT, LEGACY, RESPONSES):
        assert frames.pop() == "[DONE]"
    events = [json.loads(frame) for frame in frames]
    if route == RESPONSES:
        return events[-1]["response"]
    return _joined_message(events) if route == MESSAGES else _joined_chunks(events)


def _joined_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    message: dict[str, Any] = {}
    for event in events:
        match event:
            case {"type": "message_start", "message": start}:
                message = start
            case {"type": "content_block_start", "content_block": block}:
                blocks.append({**block, "partial": ""})
            case {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}}:
                blocks[-1]["text"] += text
            case {"type": "content_block_delta", "delta": {"thinking": text}}:
                blocks[-1]["thinking"] += text
            case {"type": "content_block_delta", "delta": {"partial_json": text}}:
                blocks[-1]["partial"] += text
            case {"type": "message_delta"}:
                message |= event["delta"] | {"usage": message["usage"] | event["usage"]}
            case _:
                pass
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["partial"])
    return message | {"content": blocks}


def _joined_chunks(events: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, Any]] = {}
    end = None
    for choice in (choice for event in events for choice in event["choices"]):
        delta = choice.get("delta", {"content": choice.get("text", "")})
        end = choice["finish_reason"] or end
        for name in message:
            message[name] += delta.get(name, "")
        for piece in delta.get("tool_calls", ()):
            call = calls.setdefault(piece["index"], {"function": {"name": "", "arguments": ""}})
            for name in call["function"]:
                call["function"][name] += piece["function"].get(name, "")
    message["tool_calls"] = list(calls.values())
    choice = {"message": message, "text": message["content"], "finish_reason": end}
    return {"choices": [choice], "usage": events[-1]["usage"]}


def _read_openai(whole: dict[str, Any]) -> Answer:
    (choice,) = whole["choices"]
    message = choice.get("message", {"content": choice.get("text")})
    return Answer(
        message["content"] or "",
        message.get("reasoning_content") or "",
        [
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        ],
        "calls" if choice["finish_reason"] == "tool_calls" else choice["finish_reason"],
        whole["usage"]["prompt_tokens"],
        whole["usage"]["completion_tokens"],
    )


def _read_responses(whole: dict[str, Any]) -> Answer:
    answer = Answer(
        prompt_tokens=whole["usage"]["input_tokens"],
        completion_tokens=whole["usage"]["output_tokens"],
    )
    for item in whole["output"]:
        match item["type"]:
            case "message":
                answer.text += "".join(part["text"] for part in item["content"])
            case "reasoning":
                parts = item.get("content") or item["summary"]
                answer.thinking += "".join(part["text"] for part in parts)
            case _:
                answer.calls.append((item["name"], json.loads(item["arguments"])))
    is_cut = whole["status"] == "incomplete"
    answer.end = "length" if is_cut else "calls" if answer.calls else "stop"
    return answer


def _read_message(whole: dict[str, Any]) -> Answer:
    ends = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length",
            "tool_use": "calls"}  # fmt: skip
    blocks, usage = whole["content"], whole["usage"]
    inputs = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return Answer(
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"],
        ends[whole["stop_reason"]],
        sum(usage[name] for name in inputs),
        usage["output_tokens"],
    )


def _read_ollama(whole: dict[str, Any]) -> Answer:
    message = whole.get("message") or {"content": whole["response"]}
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    is_call = bool(functions) and whole["done_reason"] == "stop"
    return Answer(
        message["content"],
        message.get("thinking") or "",
        [(function["name"], function["arguments"]) for function in functions],
        "calls" if is_call else whole["done_reason"],
        whole["prompt_eval_count"],
        whole["eval_count"],
    )


_READERS: dict[str, Callable[[dict[str, Any]], Answer]] = {
    CHAT: _read_openai,
    LEGACY: _read_openai,
    RESPONSES: _read_responses,
    MESSAGES: _read_message,
    OLLAMA: _read_ollama,
    GENERATE: _read_ollama,
}


def ask(url: str, route: str, **fields: Any) -> httpx2.Response:
    return post(url, route, body_of(route, **fields))


def post(url: str, route: str, body: Any) -> httpx2.Response:
    # Nothing here is encrypted; to get ready for it takes longer than the request.
    return httpx2.post(f"{url}{route}", json=body, timeout=60, verify=False)

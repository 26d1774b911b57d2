"""Drives a running server with the official Python clients.

    deepinfer serve --port 8000 &
    pip install openai anthropic
    python check.py http://127.0.0.1:8000 demo [KEY [CHECK...]]

Exits with 1 at the first thing that is not as it should be. The model may say what it likes; what is
checked is that the clients understand it.
"""

import json
import sys

import anthropic
import openai

BASE, MODEL = sys.argv[1], sys.argv[2]
KEY = sys.argv[3] if len(sys.argv) > 3 else "none"
# Through a proxy, with a few checks only: what it adds and leaves out is its own.
PROXY = sys.argv[4:]
OPENAI = openai.OpenAI(base_url=f"{BASE}/v1", api_key=KEY, max_retries=0)
ANTHROPIC = anthropic.Anthropic(base_url=BASE, api_key=KEY, max_retries=0)
HELLO = [{"role": "user", "content": "Say hello. 你好 👋"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "Weather of a city", "parameters": PARAMETERS}


def models():
    assert MODEL in [model.id for model in OPENAI.models.list()]
    assert ANTHROPIC.models.list().data[0].id == MODEL


def chat():
    for effort in ["none", "high"]:
        asked = dict(model=MODEL, messages=HELLO, max_tokens=64, temperature=0, seed=1)
        asked["extra_body"] = {"reasoning_effort": effort}
        whole = OPENAI.chat.completions.create(**asked)
        assert whole.choices[0].finish_reason in ("stop", "length")
        assert whole.usage.completion_tokens > 0
        text = thought = ""
        usage = None
        for chunk in OPENAI.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                thought += getattr(choice.delta, "reasoning_content", None) or ""
        assert usage.completion_tokens == whole.usage.completion_tokens
        message = whole.choices[0].message
        assert text == message.content, (text, message.content)
        assert thought == (getattr(message, "reasoning_content", None) or "")
        assert "\ufffd" not in text
        if not PROXY:
            own = usage.model_extra["deepinfer"]
            times = own["queue_ms"] + own["prefill_ms"] + own["decode_ms"]
            assert abs(times - own["total_ms"]) < 0.01, own
            assert own["accepted_tokens"] <= own["drafted_tokens"], own
            # The same prompt again comes from the prefix cache.
            assert usage.prompt_tokens_details.cached_tokens > 0, usage


def logprobs():
    whole = OPENAI.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=8, logprobs=True, top_logprobs=3, n=2,
        extra_body={"reasoning_effort": "none"},
    )
    assert len(whole.choices) == 2
    for choice in whole.choices:
        for entry in choice.logprobs.content:
            assert entry.logprob <= 0 and len(entry.top_logprobs) == 3


def tools():
    asked = dict(model=MODEL, tools=[{"type": "function", "function": TOOL}], max_tokens=64)
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    first = OPENAI.chat.completions.create(messages=messages, **asked).choices[0].message
    for call in first.tool_calls or []:
        json.loads(call.function.arguments)
    arguments = {}
    for chunk in OPENAI.chat.completions.create(messages=messages, stream=True, **asked):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                arguments[call.index] = arguments.get(call.index, "") + call.function.arguments
    for text in arguments.values():
        json.loads(text)
    # A history with a call, as the client itself writes it.
    messages.append(
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function",
             "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]}
    )
    messages.append({"role": "tool", "tool_call_id": "c1", "content": "sunny"})
    OPENAI.chat.completions.create(messages=messages, **asked)


def completions():
    whole = OPENAI.completions.create(model=MODEL, prompt="Once upon", max_tokens=12, temperature=0)
    chunks = OPENAI.completions.create(
        model=MODEL, prompt="Once upon", max_tokens=12, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def responses():
    first = OPENAI.responses.create(model=MODEL, input="Say hello.", max_output_tokens=64)
    assert first.status in ("completed", "incomplete") and first.usage.output_tokens > 0
    assert OPENAI.responses.retrieve(first.id).id == first.id
    second = OPENAI.responses.create(
        model=MODEL, input="Again.", previous_response_id=first.id, max_output_tokens=64,
        tools=[{"type": "function", "strict": False, **TOOL}],
    )
    assert second.previous_response_id == first.id
    text, last = "", None
    with OPENAI.responses.stream(
        model=MODEL, input="Say hello.", max_output_tokens=64, temperature=0
    ) as stream:
        for event in stream:
            last = event.type
            if event.type == "response.output_text.delta":
                text += event.delta
        assert text == stream.get_final_response().output_text
    assert last in ("response.completed", "response.incomplete"), last
    if not PROXY:
        asked = dict(model=MODEL, input="Say hello.")
        assert OPENAI.responses.input_tokens.count(**asked).input_tokens == first.usage.input_tokens
        (item,) = OPENAI.responses.input_items.list(first.id, order="asc", limit=5).data
        assert item.content[0].text == "Say hello.", item
    OPENAI.responses.delete(first.id)
    try:
        OPENAI.responses.retrieve(first.id)
    except openai.NotFoundError:
        pass
    else:
        raise AssertionError("a deleted response is still there")


def messages():
    tool = {"name": "weather", "description": "Weather", "input_schema": PARAMETERS}
    for thinking in [{"type": "disabled"}, {"type": "enabled", "budget_tokens": 16}]:
        asked = dict(model=MODEL, max_tokens=64, messages=HELLO, thinking=thinking, tools=[tool])
        whole = ANTHROPIC.messages.create(**asked)
        kinds = [block.type for block in whole.content]
        assert thinking["type"] == "enabled" or "thinking" not in kinds
        with ANTHROPIC.messages.stream(**asked) as stream:
            for _ in stream:
                pass
            final = stream.get_final_message()
        assert final.stop_reason and final.usage.output_tokens > 0
    if not PROXY:
        count = ANTHROPIC.messages.count_tokens(model=MODEL, messages=HELLO)
        assert count.input_tokens > 0


def schema():
    """Answers in a form, and calls that must come, in the fields of each protocol."""
    text = {"type": "string", "maxLength": 12}
    form = {"type": "object", "properties": {"city": text, "warm": {"type": "boolean"}},
            "required": ["city", "warm"], "additionalProperties": False}
    ask = [{"role": "user", "content": "A city, and whether it is warm there."}]
    brief = {"reasoning_effort": "none"}

    def check(answer):
        value = json.loads(answer)
        assert set(value) == {"city", "warm"} and isinstance(value["warm"], bool), value

    asked = dict(model=MODEL, messages=ask, max_tokens=200, seed=1, extra_body=brief)
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": form}}
    whole = OPENAI.chat.completions.create(response_format=wanted, **asked)
    check(whole.choices[0].message.content)
    chunks = OPENAI.chat.completions.create(response_format=wanted, stream=True, **asked)
    check("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))

    call = dict(name="weather", description="Weather", strict=True,
                parameters={**PARAMETERS, "properties": {"city": text}, "additionalProperties": False})
    whole = OPENAI.chat.completions.create(
        tools=[{"type": "function", "function": call}],
        tool_choice={"type": "function", "function": {"name": "weather"}}, **asked,
    )
    assert whole.choices[0].finish_reason == "tool_calls", whole
    made = whole.choices[0].message.tool_calls[0].function
    assert made.name == "weather" and "city" in json.loads(made.arguments), made

    response = OPENAI.responses.create(
        model=MODEL, input=ask, max_output_tokens=200, reasoning={"effort": "none"},
        text={"format": {"type": "json_schema", "name": "city", "strict": True, "schema": form}},
    )
    check(response.output_text)
    message = ANTHROPIC.messages.create(
        model=MODEL, messages=ask, max_tokens=200,
        output_config={"format": {"type": "json_schema", "schema": form}},
    )
    check(message.content[0].text)


def refusals():
    for kind, extra in [
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"extra_body": {"banana": 1}}),
        (openai.NotFoundError, {"model": "nobody"}),
    ]:
        try:
            OPENAI.chat.completions.create(**{"model": MODEL, "messages": HELLO, **extra})
        except kind as error:
            assert error.body["message"]
        else:
            raise AssertionError(extra)
    try:
        ANTHROPIC.messages.create(model="nobody", max_tokens=1, messages=HELLO)
    except anthropic.NotFoundError:
        pass
    else:
        raise AssertionError("an unknown model answers")


CHECKS = [models, chat, logprobs, tools, completions, responses, messages, schema, refusals]
for check in CHECKS:
    if not PROXY or check.__name__ in PROXY:
        check()
        print(f"{check.__name__}: ok", flush=True)

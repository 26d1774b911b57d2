"""The V4.1 prompt format, as the public `deepseek-recipe-encoding` crate (0.2.0) renders it.

A rendered conversation is a list of parts: a `Special` is one token of the added vocabulary, a
`str` is plain text. Neighbouring plain text is joined, because the encoder sees each stretch
between two special tokens as one text. `answer` marks what the model must learn to write.
"""

import json

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK, DSML, IMAGE = "<think>", "</think>", "｜DSML｜", "<｜image｜>"
SPECIALS_IN_USE = [BOS, EOS, SYSTEM, USER, ASSISTANT, THINK, END_THINK, DSML, IMAGE]
EFFORT = {"low": "50", "high": "75", "max": "100"}


class Special(str):
    """The spelling of a special token."""


class Writer:
    """Collects (part, answer) pairs, joining neighbouring plain text of the same kind."""

    def __init__(self):
        self.parts = []

    def special(self, token, answer=False):
        self.parts.append((Special(token), answer))

    def text(self, text, answer=False):
        if not text:
            return
        if self.parts and not isinstance(self.parts[-1][0], Special) and self.parts[-1][1] == answer:
            self.parts[-1] = (self.parts[-1][0] + text, answer)
        else:
            self.parts.append((text, answer))

    def mixed(self, text, answer=False):
        """Text in which DSML and image markers are special tokens."""
        for i, piece in enumerate(text.replace(IMAGE, "\0" + IMAGE + "\0").replace(DSML, "\0" + DSML + "\0").split("\0")):
            if piece in (IMAGE, DSML) and i % 2:
                self.special(piece, answer)
            else:
                self.text(piece, answer)


def tool_instructions(tools):
    call, invoke, parameter = f"{DSML} calls", f"{DSML} invoke", f"{DSML} parameter"
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    # The instructions hold the think markers as special tokens too: {T} and {E} below.
    return f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{call}>" block like the following:

<{call}>
<{invoke} name="$TOOL_NAME">
<{parameter} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{parameter}>
...
</{invoke}>
<{invoke} name="$TOOL_NAME2">
...
</{invoke}>
</{call}>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {{T}}), you MUST output your complete reasoning inside {{T}}...{{E}} BEFORE any tool calls or final response.

Otherwise, output directly after {{E}} with tool calls or final response.

### Available Tool Schemas

""", schemas + "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"


def tool_calls_text(calls):
    blocks = []
    for call in calls:
        arguments = "\n".join(
            f'<{DSML} parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
            f'{value if isinstance(value, str) else json.dumps(value)}</{DSML} parameter>'
            for key, value in call["arguments"].items())
        blocks.append(f'<{DSML} invoke name="{call["name"]}">\n{arguments}\n</{DSML} invoke>')
    return f"\n\n<{DSML} calls>\n" + "\n".join(blocks) + f"\n</{DSML} calls>"


def render(messages, thinking=False, effort=None, tools=None, json_object=False, generate=False):
    """Parts of a conversation. Every assistant message is an answer to learn.

    `generate` ends with the opening of the next assistant turn instead of an answer."""
    out = Writer()
    messages = list(messages)
    if (tools or json_object) and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": ""})
    out.special(BOS)
    keep_thinking = thinking and bool(tools)
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
    for i, message in enumerate(messages):
        role, previous = message["role"], messages[i - 1]["role"] if i else None
        if i == 0 and (thinking or role == "system"):
            out.special(SYSTEM)
        if i == 0 and thinking:
            out.text(f"Reasoning Effort: {EFFORT[effort or 'high']} (range 1-100, the higher the value, the more thorough the reasoning)\n\n")
        if role == "system":
            if i:
                out.special(SYSTEM)
            out.text(message["content"])
            if i == 0 and tools:
                head, tail = tool_instructions(tools)
                out.text("\n\n")
                for piece in head.replace("{T}", "\0T\0").replace("{E}", "\0E\0").split("\0"):
                    if piece in ("T", "E"):
                        out.special(THINK if piece == "T" else END_THINK)
                    else:
                        out.mixed(piece)
                out.text(tail)
            if i == 0 and json_object:
                out.text('\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{"type": "json_object"}')
        elif role in ("user", "tool"):
            if previous in ("user", "tool"):
                out.text("\n\n")
            else:
                out.special(USER)
            out.mixed(message["content"] if role == "user" else f"<tool_result>{message['content']}</tool_result>")
        else:
            out.special(ASSISTANT)
            if thinking and (keep_thinking or (i == last and not generate)):
                out.special(THINK)
                out.text(message.get("reasoning", ""), True)
                out.special(END_THINK, True)
            else:
                out.special(END_THINK)
            out.mixed(message["content"], True)
            if message.get("tool_calls"):
                out.mixed(tool_calls_text(message["tool_calls"]), True)
            out.special(EOS, True)
    if generate:
        out.special(ASSISTANT)
        out.special(THINK if thinking else END_THINK)
    return out.parts

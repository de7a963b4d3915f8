"""Tools for models whose chat template knows none, in the words of Hermes.

Described in the system message; calls and results are put into the messages' text. How
well such a model calls is its own matter: a grammar can hold it to the form.
"""

import json
from collections.abc import Sequence
from typing import Any

from kvtide.gateway.reading import CALL_END, CALL_START
from kvtide.gateway.text.chat import ChatMessage

_INTRODUCTION = """\
You may call functions to help the user. They are described as JSON between the tags:
<tools>
{tools}
</tools>
To call one, write its name and arguments as JSON between tags, and nothing else:
{start}
{{"name": <name>, "arguments": <arguments>}}
{end}"""


def spelled_out(
    messages: Sequence[ChatMessage], tools: Sequence[ChatMessage]
) -> list[dict[str, Any]]:
    """The same chat in which tools, calls and results are text."""
    told = [_told(message) for message in messages]
    if not tools:
        return told
    introduction = _INTRODUCTION.format(
        tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools),
        start=CALL_START,
        end=CALL_END,
    )
    if told and told[0]["role"] == "system":
        first = {**told[0], "content": f"{told[0]['content']}\n\n{introduction}"}
        return [first, *told[1:]]
    return [{"role": "system", "content": introduction}, *told]


def _told(message: ChatMessage) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    if message.get("role") == "tool":
        content = f"<tool_response>\n{message.get('content', '')}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    if not calls:
        return kept
    kept["content"] = "\n".join([*filter(None, [message.get("content")]), *calls])
    return kept


def _call(call: ChatMessage) -> str:
    function = call["function"]
    body = {"name": function["name"], "arguments": function["arguments"]}
    return f"{CALL_START}\n{json.dumps(body, ensure_ascii=False)}\n{CALL_END}"

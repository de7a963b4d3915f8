"""The tools of a request, whichever API named them, and how they may be used."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtide.gateway.api.problems import bad_param

MAX_TOOLS = 128
MAX_NAME_CHARS = 128

JsonSchema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. ``strict``: its schema must hold."""

    name: str
    description: str = ""
    parameters: JsonSchema = field(default_factory=dict[str, Any])
    strict: bool = False

    @property
    def in_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What the model may do with ``tools``; none: it can't call any.

    ``must``: the answer is calls and nothing else. ``only`` names the one tool that it
    must call, once. Without ``parallel`` there is at most one call.
    """

    tools: tuple[Tool, ...] = ()
    must: bool = False
    only: str = ""
    parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that an answer may call."""
        if not self.only:
            return self.tools
        return tuple(tool for tool in self.tools if tool.name == self.only)

    @property
    def many(self) -> bool:
        """Whether an answer may hold more than one call."""
        return self.parallel and not self.only

    @property
    def names(self) -> list[str]:
        """Of the tools that an answer may call."""
        return [tool.name for tool in self.callable]


NO_TOOLS = ToolUse()


def check_tools(tools: Sequence[Tool], param: str = "tools") -> None:
    """Refuse what can't be told apart, or is too much.

    Raises:
        ApiError: 400 that names the field.
    """
    if len(tools) > MAX_TOOLS:
        raise bad_param(param, f"{param}: at most {MAX_TOOLS} tools are taken")
    seen: set[str] = set()
    for number, tool in enumerate(tools):
        place = f"{param}[{number}].name"
        if tool.name in seen:
            raise bad_param(place, f"{place}: two tools are named {tool.name[:64]!r}")
        seen.add(tool.name)


def chosen(use: ToolUse, param: str = "tool_choice") -> ToolUse:
    """``use`` if its tools are enough for what it says.

    Raises:
        ApiError: 400: a call is wanted of what is not there.
    """
    check_tools(use.tools)
    if use.only and use.only not in [tool.name for tool in use.tools]:
        raise bad_param(param, f"{param}: there is no tool named {use.only[:64]!r}")
    if use.must and not use.tools:
        raise bad_param(param, f"{param}: a call is required, but tools is empty")
    return use

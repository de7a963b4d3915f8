"""Parameters that would change the answer and are not served: refused, never ignored."""

from collections.abc import Mapping

from kvtide.gateway.api.problems import ApiError, bad_param

_OFF: tuple[object, ...] = (None, False)
_EMPTY: tuple[object, ...] = (None, [], {})

HARMLESS: Mapping[str, tuple[object, ...]] = {
    "tools": _EMPTY,
    "functions": _EMPTY,
    "function_call": (None, "none", "auto"),
    "tool_choice": (None, "none", "auto"),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "length_penalty": (None, 1),
    "best_of": (None, 1),
    "use_beam_search": _OFF,
    "suffix": (None, ""),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "guided_whitespace_pattern": (None,),
    "structural_tag": (None,),
    "bad_words": _EMPTY,
    "allowed_token_ids": (None,),
    "truncate_prompt_tokens": (None,),
    "include_stop_str_in_output": _OFF,
    "skip_special_tokens": (None, True),
    "chat_template": (None,),
    "documents": _EMPTY,
}
"""Field → values that mean "as usual". Any other value is refused by name."""


def refuse_unserved(extra: Mapping[str, object]) -> None:
    """Look through the fields of a completion that no schema knows.

    Raises:
        ApiError: 400 that names the field.
    """
    refuse_others(extra, HARMLESS)


def refuse_others(
    extra: Mapping[str, object], usual: Mapping[str, tuple[object, ...]]
) -> None:
    """Refuse fields that ``usual`` names with other values than it has for them.

    Raises:
        ApiError: 400 that names the field.
    """
    for name, value in extra.items():
        harmless = usual.get(name)
        if harmless is not None and not _is_one_of(value, harmless):
            raise _refusal(name)


def _is_one_of(value: object, harmless: tuple[object, ...]) -> bool:
    # True == 1 in Python, but not to a client
    return any(
        value == usual and isinstance(value, bool) == isinstance(usual, bool)
        for usual in harmless
    )


def _refusal(name: str) -> ApiError:
    return bad_param(
        name, f"{name} is not supported by this server", code="unsupported_parameter"
    )

"""The one path from a parsed body to its answer, for every API that asks a chat."""

from collections.abc import Callable

from starlette.responses import Response

from kvtide.gateway.api.answer_response import AnswerResponse
from kvtide.gateway.api.asking import Prompts, check_wanted, questions_of
from kvtide.gateway.api.dialect import Dialect, Frame
from kvtide.gateway.api.door import Door
from kvtide.gateway.api.wanted import Asker, Wanted
from kvtide.gateway.text.chat import Chat


async def answer_chat(
    door: Door,
    wanted: Wanted,
    chat: Chat,
    asker: Asker,
    dialect: Callable[[Frame], Dialect],
    frame: Frame,
    *,
    stream: bool,
) -> Response:
    """Tokenise, and have it answered in ``dialect`` when the response is sent.

    Raises:
        ApiError: 400 or 404 that names the field.
        UnavailableError: not now.
        PromptError: the messages make no prompt.
    """
    check_wanted(door, wanted, prompts=1)
    ids = await door.served.encode_chat(chat)
    prompts = Prompts([ids], chat.param, is_chat=True, pictures=chat.pictures)
    questions = await questions_of(door, wanted, prompts, asker)
    return AnswerResponse(door, questions, dialect(frame), stream=stream)


def frame_of(
    door: Door,
    asker: Asker,
    prefix: str,
    model: str,
    *,
    include_usage: bool = False,
    show_ids: bool = False,
    show_logprobs: bool = False,
) -> Frame:
    """What all pieces of the answer share; its id is ``prefix`` and the request's."""
    facts = door.served.find_facts(model)
    return Frame(
        id=prefix + asker.request_id,
        created=int(door.gateway.node.clock.wall()),
        model=model,
        fingerprint=f"kvtide-{facts.digest[:12]}" if facts is not None else "kvtide",
        include_usage=include_usage,
        show_ids=show_ids,
        show_logprobs=show_logprobs,
        show_insight=asker.wishes.debug,
        show_progress=asker.wishes.progress,
    )

"""What clients hear of their prompt before the first token, if they ask: comments."""

from kvtide.gateway.api.answers import Answers, Choice

POLL_S = 0.1


class Progress:
    """Follows the answers to one request. ``poll_s`` is how often to look for news."""

    def __init__(self, answers: Answers, *, asked: bool) -> None:
        """Nothing was told yet; not ``asked``: nothing ever is."""
        self._answers = answers
        self._asked = asked
        self._told: dict[int, str] = {}

    @property
    def poll_s(self) -> float:
        """Infinite once all have begun to answer."""
        waits = self._asked and any(not c.ids for c in self._answers.choices)
        return POLL_S if waits else float("inf")

    def news(self) -> bytes:
        """One comment for each answer whose prompt came further."""
        if not self._asked:
            return b""
        lines: list[str] = []
        for choice in self._answers.choices:
            stage = _stage(choice)
            if stage and self._told.get(choice.index) != stage:
                self._told[choice.index] = stage
                lines.append(f": kvtide choice={choice.index} {stage}\n\n")
        return "".join(lines).encode()


def _stage(choice: Choice) -> str:
    """Where the prompt is; nothing once there are tokens."""
    if choice.ids:
        return ""
    queue_ms = choice.session.life.queue_ms
    if queue_ms is not None:
        return f"stage=prefilled queue_ms={queue_ms:.1f}"
    expected = choice.estimate
    if expected is None:
        return "stage=placing"
    return (
        f"stage=prefill attempt={choice.session.life.attempt} "
        f"expected_hit_tokens={expected.hit_tokens} "
        f"expected_queue_ms={expected.queue_ms:.1f} "
        f"expected_ttft_ms={expected.ttft_ms:.1f}"
    )

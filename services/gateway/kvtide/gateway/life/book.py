"""What really happened to a request: times and counts for usage and the record."""

from kvtide.bus.messages import Outcome, RequestEnded
from kvtide.gateway.life.spec import RequestSpec, Usage


class Book:
    """Counts for one request. Times are monotonic seconds in, milliseconds out."""

    def __init__(self, spec: RequestSpec) -> None:
        """Nothing has happened yet."""
        self._spec = spec
        self._started_s = 0.0
        self._first_s: float | None = None
        self._last_s = 0.0
        self._reused: tuple[int, int] | None = None
        self._prompt_tokens = len(spec.prompt)
        self.queue_ms: float | None = None

    def started(self, now_s: float) -> None:
        """The request was submitted."""
        self._started_s = now_s

    def token(self, now_s: float) -> None:
        """A token (or several at once) has come."""
        if self._first_s is None:
            self._first_s = now_s
        self._last_s = now_s

    def reused(self, attempt: int, tokens: int | None) -> None:
        """A worker says how much of the prompt came from the pool.

        The first attempt that says it counts. Of its two workers the lower number is
        taken: what either had to compute was not cached.
        """
        if tokens is None:
            return
        if self._reused is None:
            self._reused = (attempt, tokens)
        elif self._reused[0] == attempt:
            self._reused = (attempt, min(tokens, self._reused[1]))

    def prompt(self, tokens: int | None) -> None:
        """A worker says how long the prompt came out; None: as it was sent."""
        if tokens is not None:
            self._prompt_tokens = max(tokens, len(self._spec.prompt))

    @property
    def ttft_ms(self) -> float | None:
        """From submission to the first token."""
        if self._first_s is None:
            return None
        return (self._first_s - self._started_s) * 1000

    def tbt_ms(self, output_tokens: int) -> float | None:
        """The mean time between two tokens."""
        if self._first_s is None or output_tokens < 2:  # noqa: PLR2004 - between two
            return None
        return (self._last_s - self._first_s) * 1000 / (output_tokens - 1)

    def usage(self, output_tokens: int) -> Usage:
        """The usage so far."""
        prompt = self._prompt_tokens
        reused = self._reused[1] if self._reused is not None else 0
        return Usage(prompt, output_tokens, min(max(reused, 0), prompt))

    def record(
        self,
        outcome: Outcome,
        code: str,
        *,
        attempt: int,
        output_tokens: int,
        now_s: float,
    ) -> RequestEnded:
        """The closing line."""
        spec = self._spec
        usage = self.usage(output_tokens)
        return RequestEnded(
            request=spec.request,
            attempt=attempt,
            gateway=spec.gateway,
            tenant=spec.tenant,
            model=spec.model,
            outcome=outcome,
            code=code,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=output_tokens,
            ttft_ms=self.ttft_ms,
            total_ms=(now_s - self._started_s) * 1000,
            tbt_ms=self.tbt_ms(output_tokens),
        )

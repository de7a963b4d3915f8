"""What a class of workers takes for its work, fitted to what its workers report."""

from dataclasses import dataclass

from kvtide.policy.curves import LoadCurve, PrefillCurve, StepCurve
from kvtide.policy.fitting import FitRules, RobustFit

CONFIDENT = 20
"""Samples from which on a fit is believed more than a worker's mean rate."""

_LEAST_BYTE_MS = 1e-12


@dataclass(frozen=True, slots=True)
class ClassProfile:
    """The curves of one class as they were measured offline; None: nothing is known."""

    prefill: PrefillCurve | None = None
    loading: LoadCurve | None = None
    step: StepCurve | None = None


@dataclass(frozen=True, slots=True)
class FitErrors:
    """Median relative errors of each fit; None before anything was measured."""

    prefill: float | None
    loading: float | None
    step: float | None


_PREFILL_SEED = PrefillCurve(5.0, 1.0, 0.0)
_LOAD_SEED = LoadCurve(0.5, 1e-6, 4e-6)
_STEP_SEED = StepCurve(20.0, 3.0, 0.0)
_PAIR_SPREAD_MS = 1e-4


class ClassCosts:
    """Three fits; each gives its curve once it was profiled or has seen enough."""

    def __init__(
        self, profile: ClassProfile | None = None, rules: FitRules | None = None
    ) -> None:
        """``profile`` is where the fits start."""
        self._profile = profile or ClassProfile()
        prefill = self._profile.prefill or _PREFILL_SEED
        loading = self._profile.loading or _LOAD_SEED
        step = self._profile.step or _STEP_SEED
        self._prefill = RobustFit(
            (prefill.fixed_ms, prefill.token_ms, prefill.pair_ms),
            (
                max(prefill.fixed_ms, 1.0),
                max(prefill.token_ms, 1e-6),
                max(prefill.pair_ms, prefill.token_ms * _PAIR_SPREAD_MS),
            ),
            rules,
        )
        self._loading = RobustFit(
            (loading.fixed_ms, loading.near_byte_ms, loading.far_byte_ms),
            (
                max(loading.fixed_ms, 0.1),
                max(loading.near_byte_ms, _LEAST_BYTE_MS),
                max(loading.far_byte_ms, _LEAST_BYTE_MS),
            ),
            rules,
        )
        self._step = RobustFit(
            (step.fixed_ms, step.row_ms, step.pair_ms),
            (
                max(step.fixed_ms, 0.1),
                max(step.row_ms, 0.01),
                max(step.pair_ms, _PAIR_SPREAD_MS),
            ),
            rules,
        )

    def prefilled(self, new: float, attended: float, ms: float) -> None:
        """Computing ``new`` tokens that attended to so many pairs took ``ms``."""
        if new > 0:
            self._prefill.add((1.0, new, attended), ms)

    def loaded(
        self, near_bytes: float, far_bytes: float, flows: float, ms: float
    ) -> None:
        """A load took ``ms`` while ``flows`` others used its link."""
        if near_bytes + far_bytes > 0:
            self._loading.add((1.0, near_bytes, far_bytes * (1 + flows)), ms)

    def stepped(self, rows: float, kv_tokens: float, ms: float) -> None:
        """A decode step of ``rows`` requests with so many tokens of KV took ``ms``."""
        if rows > 0:
            self._step.add((1.0, rows, kv_tokens), ms)

    @property
    def believed(self) -> int:
        """How many of the curves are."""
        profile = self._profile
        return (
            _believed(profile.prefill, self._prefill)
            + _believed(profile.loading, self._loading)
            + _believed(profile.step, self._step)
        )

    @property
    def prefill(self) -> PrefillCurve | None:
        """The curve, if it is believed."""
        if not _believed(self._profile.prefill, self._prefill):
            return None
        return PrefillCurve(*self._prefill.theta)

    @property
    def loading(self) -> LoadCurve | None:
        """The curve, if it is believed."""
        if not _believed(self._profile.loading, self._loading):
            return None
        fixed_ms, near_ms, far_ms = self._loading.theta
        return LoadCurve(
            fixed_ms, max(near_ms, _LEAST_BYTE_MS), max(far_ms, _LEAST_BYTE_MS)
        )

    @property
    def step(self) -> StepCurve | None:
        """The curve, if it is believed."""
        if not _believed(self._profile.step, self._step):
            return None
        return StepCurve(*self._step.theta)

    @property
    def profile(self) -> ClassProfile:
        """What is believed now, as it may seed others."""
        return ClassProfile(self.prefill, self.loading, self.step)

    @property
    def errors(self) -> FitErrors:
        """How far off each is."""
        return FitErrors(self._prefill.error, self._loading.error, self._step.error)

    @property
    def samples(self) -> int:
        """Samples of any kind."""
        return self._prefill.samples + self._loading.samples + self._step.samples


def _believed(profiled: object, fit: RobustFit) -> bool:
    """Whether a curve was profiled, or its fit has seen enough."""
    return profiled is not None or fit.samples >= CONFIDENT

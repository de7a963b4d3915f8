"""What each class of workers takes for its work, fitted to what beats report.

A worker whose class isn't known is a class of its own.
"""

from collections import OrderedDict
from collections.abc import Mapping

from kvtide.bus.messages import Beat, CostsKnown, DecodeLoad, PrefillLoad
from kvtide.policy import CostSeeds, LoadCurve, PrefillCurve, StepCurve
from kvtide.policy.class_costs import ClassCosts, ClassProfile, FitErrors
from kvtide.policy.curves import load_curve, prefill_curve
from kvtide.policy.profiles import write_profiles

MAX_CLASSES = 4096


class Costs:
    """The fits of all classes. Bounded: the class that was silent longest goes first."""

    def __init__(
        self,
        seeds: CostSeeds | None = None,
        profiles: Mapping[str, ClassProfile] | None = None,
    ) -> None:
        """``profiles`` by class, where the fits start; ``""`` is that of all others."""
        self.seeds = seeds or CostSeeds()
        self._profiles = dict(profiles or {})
        self._classes: OrderedDict[str, ClassCosts] = OrderedDict()

    def seen(self, beat: Beat, before: Beat | None) -> bool:
        """Take the samples of a beat, unless the one before had them already.

        True if something of the worker's class is believed from now on that was not:
        what is thought of the others of the class is no longer right.
        """
        believed = self._believed(beat)
        self._sampled(beat, before)
        return self._believed(beat) > believed

    def _believed(self, beat: Beat) -> int:
        known = self._classes.get(class_of(beat))
        return known.believed if known is not None else 0

    def _sampled(self, beat: Beat, before: Beat | None) -> None:
        stepped = before is None or before.steps != beat.steps
        for load in beat.load:
            if isinstance(load, PrefillLoad):
                self._loaded(beat, before, load)
            if not isinstance(load, PrefillLoad | DecodeLoad) or load.step is None:
                continue
            step = load.step
            if stepped and isinstance(load, PrefillLoad):
                self._of(beat).prefilled(step.new, step.attended, step.ms)
            elif stepped:
                self._of(beat).stepped(step.rows, step.attended, step.ms)

    def _loaded(self, beat: Beat, before: Beat | None, load: PrefillLoad) -> None:
        sample = load.load
        earlier = before.load if before is not None else ()
        known = [each.loads for each in earlier if isinstance(each, PrefillLoad)]
        if sample is not None and load.loads not in known:
            self._of(beat).loaded(
                sample.near_bytes, sample.far_bytes, sample.flows, sample.ms
            )

    def of_prefill(
        self, beat: Beat, load: PrefillLoad
    ) -> tuple[PrefillCurve, LoadCurve]:
        """What was fitted, else what the worker reports, else the seeds."""
        fits = self._known(beat)
        curve = fits.prefill if fits is not None else None
        loading = fits.loading if fits is not None else None
        return (
            curve or prefill_curve(max(0.0, load.tokens_per_s), self.seeds),
            loading or load_curve(max(0.0, load.load_bytes_per_s), self.seeds),
        )

    def of_decode(self, beat: Beat) -> StepCurve | None:
        """What was fitted, if enough was seen."""
        fits = self._known(beat)
        return fits.step if fits is not None else None

    def profiles(self) -> dict[str, ClassProfile]:
        """What is believed of each class now."""
        return {name: fits.profile for name, fits in self._classes.items()}

    def known(self) -> CostsKnown:
        """What is believed, as a message."""
        return CostsKnown(
            profiles=write_profiles(self.profiles()),
            samples=sum(fits.samples for fits in self._classes.values()),
        )

    def errors(self) -> dict[str, FitErrors]:
        """How far off each class's fits are."""
        return {name: fits.errors for name, fits in self._classes.items()}

    def _known(self, beat: Beat) -> ClassCosts | None:
        name = class_of(beat)
        known = self._classes.get(name)
        if known is None and (name in self._profiles or "" in self._profiles):
            return self._of(beat)
        return known

    def _of(self, beat: Beat) -> ClassCosts:
        name = class_of(beat)
        fits = self._classes.get(name)
        if fits is None:
            profile = self._profiles.get(name, self._profiles.get(""))
            fits = self._classes[name] = ClassCosts(profile)
            if len(self._classes) > MAX_CLASSES:
                self._classes.popitem(last=False)
        self._classes.move_to_end(name)
        return fits


def class_of(beat: Beat) -> str:
    """The class that a worker says it is of, else itself."""
    return beat.worker_class or beat.node.node

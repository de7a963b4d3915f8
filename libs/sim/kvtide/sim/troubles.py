"""The kinds of trouble that every simulation campaign goes through, by name."""

from kvtide.bus import NetworkFaults
from kvtide.sim.scenario import Trouble

_MILD = NetworkFaults(loss=0.01, duplicate=0.01, delay_max_s=0.01)

TROUBLES: dict[str, Trouble] = {
    "none": Trouble(),
    "loss": Trouble(NetworkFaults(loss=0.05, duplicate=0.05, delay_max_s=0.02)),
    "wild": Trouble(
        NetworkFaults(loss=0.15, duplicate=0.1, delay_max_s=0.3, reorder=True)
    ),
    "crash": Trouble(_MILD, crashes=1),
    "pause": Trouble(_MILD, pauses=3),
    "stall": Trouble(_MILD, stalls=3),
    "cuts": Trouble(_MILD, cuts=3),
    "leave": Trouble(_MILD, leavers=0.7),
    "all": Trouble(
        NetworkFaults(loss=0.05, duplicate=0.05, delay_max_s=0.1, reorder=True),
        crashes=1,
        pauses=1,
        cuts=1,
        leavers=0.2,
    ),
}
"""Loss, repetition, delay, reordering; crashes of each role; pauses, cuts, leavers."""

"""Virtual time, a network with faults, and whole clusters of production machines in it.

``Scenario(seed, trouble).run()`` simulates a cluster and judges it: each request is
answered exactly once, with the tokens of an undisturbed run, and nothing is held in the
end. One seed, one history.
"""

from kvtide.sim.checker import Violation
from kvtide.sim.cluster import Parts, Shape, SimCluster
from kvtide.sim.kernel import Kernel, Life, Promise, SimClock
from kvtide.sim.mischief import Trouble
from kvtide.sim.net import SimBus, SimNet
from kvtide.sim.scenario import Report, Scenario
from kvtide.sim.troubles import TROUBLES, drawn

__all__ = [
    "TROUBLES",
    "Kernel",
    "Life",
    "Parts",
    "Promise",
    "Report",
    "Scenario",
    "Shape",
    "SimBus",
    "SimClock",
    "SimCluster",
    "SimNet",
    "Trouble",
    "Violation",
    "drawn",
]

"""Names for nodes that nobody named: the role and a word that people can say."""

import random

_WORDS = """
alder amber anchor arch aspen atlas basin bay beach birch bluff bolt breeze brook
cape cedar chalk cliff cloud coral cove crane creek crest delta dune eagle ebb
ember fern fjord flint fog ford gale glade grove gull harbor haze heron hill inlet
iris isle jade jetty kelp kite lagoon lake lark ledge lime linden loch lotus lynx
maple marsh mesa mist moor moss oak oasis opal orca otter pearl pebble pier pine
plover pond quartz quay raven reed reef ridge river robin sage sail sand seal shell
shoal shore slate sound spray spruce stone surf swan swell teal tern thorn thyme
tide topaz trout vale violet wave willow wren yarrow
""".split()  # noqa: SIM905 - a paragraph of words reads better than a list


def random_node_name(role: str, source: random.Random | None = None) -> str:
    """``decode-heron-4f``: unique enough within a cluster, fit for a subject.

    The clock of one machine may start many nodes at once, so two hex digits follow.
    """
    source = source or random.SystemRandom()
    word = source.choice(_WORDS)
    return f"{role}-{word}-{source.randrange(256):02x}"

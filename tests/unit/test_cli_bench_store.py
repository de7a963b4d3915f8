"""``kvtide bench store``: figures, bars and the index that is measured."""

from kvtide.cli.commands.bench_store import markdown
from kvtide.cli.store_bench.index_growth import measure
from kvtide.cli.store_bench.measures import Measure, copy_and_hash
from kvtide.cli.store_bench.rig import LAYOUT


def test_a_bar_is_of_the_ratio_if_there_is_one_and_may_be_a_most() -> None:
    ratio = Measure("read", 5.0, "GiB/s", 0.9, "copy", 0.85)
    assert ratio.met
    assert not Measure("read", 5.0, "GiB/s", 0.8, "copy", 0.85).met
    assert Measure("index", 399.0, "bytes/block", bar=-400.0).met
    assert not Measure("index", 401.0, "bytes/block", bar=-400.0).met
    assert Measure("copy", 5.0, "GiB/s").met is None


def test_the_table_says_what_is_missed() -> None:
    text = markdown(
        [
            Measure("read", 5.0, "GiB/s", 0.8, "copy", 0.85),
            Measure("index", 12_345.0, "bytes/block", bar=-400.0),
        ]
    )
    assert "| read | 5.00 GiB/s | 0.80 | copy | at least 0.85: MISSED |" in text
    assert "| index | 12,345 bytes/block |  |  | at most 400: MISSED |" in text


def test_the_index_is_measured_with_the_stores_own_machine() -> None:
    found = measure(3000)
    assert found["blocks"] == 3000
    assert found["eviction_us"] > 0
    assert found["presence_queries_per_s"] > 0
    assert found["presence_keys_per_s"] > found["presence_queries_per_s"]


def test_the_yardstick_copies_every_byte() -> None:
    size = LAYOUT.parts * LAYOUT.part_bytes
    assert LAYOUT.slot_bytes - size < 4096
    assert size == 1536 << 10
    source, target = memoryview(bytearray(b"\7" * size)), memoryview(bytearray(size))
    copy_and_hash([source], [target])
    assert target == source

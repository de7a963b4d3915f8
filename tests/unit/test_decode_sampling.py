"""What a message asks for is what the engine draws with."""

from kvtide.bus.messages import SamplingSpec
from kvtide.decode.compute import params_of


def test_every_field_of_a_message_reaches_the_engine() -> None:
    spec = SamplingSpec(
        temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, seed=7, choice=2
    )
    params = params_of(spec)
    for field in SamplingSpec.__struct_fields__:
        assert getattr(params, field) == getattr(spec, field), field

"""What a message asks for is what the engine draws with."""

from kvtide.bus.messages import GrammarLanguage, GrammarSpec, SamplingSpec
from kvtide.decode.draws import params_of
from kvtide.engine.grammar import Grammar, GrammarKind

SPEC = SamplingSpec(
    temperature=0.5,
    top_p=0.25,
    top_k=3,
    min_p=0.125,
    seed=7,
    choice=2,
    repetition_penalty=1.5,
    presence_penalty=0.75,
    frequency_penalty=-0.25,
    logit_bias=((5, -100.0), (9, 2.5)),
    logprobs=4,
)


def test_every_field_of_a_message_reaches_the_engine() -> None:
    params = params_of(SPEC)
    for field in SamplingSpec.__struct_fields__:
        assert getattr(params, field) == getattr(SPEC, field), field
        if field != "grammar":  # its default would prove nothing
            assert getattr(SPEC, field) != getattr(SamplingSpec(), field), field


def test_every_kind_of_grammar_reaches_the_engine() -> None:
    for language in GrammarLanguage:
        spec = SamplingSpec(grammar=GrammarSpec(language, "x"))
        assert params_of(spec).grammar == Grammar(GrammarKind(language.value), "x")


def test_only_what_looks_back_needs_the_tokens_so_far() -> None:
    assert not SamplingSpec(temperature=0.5, seed=9, logit_bias=((1, 1.0),)).depends
    assert SamplingSpec(repetition_penalty=1.1).depends
    assert SamplingSpec(presence_penalty=0.1).depends
    assert SamplingSpec(frequency_penalty=-0.1).depends
    assert SamplingSpec(grammar=GrammarSpec(GrammarLanguage.REGEX, "x")).depends

"""Whatever a peer, an engine of others or a client's schema says is read or refused."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest
from tests.unit.fuzzing import ROUNDS, Target, fuzz

from kvtide.engine.architecture import read_architecture
from kvtide.engine.errors import BrokenModel, InvalidGrammar, UnsupportedModel
from kvtide.engine.grammar import Grammar, GrammarKind, check_grammar
from kvtide.gateway.errors import ModelTextError
from kvtide.gateway.text.tokenizer_json import TokenizerConfig
from kvtide.kv import TenantId
from kvtide.router.asking import EngineKind, dialect_of
from kvtide.router.engine_load import EngineLoad, read_metrics
from kvtide.router.errors import EngineAnswerError
from kvtide.router.salts import Salts
from kvtide.transfer.channel import Channel
from kvtide.transfer.engines.wire import (
    Opened,
    pack_opened,
    pack_slot_ask,
    unpack_opened,
    unpack_slot_ask,
)
from kvtide.transfer.errors import Refused, StaleEpoch, TransferError
from kvtide.transfer.handles import EndpointAddress
from kvtide.transfer.handshake import Use, Verdict, greet, receive
from kvtide.transfer.wire import Ask, FrameError, Status, unpack_fault

VLLM_METRICS = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0
"""
SGLANG_METRICS = b'sglang:num_running_reqs{a="b"} 1\nsglang:max_total_num_tokens 7e3\n'
VLLM_ANSWER = b"""{"choices": [{"token_ids": [1, 2], "finish_reason": "stop", "logprobs":
 {"tokens": ["token_id:1"], "token_logprobs": [-0.5], "top_logprobs": [{"token_id:1": -1}]}}],
 "usage": {"prompt_tokens_details": {"cached_tokens": 16}}}"""
SGLANG_ANSWER = b"""{"output_ids": [1, 2], "meta_info": {"finish_reason": {"type": "stop"},
 "cached_tokens": 16, "completion_tokens": 2}}"""
CONFIG = b"""{"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 100,
 "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
 "num_key_value_heads": 2, "max_position_embeddings": 256,
 "rope_scaling": {"type": "linear", "factor": 4.0}, "eos_token_id": [7, 2]}"""
TOKENIZER = b"""{"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": true,
 "chat_template": [{"name": "default", "template": "{{ messages }}"}]}"""
MOST_SENT = 1 << 40
SALTS = Salts(b"s" * 32)
US = ("node-1", 7)


class Said:
    """The other end of a connection: it says what it was given, and then goes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def send(self, pieces: Sequence[object], check: object) -> None:
        """It does not listen."""

    def receive(self, count: int, check: object) -> bytes:
        if count > len(self._data):
            raise ConnectionResetError
        found, self._data = self._data[:count], self._data[count:]
        return found

    def pending(self, count: int) -> bytes:
        return self._data[:count]

    def part(self) -> None:
        """Nothing is held."""


def welcome(_node: str, _epoch: int) -> Verdict:
    return Verdict.WELCOME


def heard_by_server(data: bytes) -> object:
    channel = cast("Channel", Said(data))
    return receive(channel, b"k" * 32, US, welcome, lambda: None)


def heard_by_client(data: bytes) -> object:
    channel = cast("Channel", Said(data))
    address = EndpointAddress(*US, "127.0.0.1", 1, "", 1)
    return greet(channel, b"k" * 32, ("other", 1), address, Use.DATA, lambda: None)


def schema(data: bytes) -> None:
    check_grammar(Grammar(GrammarKind.JSON_SCHEMA, data.decode(errors="replace")))


def loads(kind: EngineKind) -> Callable[[bytes], object]:
    def read(data: bytes) -> object:
        load = EngineLoad(read_metrics(kind, data.decode(errors="replace")))
        said = load.decode(), load.prefill()
        numbers = (said[0].kv_tokens_capacity, said[0].kv_tokens_used, said[1].queued)
        assert all(0 <= number <= MOST_SENT for number in numbers)
        return said

    return read


def faults(data: bytes) -> object:
    errors = [
        unpack_fault(status, data) for status in Status if status is not Status.OK
    ]
    assert all(isinstance(error, TransferError) for error in errors)
    return [str(error) for error in errors]


TARGETS = [
    Target("schema", schema, (InvalidGrammar,), (b'{"type": "string"}', b"true")),
    Target("vllm metrics", loads(EngineKind.VLLM), (), (VLLM_METRICS,)),
    Target("sglang metrics", loads(EngineKind.SGLANG), (), (SGLANG_METRICS,)),
    *(
        Target(
            f"{kind} answer",
            lambda data, kind=kind: dialect_of(kind).hear(data),
            (EngineAnswerError,),
            (good,),
        )
        for kind, good in (
            (EngineKind.VLLM, VLLM_ANSWER),
            (EngineKind.SGLANG, SGLANG_ANSWER),
        )
    ),
    Target(
        "salt",
        lambda data: SALTS.read(data.decode(errors="replace")),
        (),
        (SALTS.of(TenantId("t"), "s").encode(),),
    ),
    Target("opened", unpack_opened, (FrameError,), (pack_opened(Opened(1, 2, b"d")),)),
    Target(
        "slot ask",
        unpack_slot_ask,
        (FrameError,),
        (pack_slot_ask(1, (2, 3), Ask([(7, b"c" * 32)], [(0, 0, 64)], "kv")),),
    ),
    Target("fault", faults, ()),
    Target("hello", heard_by_server, (Refused, StaleEpoch, ConnectionResetError)),
    Target("welcome", heard_by_client, (Refused, StaleEpoch, ConnectionResetError)),
]


def files(folder: Path) -> list[Target]:
    """Parsers of files of a model; they lie in ``folder``."""

    def at(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
        def feed(data: bytes) -> object:
            (folder / name).write_bytes(data)
            return read(folder)

        return feed

    config = at("config.json", lambda path: read_architecture(path, "m"))
    tokenizer = at("tokenizer_config.json", TokenizerConfig.read)
    return [
        Target("config.json", config, (BrokenModel, UnsupportedModel), (CONFIG,)),
        Target("tokenizer_config.json", tokenizer, (ModelTextError,), (TOKENIZER,)),
    ]


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_any_bytes_are_read_or_refused(target: Target, rounds: int) -> None:
    fuzz(target, rounds)


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("number", [0, 1])
def test_any_file_of_a_model_is_read_or_named_as_broken(
    tmp_path: Path, number: int, rounds: int
) -> None:
    fuzz(files(tmp_path)[number], rounds)


HOSTILE = (b"[" * 60_000, b'{"a":' * 9000, b"9" * 60_000, b'{"a": 1e999}', b'"\\ud800"')


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_hostile_bytes_are_read_or_refused(target: Target) -> None:
    for data in HOSTILE:
        with suppress(*target.errors):
            target.read(data)


def test_hostile_files_of_a_model_are_named(tmp_path: Path) -> None:
    for target in files(tmp_path):
        for data in HOSTILE[:2]:
            with pytest.raises(target.errors):
                target.read(data)


@pytest.mark.parametrize("digits", [1, 13, 14, 5000])
def test_no_number_of_an_engine_is_too_great_to_be_told(digits: int) -> None:
    nines = b"9" * digits
    info = b'vllm:cache_config_info{block_size="%s",num_gpu_blocks="%s"} 1\n'
    running = b"vllm:num_requests_running 1e308\n" * 2
    text = info % (nines, nines) + running
    assert loads(EngineKind.VLLM)(text)

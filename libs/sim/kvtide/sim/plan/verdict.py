"""Does it pay? In a sentence, with the reasons."""

from dataclasses import dataclass

from kvtide.sim.plan.study import Study, break_even, enough

_SHORT_TOKENS = 1024
_LITTLE_REUSE = 0.10
_GOODPUT_POINT = 0.01
_MUCH_QUICKER = 0.8
_MUCH_TOO_MUCH = 30.0

_NAMES = {
    "coupled-plain": "coupled engines without a cache",
    "coupled-cached": "coupled engines with prefix caching of their own",
    "coupled-chunked": "coupled engines with chunked prefill",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """``pool``: kvtide's pool and apart prefill; else ``advice`` says what instead."""

    pool: bool
    advice: str
    reasons: tuple[str, ...]


def judge(study: Study) -> Verdict:
    """What to run. Says no for what can't pay, and for what didn't in these runs."""
    against = _against(study)
    best, instead = study.best, study.instead
    ours, theirs = best.report, instead
    nodes = study.shape.text.prefills + study.shape.text.decodes
    measured = (
        f"goodput {ours.goodput:.1%} with the pool, {theirs.goodput:.1%} with "
        f"{_NAMES[theirs.system]}; mean TTFT {ours.ttft_mean_ms:,.0f} ms and "
        f"{theirs.ttft_mean_ms:,.0f} ms; p99 TBT {ours.tbt_p99_ms:,.0f} ms and "
        f"{theirs.tbt_p99_ms:,.0f} ms"
    )
    more = ours.goodput - theirs.goodput
    quicker = ours.ttft_mean_ms < theirs.ttft_mean_ms * _MUCH_QUICKER
    steadier = ours.tbt_p99_ms < theirs.tbt_p99_ms * _MUCH_QUICKER
    pays = more > _GOODPUT_POINT or (more > -_GOODPUT_POINT and (quicker or steadier))
    if against or not pays:
        reasons = against or ("the pool brought no gain in these runs",)
        advice = f"Don't pool. Run {nodes} {_NAMES[theirs.system]}."
        return Verdict(False, advice, (*reasons, measured))
    prefills = int(best.value)
    advice = f"Pool, with {prefills} prefill and {nodes - prefills} decode nodes."
    return Verdict(True, advice, (measured, *_resources(study)))


def _against(study: Study) -> tuple[str, ...]:
    """Why it can't pay, whatever a run says."""
    reuse, node = study.reuse, study.shape.text.node
    reasons: list[str] = []
    if reuse.prompt_tokens < _SHORT_TOKENS:
        reasons.append(
            f"prompts are short: {reuse.prompt_tokens:,.0f} tokens on average; "
            f"computing one takes {study.shape.prefill.ms(reuse.prompt_tokens, 0):.0f} ms"
        )
    if reuse.most < _LITTLE_REUSE:
        reasons.append(
            f"little is used again: even a pool without end would have {reuse.most:.1%}"
        )
    tokens = max(study.shape.text.model.block_tokens, int(reuse.reused_tokens))
    needed = break_even(study.shape, tokens).real
    if node.network_bytes_per_s < needed:
        reasons.append(
            f"the network is slow: {node.network_bytes_per_s / 1e9:.1f} GB/s a node, and "
            f"loading {tokens:,} tokens beats computing them above {needed / 1e9:.1f} GB/s"
        )
    return tuple(reasons)


def _resources(study: Study) -> tuple[str, ...]:
    kv_bytes = study.shape.model.kv_bytes
    lines: list[str] = []
    for name, tries, unit, scale in (
        ("DRAM", study.dram, "GB a node", kv_bytes / 1e9),
        ("SSD", study.ssd, "GB a node", kv_bytes / 1e9),
        ("network", study.network, "GB/s a node", 1e-9),
    ):
        least = enough(tries)
        if least is None:
            lines.append(
                f"{name}: more still pays at {tries[-1].value * scale:,.0f} {unit}"
            )
        else:
            lines.append(
                f"{name}: more than {least.value * scale:,.1f} {unit} gains nothing"
            )
    written = study.ssd[-1].report
    days = max(written.virtual_s, 1.0) / 86_400
    drives = study.best.value
    per_day = written.ssd_written_bytes / days / drives / 1e12
    full = study.ssd[-1].value * kv_bytes / 1e12
    if per_day > 0 and full > 0:
        lines.append(
            f"an SSD of {full:,.1f} TB a node would be written {per_day:,.1f} TB a day "
            f"({per_day / full:.1f} times its size)"
        )
    return tuple(lines)

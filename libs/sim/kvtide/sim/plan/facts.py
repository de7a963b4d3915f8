"""What a study found, in sentences: for the page, and for the terminal."""

import numpy as np

from kvtide.sim.plan.study import Study

_TOLD_TOKENS = (8192, 131_072)


def facts(study: Study) -> tuple[str, ...]:
    """The workload, its reuse, what a node's memory reaches, and break-even rates."""
    return (_workload(study), _reuse(study), _reach(study), _break_even(study))


def _workload(study: Study) -> str:
    reuse = study.reuse
    return (
        f"{reuse.requests:,} requests; prompts {reuse.prompt_tokens:,.0f} tokens, answers "
        f"{reuse.answer_tokens:,.0f} on average"
    )


def _reuse(study: Study) -> str:
    reuse = study.reuse
    between = "nothing comes again"
    if len(reuse.seconds):
        size = study.shape.text.model.block_tokens
        tokens = float(np.median(reuse.distance)) * size
        between = (
            f"of what comes again, half comes within {float(np.median(reuse.seconds)):,.0f} s "
            f"and {tokens:,.0f} tokens"
        )
    return (
        f"an unlimited pool would have {reuse.most:.1%} of all blocks; {reuse.used_once:.1%} "
        f"of the different blocks are used once; {between}"
    )


def _reach(study: Study) -> str:
    tokens = study.shape.text.node.pool_tokens
    size = study.shape.text.model.block_tokens
    near = study.reuse.hit_rate(tokens / size)
    share = near / study.reuse.most if study.reuse.most else 0.0
    return (
        f"one node's DRAM, {tokens:,} tokens, would have {near:.1%} of all blocks if it saw "
        f"all requests: {share:.0%} of what an unlimited pool has"
    )


def _break_even(study: Study) -> str:
    parts = [
        f"{each.nominal / 1e9:.1f} GB/s for {each.tokens:,} tokens "
        f"({each.real / 1e9:.1f} at the pace that prefill reaches)"
        for each in study.break_even
        if each.tokens in _TOLD_TOKENS
    ]
    node = study.shape.text.node.network_bytes_per_s / 1e9
    return (
        f"loading beats computing above {', '.join(parts)}; a node has {node:.1f} GB/s"
    )

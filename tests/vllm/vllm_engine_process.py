"""A vLLM engine behind a pipe: ``python vllm_engine_process.py OPTIONS_JSON``.

Runs in vLLM's own environment and imports no test. Each line in is a question, each line
out its answer, on a descriptor of its own, since vLLM writes to stdout.
"""

import base64
import importlib
import io
import json
import os
import sys
import time
from typing import Any


def answer(llm: Any, asked: dict[str, Any]) -> dict[str, Any]:
    vllm: Any = importlib.import_module("vllm")
    if asked["op"] == "reset":
        return {"reset": bool(llm.reset_prefix_cache(reset_connector=asked["pool"]))}
    if asked["op"] == "pool":
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        transfer: Any = importlib.import_module("vllm.distributed.kv_transfer")
        worker = transfer.get_kv_transfer_group()._shared.client
        return {
            "known": scheduler.connector._shared.client._index.blocks,
            "takes_blocks": worker.takes_blocks,
            "groups": len(scheduler.connector._shared.geometry.groups),
        }
    if asked["op"] == "metrics":
        return {
            metric.name: metric.value
            for metric in llm.get_metrics()
            if hasattr(metric, "value")
            and ("kvtide" in metric.name or "external" in metric.name)
        }
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=asked["max_tokens"], ignore_eos=True
    )
    if asked.get("params"):
        sampling.extra_args = {"kv_transfer_params": asked["params"]}
    if asked["op"] == "abort":
        return aborted(llm.llm_engine, asked, sampling)
    prompts: list[dict[str, Any]] = [{"prompt": text} for text in asked["prompts"]]
    for prompt in prompts:
        if asked.get("salt"):
            prompt["cache_salt"] = asked["salt"]
        if asked.get("picture"):
            image: Any = importlib.import_module("PIL.Image")
            data = io.BytesIO(base64.b64decode(asked["picture"]))
            opened = image.open(data).convert("RGB")
            prompt["multi_modal_data"] = {"image": [opened]}
    started_s = time.monotonic()  # noqa: TID251 - a measurement
    outputs = llm.generate(
        prompts, sampling, use_tqdm=False, lora_request=adapter(asked.get("lora"))
    )
    seconds = time.monotonic() - started_s  # noqa: TID251 - a measurement
    return {
        "seconds": seconds,
        "tokens": [list(each.outputs[0].token_ids) for each in outputs],
        "prompt_tokens": [len(each.prompt_token_ids) for each in outputs],
        "cached": [each.num_cached_tokens for each in outputs],
        "reasons": [each.outputs[0].finish_reason for each in outputs],
        "params": [each.kv_transfer_params for each in outputs],
    }


def adapter(folder: str | None) -> Any:
    """One and the same adapter in an engine's life; None: none is wanted."""
    if folder is None:
        return None
    lora: Any = importlib.import_module("vllm.lora.request")
    return lora.LoRARequest("adapter", 1, folder)


def aborted(engine: Any, asked: dict[str, Any], sampling: Any) -> dict[str, Any]:
    """Abort a request after some steps; what the engine holds when all is over."""
    prompt: dict[str, Any] = {"prompt": asked["prompts"][0]}
    name = engine.add_request("aborted", prompt, sampling)
    answered = 0
    for _ in range(asked["steps"]):
        answered += len(engine.step())
    scheduler = engine.engine_core.engine_core.scheduler
    state = [request.status.name for request in scheduler.requests.values()]
    engine.abort_request([name])
    deadline_s = time.monotonic() + 60  # noqa: TID251 - a real engine
    while scheduler.requests and time.monotonic() < deadline_s:  # noqa: TID251
        engine.step()
    pool = scheduler.kv_cache_manager.block_pool
    ours = scheduler.connector._scheduling
    return {
        "answered": answered,
        "state": state,
        "requests": len(scheduler.requests),
        "used_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "followed": sum(map(len, (ours._plan, ours._waits, ours._asked, ours._loaded))),
    }


def main() -> None:
    options = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    vllm: Any = importlib.import_module("vllm")
    llm = vllm.LLM(**options, disable_log_stats=False)
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(answer(llm, json.loads(line))) + "\n")


if __name__ == "__main__":
    main()

"""Sends prompts to a server that speaks OpenAI's protocol, with OpenAI's client, and notes what came back and when.

usage: client.py --url URL --prompts FILE --out FILE [--tokens N] [--at-once N] [--limit N] [--logprobs]

Runs in vLLM's environment; started by run.py. The prompts of a workload are sent together, `--at-once` at a time, and
each output has exactly `--tokens` tokens. The result is {"workloads": {NAME: {"seconds", "tokens"}}, "outputs": [...]}.
With --logprobs each output holds, for each token, by how much the model preferred it to the next one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openai import OpenAI

MODEL = "model"  # the name under which run.py serves it


def read_cases(path: Path, limit: int | None) -> dict[str, list[dict[str, Any]]]:
    """Records by workload, at most `limit` of each."""
    cases: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")):
        if line.strip():
            record = json.loads(line)
            mine = cases[record["workload"]]
            if limit is None or len(mine) < limit:
                mine.append(record | {"case": number})
    return cases


def ask(client: OpenAI, case: dict[str, Any], tokens: int, logprobs: bool) -> dict[str, Any]:
    """One request; returns its output."""
    extra = {"ignore_eos": True, "return_token_ids": True}
    begun = time.monotonic()
    if "messages" in case:
        chat = {"logprobs": True, "top_logprobs": 2} if logprobs else {}
        answer = client.chat.completions.create(
            model=MODEL, messages=case["messages"], temperature=0.0, max_tokens=tokens, extra_body=extra, **chat
        )
    else:
        plain = {"logprobs": 2} if logprobs else {}
        answer = client.completions.create(
            model=MODEL, prompt=case["prompt"], temperature=0.0, max_tokens=tokens, extra_body=extra, **plain
        )
    seconds = time.monotonic() - begun
    choice = answer.choices[0]
    record = {"case": case["case"], "workload": case["workload"], "seconds": seconds}
    record["token_ids"] = choice.model_extra["token_ids"]
    if logprobs:
        record["gaps"] = gaps(choice)
    return record


def gaps(choice: Any) -> list[float]:
    """Per token, the log-probability of the likeliest token less that of the second."""
    if (content := getattr(choice.logprobs, "content", None)) is not None:
        tops = [sorted((top.logprob for top in place.top_logprobs), reverse=True) for place in content]
    else:
        tops = [sorted(place.values(), reverse=True) for place in choice.logprobs.top_logprobs]
    return [round(top[0] - top[1], 4) for top in tops]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--logprobs", action="store_true")
    given = parser.parse_args()
    client = OpenAI(base_url=f"{given.url}/v1", api_key="none", timeout=3600, max_retries=0)
    cases = read_cases(given.prompts, given.limit)
    warm = next(iter(cases.values()))[0]
    ask(client, warm, 16, logprobs=False)
    workloads: dict[str, dict[str, float]] = {}
    outputs: list[dict[str, Any]] = []
    with ThreadPoolExecutor(given.at_once) as pool:
        for name, mine in cases.items():
            rounds = 1 if given.at_once == 1 else -(-2 * given.at_once // len(mine))  # enough to keep it busy
            begun = time.monotonic()
            found = list(pool.map(lambda case: ask(client, case, given.tokens, given.logprobs), mine * rounds))
            seconds = time.monotonic() - begun
            workloads[name] = {"seconds": seconds, "tokens": sum(len(output["token_ids"]) for output in found)}
            outputs += found
            print(f"{name}: {workloads[name]['tokens'] / seconds:.1f} tokens/s", flush=True)
    scratch = given.out.with_suffix(".tmp")
    scratch.write_text(json.dumps({"workloads": workloads, "outputs": outputs}))
    scratch.replace(given.out)


if __name__ == "__main__":
    main()

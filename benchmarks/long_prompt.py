"""What a long prompt does to those who are being served: gaps between the tokens of running streams, quiet and beside it.

    python benchmarks/long_prompt.py --prompt-tokens 50000 --seconds 20 -- --max-prefill-slowdown 0

What follows `--` are flags of `canter serve`. The model's context is stretched as far as the prompt needs: its answers mean
nothing then, its arithmetic is the same. The promise: the 99th percentile beside the prompt is at most four times the quiet one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time

import httpx

from canter.cli.bench.prompts import random_prompts
from canter.cli.bench.report import summary
from canter.cli.private_server import private_server

WARM_SECONDS = 2.0
STREAM_TOKENS = 4000


def main() -> int:
    own, flags = sys.argv[1:], list[str]()
    if "--" in own:
        flags = own[own.index("--") + 1 :]
        own = own[: own.index("--")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=50_000)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each of the two measurements")
    options = parser.parse_args(own)
    context = options.prompt_tokens + STREAM_TOKENS
    stretched = ["--hf-overrides", json.dumps({"max_position_embeddings": context}), "--max-model-len", str(context)]
    with private_server([*stretched, *flags]) as server:
        found = asyncio.run(measure(server.url, options.prompt_tokens, options.streams, options.seconds))
    for name in ("quiet", "beside"):
        figures = summary([1000 * gap for gap in found[name]])
        print(f"{name:7}" + "".join(f"  {key} {value:.1f} ms" for key, value in figures.items()) + f"  gaps {len(found[name])}")
    quiet, beside = (summary(found[name], (99,))["p99"] for name in ("quiet", "beside"))
    done = f"done after {found['prefill'][0]:.1f} s" if found["prefill"] else f"not done in {options.seconds:.0f} s"
    print(f"p99 beside a prompt of {options.prompt_tokens} tokens is {beside / quiet:.1f} times the quiet one; the prompt was {done}")
    return 0


async def measure(url: str, prompt_tokens: int, num_streams: int, seconds: float) -> dict[str, list[float]]:
    """Gaps in seconds, quiet and beside the prompt; and how long the prompt took, if it ended."""
    gaps: list[float] = []
    found: dict[str, list[float]] = {"quiet": [], "beside": [], "prefill": []}
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as http:
        streams = [asyncio.create_task(_stream(http, prompt, gaps)) for prompt in random_prompts(num_streams, 64, seed=1)]
        await asyncio.sleep(WARM_SECONDS)
        gaps.clear()
        await asyncio.sleep(seconds)
        found["quiet"] = gaps.copy()
        gaps.clear()
        [long_prompt] = random_prompts(1, prompt_tokens, seed=2)
        started = time.perf_counter()
        prefill = asyncio.create_task(http.post("/completions", json={"prompt": long_prompt, "max_tokens": 1}))
        await asyncio.wait((prefill,), timeout=seconds)
        found["beside"] = gaps.copy()
        if prefill.done():
            prefill.result().raise_for_status()
            found["prefill"] = [time.perf_counter() - started]
        for task in (prefill, *streams):
            task.cancel()
        await asyncio.gather(prefill, *streams, return_exceptions=True)
    return found


async def _stream(http: httpx.AsyncClient, prompt: list[int], gaps: list[float]) -> None:
    """Generate without end, and note the time from each piece to the next."""
    body = {"prompt": prompt, "max_tokens": STREAM_TOKENS - 100, "ignore_eos": True, "stream": True, "temperature": 0}
    while True:
        async with http.stream("POST", "/completions", json=body) as response:
            response.raise_for_status()
            last = None
            async with contextlib.aclosing(response.aiter_lines()) as lines:
                async for line in lines:
                    if line.startswith("data: {"):
                        now = time.perf_counter()
                        if last is not None:
                            gaps.append(now - last)
                        last = now


if __name__ == "__main__":
    sys.exit(main())

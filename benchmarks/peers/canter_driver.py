"""Canter on the workloads. usage: python canter_driver.py ENGINE_ARGUMENTS_AS_JSON

Besides measuring it checks: the same prompts one at a time, through a second engine without any company, chunking or
cached prefix, must give the same tokens.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from driver import WORKS, Generate, make_prompts, obey

from canter import LLM, SamplingParams

ALONE = {"max_num_seqs": 1, "enable_prefix_caching": False, "max_num_batched_tokens": 16384}


def generator(llm: LLM) -> Generate:
    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])

    def check(order: dict[str, Any]) -> dict[str, Any]:
        """Tokens of the first prompts of a workload, each generated alone."""
        work = WORKS[order["work"]]
        prompts = make_prompts(work, order["seed"])[: order["count"]]
        with LLM(**arguments | ALONE) as alone:
            generate = generator(alone)
            return {"tokens": [generate([prompt], work.out)[0] for prompt in prompts]}

    with LLM(**arguments) as llm:
        obey(generator(llm), {"check": check})


if __name__ == "__main__":
    main()

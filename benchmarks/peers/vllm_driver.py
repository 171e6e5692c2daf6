"""vllm on the workloads. usage: python vllm_driver.py MODEL_DIRECTORY MAX_MODEL_LEN DTYPE"""

from __future__ import annotations

import sys

from driver import obey
from vllm import LLM, SamplingParams


def main() -> None:
    llm = LLM(sys.argv[1], dtype=sys.argv[3], max_model_len=int(sys.argv[2]), max_num_seqs=64, skip_tokenizer_init=True)

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    obey(generate)


if __name__ == "__main__":
    main()

"""openvino-genai with continuous batching on the workloads. usage: python openvino_driver.py MODEL THREADS"""

from __future__ import annotations

import sys

import numpy as np
import openvino as ov
import openvino_genai as genai
from driver import obey


def main() -> None:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2  # GB
    scheduler.enable_prefix_caching = True
    scheduler.max_num_batched_tokens = 2048
    pipeline = genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", {"INFERENCE_NUM_THREADS": int(sys.argv[2])})

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        config = genai.GenerationConfig(max_new_tokens=count, min_new_tokens=count, ignore_eos=True, do_sample=False)
        inputs = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        results = pipeline.generate(inputs, [config] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]

    obey(generate)


if __name__ == "__main__":
    main()

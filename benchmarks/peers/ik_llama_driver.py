"""ik_llama.cpp through the bindings of PyPI's ik-llama-cpp-python, for machines that its prebuilt tools do not run on.

usage: python ik_llama_driver.py MODEL THREADS CONTEXT REQUESTS REPACK(0|1)

Prompts go in batches of 2,048 tokens; each further step is one batch of the newest token of every request, chosen greedily.
"""

from __future__ import annotations

import sys

import numpy as np
from driver import obey
from ik_llama_cpp import _ctypes_api as api

BATCH = 2048


class Session:
    """A loaded model with room for `requests` requests, `context` tokens in all."""

    def __init__(self, path: str, threads: int, context: int, requests: int, repack: bool) -> None:
        api.llama_backend_init()
        model_params = api.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model_params.repack_tensors = repack
        model_params.use_mmap = not repack
        self.model = api.llama_model_load_from_file(path.encode(), model_params)
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = context, BATCH, 512, requests
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn = has_vnni()  # its kernels fail an assertion on processors without
        self.context = api.llama_init_from_model(self.model, params)
        if not self.model or not self.context:
            raise RuntimeError(f"{path} could not be loaded")
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(BATCH, 0, requests)

    def decode(self, entries: list[tuple[int, int, list[int], bool]]) -> list[int]:
        """Compute (token, position, requests it belongs to, whether its successor is wanted); returns the successors, in order."""
        batch = self.batch
        batch.n_tokens = len(entries)
        wanted = []
        for i, (token, position, requests, is_last) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, len(requests), is_last
            for j, request in enumerate(requests):
                batch.seq_id[i][j] = request
            if is_last:
                wanted.append(i)
        if api.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        return [int(np.argmax(np.ctypeslib.as_array(api.llama_get_logits_ith(self.context, i), (self.vocab_size,)))) for i in wanted]

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """What the prompts have in common is computed once, for all requests."""
        api.llama_kv_cache_clear(self.context)
        everyone = list(range(len(prompts)))
        shortest = min(map(len, prompts))
        shared = next((i for i in range(shortest) if len({prompt[i] for prompt in prompts}) > 1), shortest - 1) if len(prompts) > 1 else 0
        entries = [(prompts[0][i], i, everyone, False) for i in range(shared)]
        for request, prompt in enumerate(prompts):
            entries += [(prompt[i], i, [request], i + 1 == len(prompt)) for i in range(shared, len(prompt))]
        newest: list[int] = []
        for begin in range(0, len(entries), BATCH):
            newest += self.decode(entries[begin : begin + BATCH])
        tokens = [[token] for token in newest]
        for step in range(count - 1):
            newest = self.decode([(newest[r], len(prompts[r]) + step, [r], True) for r in everyone])
            for request, token in zip(everyone, newest, strict=True):
                tokens[request].append(token)
        return tokens


def has_vnni() -> bool:
    with open("/proc/cpuinfo") as f:
        flags = f.read().split()
    return "avx_vnni" in flags or "avx512_vnni" in flags


def main() -> None:
    path, threads, context, requests, repack = sys.argv[1:6]
    obey(Session(path, int(threads), int(context), int(requests), repack == "1").generate)


if __name__ == "__main__":
    main()

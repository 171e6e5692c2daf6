"""Recurrent and hybrid models of random weights beside transformers: `python benchmarks/recurrent.py [--json FILE]`.

Both sides load the same checkpoint, made for the occasion, and run in turns, each time in a process of their own: one prompt of
`--prompt` tokens, then `--output` greedy tokens. Reported are medians over the turns, their ratio, and whether the tokens are the same.
Needs transformers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from canter.cli.table import table
from canter.core.config import DEFAULT_MODEL
from canter.core.sampling_params import SamplingParams
from canter.llm import LLM

Config = tuple[str, str, dict[str, Any]]

SHAPES: dict[str, Config] = {
    "mamba2-130m": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        dict(
            hidden_size=768,
            num_hidden_layers=24,
            vocab_size=50288,
            state_size=128,
            head_dim=64,
            num_heads=24,
            n_groups=1,
            expand=2,
            conv_kernel=4,
            tie_word_embeddings=True,
        ),
    ),
    "gated-delta-0.5b": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        dict(
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=24,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=128,
            linear_num_key_heads=8,
            linear_num_value_heads=16,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            vocab_size=64000,
            tie_word_embeddings=True,
        ),
    ),
}
"""Name -> (class of the config, class of the model, settings)."""


def make(shape: str, folder: Path) -> None:
    """Save a model of random weights."""
    config_class, model_class, settings = SHAPES[shape]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings)).eval()
    model.save_pretrained(folder)
    print(f"{shape}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters", file=sys.stderr)


def prompt_of(length: int) -> list[int]:
    return torch.randint(10, 40000, (length,), generator=torch.Generator().manual_seed(1)).tolist()


def run_transformers(folder: Path, prompt: list[int], num_output: int, threads: int, dtype: str) -> dict[str, Any]:
    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    ids = torch.tensor([prompt])
    options: dict[str, Any] = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.inference_mode():
        model.generate(ids[:, :16], max_new_tokens=2, **options)
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=1, **options)
        first = time.perf_counter()
        tokens = model.generate(ids, max_new_tokens=num_output, **options)[0, len(prompt) :].tolist()
    prefill = first - start
    return {"prefill": len(prompt) / prefill, "decode": (num_output - 1) / (time.perf_counter() - first - prefill), "tokens": tokens}


def run_canter(folder: Path, prompt: list[int], num_output: int, threads: int, dtype: str) -> dict[str, Any]:
    llm = LLM(model=str(folder), num_threads=threads, dtype=dtype, tokenizer=DEFAULT_MODEL, enable_prefix_caching=False, max_model_len=4096)
    requests: list[Any] = [{"prompt_token_ids": prompt}]

    def generate(count: int) -> tuple[float, list[int]]:
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count, detokenize=False)
        start = time.perf_counter()
        (output,) = llm.generate(requests, sampling)
        return time.perf_counter() - start, list(output.outputs[0].token_ids)

    generate(2)
    prefill, _ = generate(1)
    seconds, tokens = generate(num_output)
    return {"prefill": len(prompt) / prefill, "decode": (num_output - 1) / (seconds - prefill), "tokens": tokens}


SIDES = {"canter": run_canter, "transformers": run_transformers}


def measure(folder: Path, side: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One turn of one side, in a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--folder", str(folder), "--prompt", str(arguments.prompt)]
    command += ["--output", str(arguments.output), "--threads", str(arguments.threads), "--dtype", arguments.dtype]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(shape: str, arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        make(shape, Path(name))
        turns: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for _ in range(arguments.repeat):
            for side in SIDES:
                turns[side].append(measure(Path(name), side, arguments))
    result: dict[str, Any] = {"shape": shape}
    for work in ("prefill", "decode"):
        for side in SIDES:
            result[f"{work}_{side}"] = statistics.median(turn[work] for turn in turns[side])
        result[f"{work}_ratio"] = result[f"{work}_canter"] / result[f"{work}_transformers"]
    ours, theirs = turns["canter"][0]["tokens"], turns["transformers"][0]["tokens"]
    result["same_tokens"] = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), len(ours))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="Comma-separated.")
    parser.add_argument("--prompt", type=int, default=512, help="Tokens of the prompt.")
    parser.add_argument("--output", type=int, default=64, help="Tokens generated.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeat", type=int, default=3, help="Turns of each side.")
    parser.add_argument("--json", type=Path, help="Also write the figures here.")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        run = SIDES[arguments.side]
        figures = run(arguments.folder, prompt_of(arguments.prompt), arguments.output, arguments.threads, arguments.dtype)
        print(json.dumps(figures))
        return
    results = [compare(shape, arguments) for shape in arguments.shapes.split(",")]
    rows = [
        [
            r["shape"],
            work,
            f"{r[f'{work}_canter']:.1f}",
            f"{r[f'{work}_transformers']:.1f}",
            f"{r[f'{work}_ratio']:.2f}",
            str(r["same_tokens"]),
        ]
        for r in results
        for work in ("prefill", "decode")
    ]
    print(table(["shape", "work", "canter tok/s", "transformers tok/s", "ratio", "equal tokens"], rows))
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"arguments": vars(arguments) | {"json": str(arguments.json)}, "results": results}, indent=2, default=str)
        )


if __name__ == "__main__":
    main()

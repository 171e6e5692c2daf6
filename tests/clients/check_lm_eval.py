"""`lm-eval` with its `local-completions` model: prompts as token ids, echoed logprobs, and generation up to a stop string."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from urllib.request import Request, urlopen

from checks import KEY, MODEL, URL, check, run

TASKS = Path(__file__).resolve().parent / "lm_eval"
TOKENIZER = os.environ.get("CANTER_TOKENIZER", "")


@cache
def results() -> tuple[dict, dict]:
    """(the results of the tasks, their samples), from one run of the program. Its data files are named relative to the tasks."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"model": MODEL, "base_url": f"{URL}/v1/completions", "tokenizer": TOKENIZER, "num_concurrent": 4, "max_length": 2048}
        command = [
            sys.executable, "-m", "lm_eval", "run", "--model", "local-completions",
            "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()),
            "--tasks", "canter_facts,canter_counting", "--include_path", str(TASKS), "--output_path", folder, "--log_samples",
        ]  # fmt: skip
        environment = {**os.environ, "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": f"{folder}/home"}
        done = subprocess.run(command, cwd=TASKS, env=environment, capture_output=True, text=True, timeout=540)
        assert done.returncode == 0, done.stderr[-3000:]
        [summary] = Path(folder).rglob("results_*.json")
        samples = {
            path.name.removeprefix("samples_").rpartition("_")[0]: [json.loads(line) for line in path.read_text().splitlines()]
            for path in Path(folder).rglob("samples_*.jsonl")
        }
        return json.loads(summary.read_text())["results"], samples


@check
def multiple_choice_by_likelihood():
    scores, samples = results()
    assert scores["canter_facts"]["acc,none"] >= 0.75, scores
    assert len(samples["canter_facts"]) == 8


@check
def likelihoods_are_the_servers():
    """Each answer's likelihood as the program summed it up, against one asked for here with the prompt as text."""
    for sample in results()[1]["canter_facts"][:3]:
        for i, response in enumerate(sample["resps"]):
            likelihood = float(response[0][0])
            arguments = sample["arguments"]
            context, continuation = arguments[f"gen_args_{i}"]["arg_0"], arguments[f"gen_args_{i}"]["arg_1"]
            body = {"model": MODEL, "prompt": context + continuation, "echo": True, "max_tokens": 0, "logprobs": 1, "temperature": 0}
            headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
            with urlopen(Request(f"{URL}/v1/completions", json.dumps(body).encode(), headers), timeout=60) as answer:
                logprobs = json.load(answer)["choices"][0]["logprobs"]
            entries = zip(logprobs["text_offset"], logprobs["token_logprobs"], strict=True)
            mine = sum(value for offset, value in entries if offset >= len(context))
            assert abs(mine - likelihood) < 1e-3, (mine, likelihood)


@check
def generation_up_to_a_stop_string():
    scores, samples = results()
    texts = [sample["resps"][0][0] for sample in samples["canter_counting"]]
    assert len(texts) == 4 and all(text.strip() and "\n" not in text and "," not in text for text in texts), texts
    assert texts[0].strip() == "four" and scores["canter_counting"]["exact_match,strip"] >= 0.25, (texts, scores)


run("lm-eval")

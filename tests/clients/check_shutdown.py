"""Errors in mid-stream, each as its client's own exception: the server is stopped while three clients read. Runs against a server
of its own, and ends it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import anthropic
import ollama
import openai
from checks import KEY, MODEL, URL, check, run

TEXT = [{"role": "user", "content": "Count."}]
LONG = 1500
barrier = threading.Barrier(4)
errors: dict[str, BaseException] = {}


def read(name: str, stream: Callable) -> None:
    started = False
    try:
        for _ in stream():
            if not started:
                barrier.wait(120)
            started = True
    except Exception as error:
        errors[name] = error


def openai_stream():
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    return client.chat.completions.create(model=MODEL, messages=TEXT, max_tokens=LONG, stream=True, extra_body={"ignore_eos": True})


def anthropic_stream():
    client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
    text = [*TEXT, {"role": "assistant", "content": "one\ntwo\nthree\nfour\n"}]
    return client.messages.create(model=MODEL, messages=text, max_tokens=LONG, extra_body={"temperature": 0}, stream=True)


def ollama_stream():
    client = ollama.Client(host=URL, headers={"Authorization": f"Bearer {KEY}"})
    return client.generate(MODEL, "la la la " * 40, raw=True, stream=True, options={"num_predict": LONG, "temperature": 0})


@check
def the_streams_end_with_errors():
    streams = {"openai": openai_stream, "anthropic": anthropic_stream, "ollama": ollama_stream}
    threads = [threading.Thread(target=read, args=item) for item in streams.items()]
    for thread in threads:
        thread.start()
    barrier.wait(120)
    os.kill(int(os.environ["CANTER_PID"]), signal.SIGTERM)
    for thread in threads:
        thread.join(60)
    assert set(errors) == set(streams), f"only {errors}"


@check
def openais_error():
    assert type(errors["openai"]) is openai.APIError and "shutting down" in str(errors["openai"]), repr(errors["openai"])


@check
def anthropics_error():
    error = errors["anthropic"]
    assert isinstance(error, anthropic.APIStatusError) and error.body["error"]["type"] == "overloaded_error", repr(error)
    assert "shutting down" in error.body["error"]["message"] and error.body["request_id"]


@check
def ollamas_error():
    assert type(errors["ollama"]) is ollama.ResponseError and "shutting down" in errors["ollama"].error, repr(errors["ollama"])


run("anthropic")

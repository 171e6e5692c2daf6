"""The load generator: what it sends, when, and what it makes of answers good and bad."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from canter.cli.bench import serve, serve_report
from canter.cli.bench.datasets import make_asks, token_counter
from canter.cli.bench.http_stream import EventReader, Result, StreamClient, message_of
from canter.cli.bench.load import Outcome, Plan, Target, arrivals, run_plan
from canter.core.errors import CanterError, CheckpointError, ConfigError
from tests.cli.fake_server import Answer, chunk, completion, event, head, running, streamed, whole
from tests.fakes import model_folder


def parsed(*words: str) -> Any:
    return serve.build_parser().parse(list(words))


def bench(url: str, *words: str) -> int:
    return serve.run(parsed("--url", url, "--num-warmups", "0", *words))


def ask(pieces: Answer, pause: float = 0.0) -> Result:
    """One request to a server that answers like this."""

    async def main(url: str) -> Result:
        client = StreamClient(url + "/completions", {})
        try:
            return await asyncio.wait_for(client.ask(b"{}"), 20)
        finally:
            await client.close()

    with running(lambda number: pieces, pause) as server:
        return asyncio.run(main(server.url))


def test_every_request_is_sent_timed_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serve.json"
    with running(lambda number: completion("a", "", "b", "c", usage=(7, 3))) as server:
        words = ("--num-prompts", "5", "--random-input-len", "7", "--random-output-len", "3", "--json", str(path), "--max-concurrency", "2")
        assert bench(server.url, *words, "--save-detailed", "--goodput", "ttft:60000", "tpot:60000") == 0
    assert server.most <= 2 and server.connections <= 4  # one for the list of models, and one that a kept one has replaced
    assert all(len(body["prompt"]) == 7 and body["ignore_eos"] is True and body["max_tokens"] == 3 for body in server.bodies)
    assert all(body["model"] == "tiny" and body["stream_options"] == {"include_usage": True} for body in server.bodies)
    written = json.loads(path.read_text())
    assert (written["completed"], written["failed"], written["total_input_tokens"], written["total_output_tokens"]) == (5, 0, 35, 15)
    assert written["output_throughput"] == pytest.approx(15 / written["duration"])
    assert written["request_goodput"] == written["request_throughput"] and written["tokens_counted_by"] == "usage"
    assert written["tokens_per_chunk"] == 1.0 and len(written["itls"]) == 5 and len(written["itls"][0]) == 2
    for statistic in ("mean", "median", "std", "p90", "p99"):
        for metric in ("ttft", "tpot", "itl", "e2el"):
            assert written[f"{statistic}_{metric}_ms"] >= 0
    assert 0 < written["mean_ttft_ms"] <= written["mean_e2el_ms"]
    shown = capsys.readouterr().out
    assert "requests within the goals" in shown and "as the server counts them" in shown and "µs a chunk" in shown


def test_chat_and_flags_reach_the_server() -> None:
    words = (
        "--num-prompts",
        "2",
        "--backend",
        "openai-chat",
        "--no-ignore-eos",
        "--random-input-len",
        "4",
        "--top-k",
        "5",
        "--logprobs",
        "2",
    )
    more = (
        "--logprobs",
        "2",
        "--header",
        "X-Team=blue",
        "--api-key",
        "k",
        "--extra-body",
        '{"user": "u"}',
        "--continuous-usage-stats",
        "--min-p",
        "0.1",
    )
    with running(lambda number: completion("a", "b", "c")) as server:
        assert bench(server.url, *words, *more, "--endpoint", "/other/chat") == 0
    for body, top in zip(server.bodies, server.heads, strict=True):
        (message,) = body["messages"]
        assert len(message["content"].split()) == 4 and "ignore_eos" not in body and "prompt" not in body
        assert (body["top_k"], body["min_p"], body["user"], body["logprobs"], body["top_logprobs"]) == (5, 0.1, "u", True, 2)
        assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
        assert top.startswith("POST /other/chat HTTP/1.1") and "X-Team: blue" in top and "Authorization: Bearer k" in top


def test_a_server_without_usage_is_counted_by_chunks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serve.json"
    with running(lambda number: completion("a", "b", "c", "d", usage=None)) as server:
        assert bench(server.url, "--num-prompts", "3", "--json", str(path)) == 0
    written = json.loads(path.read_text())
    assert (written["total_output_tokens"], written["tokens_counted_by"]) == (12, "chunks")
    assert "tokens are chunks" in capsys.readouterr().out


def test_failures_are_counted_with_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serve.json"
    refusal = whole(503, b'{"error": {"message": "full", "code": 503}}')
    with running(lambda number: refusal if number % 3 else completion("a", "b", usage=(10, 2))) as server:
        assert bench(server.url, "--num-prompts", "9", "--max-concurrency", "1", "--json", str(path)) == 1
    written = json.loads(path.read_text())
    assert (written["completed"], written["failed"], written["errors"]) == (3, 6, {"The server answered 503: full": 6})
    assert "! 6 times: The server answered 503: full" in capsys.readouterr().out


def test_a_failing_warm_up_stops_before_the_load() -> None:
    with running(lambda number: whole(400, b'{"error": "no"}')) as server, pytest.raises(CanterError, match="400: no"):
        serve.run(parsed("--url", server.url, "--num-prompts", "9"))
    assert len(server.bodies) == 1


BAD: list[tuple[str, Answer, str]] = [
    ("closed at once", [b""], "The connection broke"),
    ("closed in the middle", [head(200, "Transfer-Encoding: chunked"), chunk(event({"choices": [{"text": "a"}]})), b""], "broke"),
    ("no HTTP", [b"SSH-2.0-OpenSSH\r\n\r\n"], "not HTTP"),
    ("no chunk", [head(200, "Transfer-Encoding: chunked"), b"zzz\r\n"], "not HTTP"),
    ("no JSON", streamed(b"data: {\n\n"), "was not understood"),
    ("no object", streamed(b"data: [1]\n\n"), "was not understood"),
    ("no text", streamed(b'data: {"choices": [{"text": 1}]}\n\n'), "was not understood"),
    ("no tokens", streamed(b"data: [DONE]\n\n"), "told of no tokens"),
    ("an empty body", whole(200, b""), "told of no tokens"),
    (
        "an error event",
        streamed(event({"choices": [{"text": "a"}]}), event({"error": {"message": "all is lost", "code": 5}})),
        "all is lost",
    ),
    ("an HTML error", whole(502, b"<html>Bad gateway</html>"), "The server answered 502: <html>Bad gateway</html>"),
    ("an empty error", whole(500, b""), "The server answered 500"),
    ("a huge error", whole(500, b"x" * 10_000_000), "The server answered 500: xxx"),
    ("a redirect", whole(301, b""), "The server answered 301"),
]


@pytest.mark.parametrize(("pieces", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_answers_are_errors_of_their_request(pieces: Answer, message: str) -> None:
    result = ask(pieces)
    assert result.error is not None and message in result.error and len(result.error) < 3000
    assert ("not understood" in result.error) == ("not understood" in message) and result.latency > 0


def test_a_server_that_is_not_there_is_an_error_of_each_request() -> None:
    outcome = run_plan(Plan(Target("http://127.0.0.1:9/v1/completions", {}), [b"{}"] * 3, [0.0] * 3))
    assert len(outcome.results) == 3 and all(result.error for result in outcome.results)


def test_answers_in_odd_pieces() -> None:
    """Cut anywhere, with CR LF, comments, other fields, and without a length."""
    body = b'event: x\r\n: comment\r\ndata: {"choices":[{"text":"a"}]}\r\n\r\n'
    body += b'data:{"choices":[{"delta":{"content":"b"}}]}\r\n\r\ndata: [DONE]\r\n\r\n'
    for size in (1, 3, 1000):
        cut = [body[i : i + size] for i in range(0, len(body), size)]
        result = ask([head(200, "Transfer-Encoding: chunked"), *map(chunk, cut), b"0\r\n\r\n"])
        assert (result.error, result.num_chunks, len(result.gaps)) == (None, 2, 1)
    result = ask([head(200, "Connection: close"), body, b""])
    assert (result.error, result.num_chunks) == (None, 2)


def test_a_kept_connection_that_was_closed_is_replaced() -> None:
    async def main(url: str) -> list[Result]:
        client = StreamClient(url + "/completions", {})
        results = []
        for _ in range(3):
            results.append(await client.ask(b"{}"))
            await asyncio.sleep(0.05)
        await client.close()
        return results

    with running(lambda number: [*completion("a"), b""]) as server:  # closes without having said so
        results = asyncio.run(main(server.url))
    assert [result.error for result in results] == [None] * 3 and server.connections == 3


def reader(times: list[float]) -> tuple[Result, EventReader]:
    result, clock = Result(0.0), iter(times)
    return result, EventReader(result, lambda: next(clock))


def test_times_of_a_stream() -> None:
    result, stream = reader([1.0, 2.0, 4.0, 9.0])
    stream.feed(event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
    stream.feed(event({"choices": [{"delta": {"reasoning": "hm"}}]}))
    stream.feed(event({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}))
    stream.feed(event({"choices": [{"delta": {}}]}) + event({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}}))
    stream.end()
    assert (result.ttft, result.latency, result.gaps, result.num_chunks) == (2.0, 9.0, [2.0], 2)
    assert (result.num_prompt, result.output_tokens, result.tpot) == (4, 3, 3.5)


def test_chunks_of_several_tokens_count_as_several_where_the_server_tells() -> None:
    result, stream = reader([1.0, 4.0, 5.0])
    for text, told in (("a", 1), ("bcd", 4), ("e", 5)):
        stream.feed(event({"choices": [{"text": text}], "usage": {"prompt_tokens": 2, "completion_tokens": told}}))
    stream.end()
    assert result.gaps == [1.0, 1.0, 1.0, 1.0] and result.output_tokens == 5


def test_sentences_of_errors() -> None:
    assert message_of(b'{"error": {"message": "a"}}') == message_of(b'{"error": "a"}') == message_of(b'{"message": "a"}') == "a"
    assert message_of(b"\xff") == "\ufffd" and message_of(b"[1]") == "[1]" and message_of(b'{"error": null}') == '{"error": null}'


def test_arrivals() -> None:
    assert arrivals(3, float("inf"), 1.0, 0) == [0.0, 0.0, 0.0]
    times = arrivals(2000, 4.0, 1.0, 1)
    assert times == sorted(times) and times[0] == 0.0 and times[-1] == pytest.approx(500, rel=0.1)
    assert times == arrivals(2000, 4.0, 1.0, 1) != arrivals(2000, 4.0, 1.0, 2)

    def variation(burstiness: float) -> float:
        found = arrivals(4000, 4.0, burstiness, 1)
        gaps = [b - a for a, b in itertools.pairwise(found)]
        return statistics.stdev(gaps) / statistics.mean(gaps)

    # Of a gamma distribution: 1 / sqrt(burstiness).
    assert variation(1.0) == pytest.approx(1, rel=0.1) and variation(0.25) == pytest.approx(2, rel=0.15)
    assert variation(16.0) == pytest.approx(0.25, rel=0.1)


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_ramps(strategy: str) -> None:
    rate = serve.rate_of(parsed("--ramp-up-strategy", strategy, "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "9"))
    assert callable(rate) and rate(0) == pytest.approx(1) and rate(1) == pytest.approx(9)
    assert rate(0.5) == pytest.approx(5 if strategy == "linear" else 3)
    times = arrivals(1000, rate, 100.0, 0)
    assert times[100] - times[0] > 3 * (times[999] - times[899])


def test_requests_start_at_their_times() -> None:
    with running(lambda number: completion("a")) as server:
        outcome = run_plan(Plan(Target(server.url + "/completions", {}), [b"{}"] * 4, [0.0, 0.1, 0.2, 0.3]))
    sent = sorted(result.sent for result in outcome.results)
    assert all(at >= wanted for at, wanted in zip(sent, [0.0, 0.1, 0.2, 0.3], strict=True)) and outcome.seconds >= 0.3


def test_several_client_processes_share_the_work() -> None:
    with running(lambda number: completion("a", "b"), pause=0.01) as server:
        plan = Plan(Target(server.url + "/completions", {}), [json.dumps({"n": i}).encode() for i in range(10)], [0.0] * 10, 3)
        outcome = run_plan(plan, 2)
    assert sorted(body["n"] for body in server.bodies) == list(range(10)) and server.most <= 3
    assert len(outcome.results) == 10 and outcome.num_clients == 2 and outcome.cpu_seconds > 0
    assert [plan.part(i, 2).max_concurrency for i in range(2)] == [2, 1]


def test_peak_concurrency() -> None:
    spans = [(0.0, 1.0), (0.5, 1.0), (0.9, 0.2), (1.0, 1.0), (5.0, 1.0)]
    results = [Result(sent, latency=latency) for sent, latency in spans]
    random.Random(0).shuffle(results)
    assert Outcome(results).peak_concurrency == 3 and Outcome().peak_concurrency == 0


def test_goals() -> None:
    good = Result(0.0, ttft=0.1, latency=1.1, num_output=11)
    assert good.tpot == pytest.approx(0.1)
    assert serve_report.num_good([good], [("ttft", 0.2), ("tpot", 0.2), ("e2el", 2.0)]) == 1
    for wrong in (("ttft", 0.05), ("tpot", 0.05), ("e2el", 1.0)):
        assert serve_report.num_good([good], [wrong]) == 0
    assert serve_report.num_good([Result(0.0, ttft=0.1, latency=0.1, num_output=1)], [("tpot", 0.01)]) == 1


def test_a_client_that_is_the_bottleneck_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    results = [Result(0.0, ttft=0.1, latency=1.0, gaps=[0.9], num_prompt=1, num_output=2, num_chunks=2)]
    serve_report.report(parsed(), "m", Outcome(results, seconds=1.0, cpu_seconds=0.9))
    assert "--num-clients" in capsys.readouterr().out
    serve_report.report(parsed(), "m", Outcome(results, seconds=1.0, cpu_seconds=0.9, num_clients=2))
    assert "--num-clients" not in capsys.readouterr().out


def test_metrics_that_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    results = [Result(0.0, ttft=0.1, latency=1.1, gaps=[0.5, 0.5], num_prompt=10, num_output=3, num_chunks=3)]
    serve_report.report(parsed("--percentile-metrics", "tpot,ttft", "--metric-percentiles", "25,50"), "m", Outcome(results, 2.0, 0.1))
    *_, top, _, ttft, tpot = capsys.readouterr().out.strip().splitlines()
    assert top.split() == ["ms", "mean", "median", "std", "p25"] and ttft.split() == ["TTFT", "100", "100", "0", "100"]
    assert tpot.split()[0] == "TPOT" and tpot.split()[1] == "500"


def test_results_are_saved_under_a_name_and_appended(tmp_path: Path) -> None:
    results = [Result(0.0, ttft=0.1, latency=1.1, num_prompt=10, num_output=3, num_chunks=3)]
    words = ("--result-dir", str(tmp_path), "--label", "night", "--metadata", "machine=two cores", "--request-rate", "2")
    serve_report.report(parsed(*words, "--save-result"), "owner/model", Outcome(results, 2.0, 0.1))
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("night-2qps-model-")
    written = json.loads(path.read_text())
    assert (written["label"], written["machine"], written["request_rate"], written["model"]) == ("night", "two cores", 2.0, "owner/model")
    for _ in range(2):
        serve_report.report(parsed(*words, "--append-result", "--result-filename", "all.jsonl"), "m", Outcome(results, 2.0, 0.1))
    assert len([json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]) == 2


def test_random_requests_follow_from_the_seed() -> None:
    namespace = parsed("--random-input-len", "100", "--random-output-len", "50", "--random-range-ratio", "0.5", "--random-prefix-len", "8")
    asks = make_asks(namespace, 200, 1)
    assert asks == make_asks(namespace, 200, 1) != make_asks(namespace, 200, 2)
    lengths = [len(ask.prompt or ()) - 8 for ask in asks]
    assert min(lengths) < 60 and max(lengths) > 140 and all(50 <= length <= 150 for length in lengths)
    assert all(25 <= ask.output_len <= 75 for ask in asks) and len({tuple((ask.prompt or "")[:8]) for ask in asks}) == 1


def test_repeated_prefixes() -> None:
    words = ("--prefix-repetition-prefix-len", "16", "--prefix-repetition-suffix-len", "4", "--prefix-repetition-num-prefixes", "3")
    asks = make_asks(parsed("--dataset-name", "prefix_repetition", *words), 30, 0)
    heads = [tuple((ask.prompt or ())[:16]) for ask in asks]
    assert sorted(heads.count(one) for one in set(heads)) == [10, 10, 10] and len({str(ask.prompt) for ask in asks}) == 30


def test_conversations(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"

    def turns(question: Any, answer: Any) -> dict[str, Any]:
        return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}

    odd = [turns("x", "y"), turns("x" * 9000, "y" * 40), turns(None, "y" * 40), {"conversations": 3}, {}, 7, {"conversations": [1, 2]}]
    path.write_text(json.dumps([turns("q" * 40, "a" * 80), turns("r" * 80, "b" * 400), *odd]))
    words = ("--dataset-name", "sharegpt", "--dataset-path", str(path))
    asks = make_asks(parsed(*words), 5, 0)
    assert {(ask.prompt, ask.output_len) for ask in asks} == {("q" * 40, 20), ("r" * 80, 100)} and len(asks) == 5
    assert {ask.output_len for ask in make_asks(parsed(*words, "--sharegpt-output-len", "9"), 5, 0)} == {9}
    exact = make_asks(parsed(*words, "--tokenizer", str(model_folder())), 5, 0)
    assert {(ask.prompt, ask.output_len) for ask in exact} == {("q" * 40, 80), ("r" * 80, 400)}


def test_lines_of_a_text() -> None:
    asks = make_asks(parsed("--dataset-name", "sonnet"), 3, 0)
    count = token_counter(None)
    texts = [ask.prompt for ask in asks]
    assert all(isinstance(text, str) and 500 <= count(text) <= 700 for text in texts)
    first, second = str(texts[0]).splitlines(), str(texts[1]).splitlines()
    shared = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert 150 <= count("\n".join(first[:shared])) <= 300 and asks[0].output_len == 150


def test_lines_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    entries = [{"prompt": "a"}, {"prompt": [1, 2], "output_tokens": 7}, {"messages": messages}]
    path.write_text("\n\n".join(map(json.dumps, entries)))
    namespace = parsed("--dataset-name", "custom", "--dataset-path", str(path), "--custom-output-len", "5", "--backend", "openai-chat")
    asks = make_asks(namespace, 3, 0)
    assert sorted((str(ask.prompt), ask.output_len) for ask in asks) == [("None", 5), ("[1, 2]", 7), ("a", 5)]
    assert messages in [json.loads(serve.encode(namespace, "m", ask))["messages"] for ask in asks]
    namespace.backend = "openai"
    with pytest.raises(ConfigError, match="--backend openai-chat"):
        [serve.encode(namespace, "m", ask) for ask in asks]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("custom", "", "has no lines"),
        ("custom", "{", "line 1: not JSON"),
        ("custom", "[]", "line 1: expected an object"),
        ("custom", '{"prompt": "a"}\n{"prompt": [1.5]}', "line 2: expected an object"),
        ("custom", '{"prompt": "a", "output_tokens": true}', "output_tokens must be"),
        ("custom", '{"prompt": "a", "output_tokens": 0}', "output_tokens must be"),
        ("sharegpt", "{", "as JSON"),
        ("sharegpt", "{}", "must hold a list"),
        ("sharegpt", "[]", "no conversation"),
    ],
)
def test_files_that_are_none(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        make_asks(parsed("--dataset-name", name, "--dataset-path", str(path)), 1, 0)
    with pytest.raises(ConfigError, match="Can't read"):
        make_asks(parsed("--dataset-name", name, "--dataset-path", str(tmp_path / "no")), 1, 0)
    with pytest.raises(ConfigError, match="needs --dataset-path"):
        make_asks(parsed("--dataset-name", name), 1, 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--request-rate", "0"], "--request-rate: expected a number of at least 0.001, got '0'"),
        (["--request-rate", "nan"], "--request-rate: expected a number of at least 0.001, got 'nan'"),
        (["--burstiness", "0"], "--burstiness: expected a number of at least 0.001, got '0'"),
        (["--max-concurrency", "0"], "--max-concurrency: expected a whole number of at least 1, got '0'"),
        (["--metric-percentiles", "50,x"], "--metric-percentiles: expected numbers from 0 to 100 such as 50,90,99, got '50,x'"),
        (["--percentile-metrics", "ttft,speed"], "expected some of ttft,tpot,itl,e2el, got 'ttft,speed'"),
        (["--goodput", "ttft"], "such as ttft:200, got 'ttft'"),
        (["--goodput", "itl:5"], "expected one of ttft, tpot, e2el"),
        (["--goodput", "ttft:-5"], "such as ttft:200"),
        (["--goodput", "ttft:nan"], "such as ttft:200"),
        (["--header", "X"], "expected NAME=VALUE"),
        (["--header", "X=1\r\nY: 2"], "expected NAME=VALUE on one line"),
        (["--extra-body", "[1]"], "expected a JSON object"),
        (["--json", "no-such-folder/a.json"], "there is no directory 'no-such-folder' to write 'a.json' to"),
        (["--json", "."], "expected a file, got the directory '.'"),
    ],
)
def test_wrong_flags(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parsed(*words)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ramp-up-start-rps", "1"], "need --ramp-up-strategy"),
        (["--ramp-up-strategy", "linear"], "needs --ramp-up-start-rps"),
        (
            ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "2", "--request-rate", "3"],
            "leave it out with --ramp-up-strategy",
        ),
        (["--url", "http://h", "--port", "9"], "Give --url, or --host and --port"),
        (["--url", "ftp://h", "--model", "m"], "Expected an address"),
        (["--endpoint", "v1", "--model", "m"], "--endpoint must begin with /"),
        (["--random-range-ratio", "1"], "--random-range-ratio must be below 1"),
        (["--dataset-name", "sonnet", "--sonnet-prefix-len", "600"], "--sonnet-prefix-len must be below"),
        (["--result-dir", "no-such-folder"], "There is no directory 'no-such-folder'"),
    ],
)
def test_flags_that_contradict(words: list[str], message: str) -> None:
    with pytest.raises(CanterError, match=message):
        serve.run(parsed("--num-prompts", "1", *words))


def test_weights_that_are_not_here_are_told_of_before_the_load() -> None:
    with pytest.raises(CheckpointError, match="neither a directory"):
        serve.run(parsed("--url", "http://localhost:1", "--weights", "nope"))


def test_addresses() -> None:
    def url(*words: str) -> str:
        return serve.target_of(parsed(*words)).url

    assert url() == "http://localhost:8000/v1/completions"
    assert url("--host", "h", "--port", "9", "--backend", "openai-chat") == "http://h:9/v1/chat/completions"
    assert url("--url", "https://h/openai/v2") == "https://h/openai/v2/completions"
    assert url("--url", "http://h:1", "--endpoint", "/x") == "http://h:1/x"


def test_waiting_for_a_server_ends() -> None:
    with pytest.raises(CanterError, match="Can't reach"):
        serve.run(parsed("--url", "http://127.0.0.1:9", "--num-prompts", "1", "--ready-check-timeout-sec", "0.6"))

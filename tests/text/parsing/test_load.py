"""Which format is taken: by name, and by what the chat template and the vocabulary tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from canter.core.errors import ConfigError
from canter.text.parsing.formats import CALLS, THOUGHTS
from canter.text.parsing.load import load_format
from canter.text.parsing.names import REASONING_NAMES, TOOL_NAMES, check_name
from tests.text.parsing.vocabulary import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


@pytest.mark.parametrize("name", sorted({*TOOL_NAMES, *CALLS} - {"hf"}))
def test_every_tool_format_is_read(name: str) -> None:
    found = load_format(TOKENIZER, None, name)
    assert found is not None and found.reads_tools and not found.reads_thoughts
    assert found.description == f"tool calls as {name} (as asked for)"


@pytest.mark.parametrize("name", sorted({*REASONING_NAMES, *THOUGHTS} - {"hf"}))
def test_every_reasoning_format_is_read(name: str) -> None:
    found = load_format(TOKENIZER, None, None, name)
    assert found is not None and found.reads_thoughts and not found.reads_tools


def test_a_name_that_only_vllm_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--tool-call-parser b: Canter can't read this format\. It reads: a\."):
        check_name("b", "--tool-call-parser", {"a"}, {"a", "b"})


def test_the_guide_names_every_format() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "tools.md").read_text(encoding="utf-8")
    assert not [name for name in (*CALLS, *THOUGHTS) if f"`{name}`" not in guide]


def test_a_misspelt_name_meets_its_neighbours() -> None:
    with pytest.raises(ConfigError, match=r"--tool-call-parser hermess: there is no such format\. Did you mean hermes"):
        load_format(TOKENIZER, None, "hermess")
    with pytest.raises(ConfigError, match=r"--reasoning-parser qwen4.*qwen3"):
        load_format(TOKENIZER, None, None, "qwen4")


QWEN = "<|im_start|>{{ enable_thinking }}<think>\n<tool_call>"


@pytest.mark.parametrize(
    ("template", "calls", "thoughts"),
    [
        (QWEN + '{"name": <function-name>, "arguments": <args>}', "hermes", "qwen3"),
        ('<|im_start|><tool_call>{"name": 1, "arguments": 2}', "hermes", None),
        (QWEN + "<function=x><parameter=y>", "qwen3_coder", "qwen3"),
        ("<seed:tool_call><function=x><parameter=y><seed:think>", "seed_oss", "seed_oss"),
        ("<|tool_calls_section_begin|>", "kimi_k2", None),
        ("<|tool_calls_section_begin|><think></think>", "kimi_k2", "kimi_k2"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>\n```json", "deepseek_v3", None),
        ("<｜tool▁call▁begin｜>\n```json<｜Assistant｜><think>\n", "deepseek_v3", "deepseek_r1"),
        ("{{ thinking }}<｜tool▁call▁begin｜></think>", "deepseek_v31", "deepseek_v3"),
        ("<｜DSML｜function_calls>", "deepseek_v32", "deepseek_v3"),
        ("<｜DSML｜tool_calls>", "deepseek_v4", "deepseek_v4"),
        ('<|python_tag|>{"name": 1, "parameters": 2}', "llama3_json", None),
        ("<tool_call>{{ name }}<arg_key><arg_value><think>", "glm45", "glm45"),
        ("<minimax:tool_call><invoke name=", "minimax_m2", "minimax_m2"),
        ("[INST][TOOL_CALLS]", "mistral", None),
        ("[INST][TOOL_CALLS][THINK]", "mistral", "mistral"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "openai", "openai_gptoss"),
        ("<|tool_call>call:<|channel>thought", "gemma4", "gemma4"),
        ("<longcat_tool_call>", "longcat", None),
        ("<|header_start|><|python_start|>[f(a=1)]<|python_end|>", "llama4_pythonic", None),
        ("[func_name1(params_name1=params_value1, params_name2=params_value2...)]", "pythonic", None),
        ("<functions></functions><function_calls></function_calls>", "olmo3", None),
        ("<|start_of_role|>assistant<|tool_call|>", "granite", None),
        ("<|start_of_role|>assistant<|tool_call|>Here is my thought process:", "granite", "granite"),
        ('<|start_of_role|><tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}', "granite4", None),
        ("<function_call>", "granite-20b-fc", None),
        ("functools[{...}]", "phi4_mini_json", None),
        ("<|action_start|><|plugin|>", "internlm", None),
        ("<|bom|><|assistant|><tool_calls>[", "jamba", None),
        ("<think></think><answer><tool_calls>", "hunyuan_a13b", "hunyuan_a13b"),
        ('<think><response><tool_call>{"name": 1, "arguments": 2}', "ernie45", "ernie45"),
        ("function call<|role_sep|><|message_sep|>", "gigachat3", None),
        ("<|tools_prefix|>[", "apertus", None),
        ("<|START_THINKING|><|START_RESPONSE|><|START_ACTION|>", "cohere_command3", "cohere_command3"),
        ("<|START_THINKING|><|START_TEXT|><|START_ACTION|>", "cohere_command4", "cohere_command4"),
        ("<tool_calls{{ s }}><tool_call{{ s }}><tool_sep{{ s }}><arg_key{{ s }}>", "hy_v3", "hy_v3"),
        ('<think><｜tool_calls_begin｜><steptml:invoke name="', "step3", "step3"),
        ('<function name="f"><param name="p">', "minicpm5", None),
        ("<start_function_call>call:", "functiongemma", None),
        ("<assistant><think><tool_call>{{ name }}<arg_key><arg_value>", "poolside_v1", "poolside_v1"),
        ("<|tool_list_start|><|tool_call_start|>", "lfm2", None),
        ("<tool_calls><tool_call>{{ name }}<tool_sep><arg_key><arg_value>", "hy_v3", "hy_v3"),
        ('<mm:think>{{ ns_token }}<invoke name="', "minimax_m3", "minimax_m3"),
        ("<dots_function_call>", "dots", None),
        ("<|open|>think<|sep|>", "kimi_k3", "kimi_k3"),
        ("<｜DSML｜ calls>", "deepseek_v41", "deepseek_v41"),
        ("<tool_calls{{ s }}><tool_call{{ s }}>{{ name }}<arg_key{{ s }}><arg_value{{ s }}>", "hy_v4", "hy_v4"),
        ("<ifm|tool_calls><ifm|tool_call>", "k2_horizon", "k2_horizon"),
        ("<|message_model|><|content_thinking|><|content_invoke_tool_json|>", "inkling", "inkling"),
        ("<|start|>assistant to=self<|message|><atem:function_calls>", "muse_glimmer", "muse_glimmer"),
    ],
)  # fmt: skip
def test_a_format_is_recognised_from_the_template(template: str, calls: str | None, thoughts: str | None) -> None:
    found = load_format(TOKENIZER, template)
    assert found is not None
    parts = [f"tool calls as {calls}"] * bool(calls) + [f"thoughts as {thoughts}"] * bool(thoughts)
    assert found.description == " and ".join(parts) + " (recognised from the chat template)"


def test_markers_in_the_vocabulary_tell_of_thoughts() -> None:
    found = load_format(tiny_tokenizer(("<think>", "</think>")), "{{ messages }}<think>")
    assert found is not None and found.description.startswith("thoughts as think")


@pytest.mark.parametrize("template", [None, "{{ messages }}"])
def test_inkling_is_recognised_from_its_tokens(template: str | None) -> None:
    tokens = ("<|message_model|>", "<|content_thinking|>", "<|content_invoke_tool_json|>")
    found = load_format(tiny_tokenizer((), tokens), template)
    assert found is not None and found.description.startswith("tool calls as inkling and thoughts as inkling (")
    assert load_format(tiny_tokenizer((), tokens[:2]), template) is None


@pytest.mark.parametrize("template", [None, "", "{{ messages }}", "<|im_start|>{{ message.content }}<|im_end|>"])
def test_a_template_that_tells_nothing(template: str | None) -> None:
    assert load_format(TOKENIZER, template) is None


@pytest.mark.parametrize(("calls", "thoughts"), [("hf", None), (None, "hf"), ("hf", "hf"), ("hf", "deepseek_r1")])
def test_hf_stands_for_what_is_recognised(calls: str | None, thoughts: str | None) -> None:
    found = load_format(TOKENIZER, QWEN + "<function=x><parameter=y>", calls, thoughts)
    names = {"calls": "qwen3_coder", "thoughts": "deepseek_r1" if thoughts == "deepseek_r1" else "qwen3"}
    parts = [f"tool calls as {names['calls']}"] * bool(calls) + [f"thoughts as {names['thoughts']}"] * bool(thoughts)
    assert found is not None and found.description == " and ".join(parts) + " (as asked for)"


def test_hf_is_refused_where_nothing_is_recognised() -> None:
    with pytest.raises(ConfigError, match="--tool-call-parser hf: the chat template tells of no tool calls"):
        load_format(TOKENIZER, "{{ messages }}", "hf")
    with pytest.raises(ConfigError, match="--reasoning-parser hf: the chat template tells of no thoughts"):
        load_format(TOKENIZER, "<dots_function_call>", "hf", "hf")


def test_a_name_decides_alone() -> None:
    found = load_format(TOKENIZER, "<|tool_calls_section_begin|>", None, "deepseek_r1")
    assert found is not None and not found.reads_tools

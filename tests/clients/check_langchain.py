"""LangChain's `ChatOpenAI` and `OpenAI`."""

from __future__ import annotations

import openai
from checks import CAPITAL, COUNT, KEY, MODEL, URL, check, raises, run
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

OPTIONS = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": KEY, "temperature": 0, "max_retries": 0}
chat = ChatOpenAI(**OPTIONS, max_tokens=60)


@check
def a_message():
    answer = chat.invoke([SystemMessage("You are brief."), HumanMessage(CAPITAL)])
    assert isinstance(answer, AIMessage) and "Paris" in answer.content
    assert answer.response_metadata["finish_reason"] == "stop" and answer.response_metadata["model_name"] == MODEL
    usage = answer.usage_metadata
    assert usage["input_tokens"] > 10 and usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


@check
def a_stream_adds_up():
    whole = chat.invoke(COUNT)
    chunks = list(ChatOpenAI(**OPTIONS, max_tokens=60, stream_usage=True).stream(COUNT))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert len(chunks) > 5 and total.content == whole.content
    assert total.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


@check
def a_chain_and_a_history():
    prompt = ChatPromptTemplate.from_messages([("user", "What is the capital of {country}? Answer in one sentence.")])
    chain = prompt | chat | StrOutputParser()
    assert "Paris" in chain.invoke({"country": "France"})
    answers = chain.batch([{"country": "France"}, {"country": "Italy"}, {"country": "Spain"}])
    assert "Paris" in answers[0] and "Rome" in answers[1] and "Madrid" in answers[2], answers
    history = [HumanMessage("My name is Robert."), AIMessage("Hello Robert!"), HumanMessage("What is my name?")]
    assert chat.invoke(history).usage_metadata["input_tokens"] > chat.invoke(history[-1:]).usage_metadata["input_tokens"]


@check
async def asynchronously():
    assert "Paris" in (await chat.ainvoke(CAPITAL)).content
    assert len([chunk async for chunk in chat.astream(COUNT)]) > 5


@check
def stops_and_completions():
    answer = chat.invoke(CAPITAL, stop=["Paris"])
    assert "Paris" not in answer.content and answer.response_metadata["finish_reason"] == "stop"
    assert "four" in OpenAI(**OPTIONS, max_tokens=10).invoke("one, two, three,")


@check
def errors():
    error = raises(openai.NotFoundError, ChatOpenAI(**{**OPTIONS, "model": "other"}).invoke, "x")
    assert error.param == "model"
    error = raises(openai.AuthenticationError, ChatOpenAI(**{**OPTIONS, "api_key": "wrong"}).invoke, "x")
    assert error.status_code == 401

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    error = raises(openai.BadRequestError, chat.bind_tools([add]).invoke, "What is 1 + 1?")
    assert "tools" in str(error)


run("langchain-openai")

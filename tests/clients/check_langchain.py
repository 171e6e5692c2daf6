"""LangChain's `ChatOpenAI` and `OpenAI`."""

from __future__ import annotations

import openai
from checks import CAPITAL, COUNT, KEY, MODEL, URL, check, raises, run, shown_how
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

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


class Place(BaseModel):
    """A city and its country."""

    city: str = Field(max_length=20)
    country: str = Field(max_length=20)


def weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


@check
def calls_and_classes():
    chosen = chat.bind_tools([weather]).invoke(shown_how())
    [call] = chosen.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Paris"}) and not chosen.invalid_tool_calls
    total = None
    for chunk in chat.bind_tools([weather]).stream(shown_how()):
        total = chunk if total is None else total + chunk
    assert [(each["name"], each["args"]) for each in total.tool_calls] == [("weather", {"city": "Paris"})]
    after = chat.invoke([*shown_how(), chosen, ToolMessage(weather("Paris"), tool_call_id=call["id"])])
    assert after.response_metadata["finish_reason"] in ("stop", "length")
    roomy = ChatOpenAI(**OPTIONS, max_tokens=120)
    for method in ("function_calling", "json_schema"):
        assert isinstance(roomy.with_structured_output(Place, method=method).invoke(CAPITAL), Place)


@check
def errors():
    error = raises(openai.NotFoundError, ChatOpenAI(**{**OPTIONS, "model": "other"}).invoke, "x")
    assert error.param == "model"
    error = raises(openai.AuthenticationError, ChatOpenAI(**{**OPTIONS, "api_key": "wrong"}).invoke, "x")
    assert error.status_code == 401
    other = {"type": "function", "function": {"name": "other"}}
    error = raises(openai.BadRequestError, chat.bind(tools=[convert_to_openai_tool(weather)], tool_choice=other).invoke, "x")
    assert error.param == "tool_choice"


run("langchain-openai")

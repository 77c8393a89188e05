"""LangChain's OpenAI chat, unmodified."""

import asyncio
import os
from importlib.metadata import version

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

BASE = os.environ["NPUHAL_BASE"] + "/v1"
KEY = os.environ["NPUHAL_KEY"]
MODEL = os.environ["NPUHAL_MODEL"]
QUESTION = "What is the capital of France?"

chat = ChatOpenAI(base_url=BASE, api_key=KEY, model=MODEL, temperature=0, max_tokens=24, stream_usage=True, max_retries=0)
answer = chat.invoke(QUESTION)
assert "Paris" in answer.content, answer
assert answer.usage_metadata["output_tokens"] <= 24, answer
assert answer.response_metadata["model_name"] == MODEL, answer

chunks = list(chat.stream(QUESTION))
assert "".join(chunk.content for chunk in chunks) == answer.content, chunks
total = chunks[0]
for chunk in chunks[1:]:
    total += chunk
assert total.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"], total

answers = chat.batch([QUESTION] * 4)
assert [each.content for each in answers] == [answer.content] * 4, answers

turns = [SystemMessage("Be short."), HumanMessage("Hello."), AIMessage("Hello!"), HumanMessage("Name a colour.")]
assert chat.invoke(turns).content, "an answer to a conversation"
scored = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
entries = scored.response_metadata["logprobs"]["content"]
assert "".join(entry["token"] for entry in entries) == scored.content, entries

chain = ChatPromptTemplate.from_messages([("user", "What is the capital of {country}?")]) | chat | StrOutputParser()
assert "Paris" in chain.invoke({"country": "France"})


async def later():
    assert (await chat.ainvoke(QUESTION)).content == answer.content
    pieces = [piece.content async for piece in chat.astream(QUESTION)]
    assert "".join(pieces) == answer.content, pieces


asyncio.run(later())
text = OpenAI(base_url=BASE, api_key=KEY, model=MODEL, temperature=0, max_tokens=8, max_retries=0)
assert "Paris" in text.invoke("The capital of France is")

try:
    ChatOpenAI(base_url=BASE, api_key="not-the-key", model=MODEL, max_retries=0).invoke(QUESTION)
    raise AssertionError("AuthenticationError was not raised")
except openai.AuthenticationError as error:
    assert error.code == "invalid_api_key", error
print(f"langchain-openai {version('langchain-openai')}: invoke, stream, batch, logprobs, async, text, a wrong key")

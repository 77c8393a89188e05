"""The official OpenAI SDK for Python, unmodified."""

import asyncio
import math
import os

import openai
from openai import AsyncOpenAI, OpenAI

BASE = os.environ["NPUHAL_BASE"] + "/v1"
KEY = os.environ["NPUHAL_KEY"]
MODEL = os.environ["NPUHAL_MODEL"]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]

client = OpenAI(base_url=BASE, api_key=KEY, max_retries=0)
chat = client.chat.completions
checks = 0


def check(condition, what):
    global checks
    assert condition, what
    checks += 1


def raises(kind, call, code, param=None):
    try:
        call()
    except openai.APIStatusError as error:
        check(type(error) is kind, f"wanted {kind.__name__}, found {error!r}")
        check((error.code, error.param) == (code, param), f"{error.code} {error.param}: {error}")
        check(error.request_id.startswith("req-"), error.request_id)
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


# Models.
ids = [model.id for model in client.models.list()]
check(MODEL in ids, ids)
check(client.models.retrieve(MODEL).object == "model", "a model")

# A whole answer.
whole = chat.create(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0)
text = whole.choices[0].message.content
check("Paris" in text, text)
check(whole.choices[0].message.role == "assistant" and whole.choices[0].finish_reason in ("stop", "length"), whole)
check(whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens, whole.usage)
check(whole.usage.completion_tokens <= 24 and whole.usage.prompt_tokens_details.cached_tokens >= 0, whole.usage)
check(whole.model == MODEL and whole.object == "chat.completion" and whole.id.startswith("chatcmpl-"), whole)
check(whole.model_extra["x_npuhal_stats"]["route"], whole.model_extra)
check(whole._request_id.startswith("req-"), whole._request_id)

# The same as a stream.
chunks = list(
    chat.create(
        model=MODEL, messages=QUESTION, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}
    )
)
check(chunks[0].choices[0].delta.role == "assistant", chunks[0])
check("".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text, "the stream says something else")
check(chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens, chunks[-1])
check([c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason, chunks[-2])
check(len({c.id for c in chunks}) == 1 and all(c.usage is None for c in chunks[:-1]), "one id, one count")

# The SDK's own accumulation of a stream.
with chat.stream(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0) as stream:
    pieces = [event.delta for event in stream if event.type == "content.delta"]
    final = stream.get_final_completion()
check("".join(pieces) == text and final.choices[0].message.content == text, final)

# Log probabilities.
scored = chat.create(model=MODEL, messages=QUESTION, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3)
entries = scored.choices[0].logprobs.content
check(len(entries) == scored.usage.completion_tokens, entries)
check(b"".join(bytes(e.bytes) for e in entries).decode() == scored.choices[0].message.content, entries)
for entry in entries:
    check(len(entry.top_logprobs) == 3 and entry.logprob <= 0, entry)
    check(entry.top_logprobs[0].token == entry.token and entry.top_logprobs[0].logprob == entry.logprob, entry)
    check(sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + 1e-9, entry)
streamed = list(
    chat.create(
        model=MODEL, messages=QUESTION, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3, stream=True
    )
)
told = [e for c in streamed for e in (c.choices[0].logprobs.content if c.choices and c.choices[0].logprobs else [])]
check([e.token for e in told] == [e.token for e in entries], told)

# Several answers, drawn, and again from their seed.
drawn = [
    [choice.message.content for choice in chat.create(
        model=MODEL, messages=QUESTION, max_completion_tokens=12, temperature=1.0, top_p=0.9, seed=7, n=2).choices]
    for _ in range(2)
]
check(drawn[0] == drawn[1] and drawn[0][0] != drawn[0][1], drawn)

# Stop strings, parts, roles, an earlier turn without a text.
stopped = chat.create(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0, stop=["Paris"])
check("Paris" not in stopped.choices[0].message.content and stopped.choices[0].finish_reason == "stop", stopped)
parts = [
    {"role": "developer", "content": [{"type": "text", "text": "Be short."}]},
    {"role": "user", "content": [{"type": "text", "text": "Hello."}]},
    {"role": "assistant", "content": None},
    {"role": "user", "content": "Name a colour."},
]
check(chat.create(model=MODEL, messages=parts, max_tokens=4).choices[0].message.content is not None, "an answer")

# Texts.
prompt = "The capital of France is"
text_answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0, logprobs=2)
continuation = text_answer.choices[0].text
logprobs = text_answer.choices[0].logprobs
check("Paris" in continuation and text_answer.object == "text_completion", text_answer)
check("".join(logprobs.tokens) == continuation, logprobs)
lists = (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)
check({len(each) for each in lists} == {text_answer.usage.completion_tokens}, logprobs)
check(all(len(top) == 2 for top in logprobs.top_logprobs), logprobs)
echoed = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0, echo=True)
check(echoed.choices[0].text == prompt + continuation, echoed)
chunks = list(client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0, stream=True))
check("".join(c.choices[0].text for c in chunks) == continuation, chunks)

# Errors become the SDK's own.
stranger = OpenAI(base_url=BASE, api_key="not-the-key", max_retries=0)
raises(openai.AuthenticationError, stranger.models.list, "invalid_api_key")
raises(openai.AuthenticationError, lambda: stranger.chat.completions.create(model=MODEL, messages=QUESTION), "invalid_api_key")
raises(openai.NotFoundError, lambda: client.models.retrieve("none"), "model_not_found", "model")
raises(openai.NotFoundError, lambda: chat.create(model="none", messages=QUESTION), "model_not_found", "model")
raises(openai.NotFoundError, lambda: client.embeddings.create(model=MODEL, input="x"), "not_found")
raises(openai.BadRequestError, lambda: chat.create(model=MODEL, messages=QUESTION, temperature=9), "invalid_value", "temperature")
raises(openai.BadRequestError, lambda: chat.create(model=MODEL, messages=[]), "invalid_value", "messages")
raises(openai.BadRequestError, lambda: chat.create(model=MODEL, messages=QUESTION, n=99, stream=True), "invalid_value", "n")
long = [{"role": "user", "content": "a b " * 8000}]
error = raises(openai.BadRequestError, lambda: chat.create(model=MODEL, messages=long), "context_length_exceeded", "messages")
check("8192" in str(error), error)
huge = [{"role": "user", "content": "x" * (2 << 20)}]
raises(openai.APIStatusError, lambda: chat.create(model=MODEL, messages=huge), "request_too_large")

# A stream that is given up; the next request is answered.
with chat.create(model=MODEL, messages=QUESTION, max_tokens=4000, temperature=1.5, stream=True) as stream:
    for _, _chunk in zip(range(3), stream):
        pass


async def side_by_side():
    async with AsyncOpenAI(base_url=BASE, api_key=KEY, max_retries=0) as client:
        asked = [client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0) for _ in range(4)]
        answers = await asyncio.gather(*asked)
        check([answer.choices[0].message.content for answer in answers] == [text] * 4, answers)
        stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0, stream=True)
        check("".join([c.choices[0].delta.content or "" async for c in stream]) == text, "the stream says something else")


asyncio.run(side_by_side())
print(f"openai {openai.__version__}: {checks} checks")

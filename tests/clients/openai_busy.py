"""How the SDK sees a server that has no place left: RateLimitError with Retry-After, and its own retries."""

import os
import threading
import time

import openai
from openai import OpenAI

BASE = os.environ["NPUHAL_BASE"] + "/v1"
MODEL = os.environ["NPUHAL_MODEL"]
QUESTION = [{"role": "user", "content": "Tell a long story."}]

client = OpenAI(base_url=BASE, api_key=os.environ["NPUHAL_KEY"], max_retries=0)
long = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=4000, temperature=1.2, stream=True)
next(iter(long))
try:
    client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=4)
    raise AssertionError("RateLimitError was not raised")
except openai.RateLimitError as error:
    assert error.status_code == 429 and error.code == "queue_full", error
    assert error.type == "server_overloaded" and error.response.headers["retry-after"] == "1", error
# What is not refused for want of a place: everything else.
assert client.models.retrieve(MODEL).id == MODEL
threading.Timer(1.5, long.close).start()
started = time.monotonic()
patient = client.with_options(max_retries=5)
answer = patient.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=4)
assert answer.usage.completion_tokens <= 4, answer
print(f"openai {openai.__version__}: refused, and answered after {time.monotonic() - started:.1f} s of its own retries")

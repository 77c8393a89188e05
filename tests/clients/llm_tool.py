"""Simon Willison's llm, unmodified, set up as docs/clients.md shows."""

import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

LLM = sys.argv[1]
BASE = os.environ["NPUHAL_BASE"]
MODEL = os.environ["NPUHAL_MODEL"]

with tempfile.TemporaryDirectory() as folder:
    environment = {**os.environ, "LLM_USER_PATH": folder}
    page = Path(__file__).parents[2].joinpath("docs/clients.md").read_text()
    settings = page.split("```yaml\n- model_id")[1].split("```")[0]
    settings = settings.replace("http://127.0.0.1:8000", BASE).replace("smollm2-135m", MODEL)
    Path(folder, "extra-openai-models.yaml").write_text("- model_id" + settings)

    def llm(*arguments, fails=False):
        done = subprocess.run([LLM, *arguments], env=environment, input="", capture_output=True, text=True, timeout=120)
        assert (done.returncode != 0) == fails, (arguments, done)
        return done.stderr if fails else done.stdout

    llm("keys", "set", "npuhal", "--value", os.environ["NPUHAL_KEY"])
    models = llm("models", "list")
    assert "npuhal" in models and "npuhal-text" in models, models
    settings = ("-o", "temperature", "0", "-o", "max_tokens", "24")
    question = "What is the capital of France?"
    streamed = llm("-m", "npuhal", *settings, question)
    assert "Paris" in streamed, streamed
    assert llm("-m", "npuhal", "--no-stream", *settings, question) == streamed
    assert llm("-c", *settings, "Say that again.").strip(), "the conversation goes on"
    assert llm("-m", "npuhal", "-s", "Be short.", *settings, "Name a colour.").strip(), "with a system message"
    text = llm("-m", "npuhal-text", "-o", "temperature", "0", "-o", "max_tokens", "8", "The capital of France is")
    assert "Paris" in text, text
    refused = llm("-m", "npuhal", "--key", "not-the-key", question, fails=True)
    assert "missing or invalid bearer token" in refused, refused
    logged = llm("logs", "list", "-n", "1", "--usage")
    assert "Token usage" in logged or "input" in logged, logged
print(f"llm {version('llm')}: chat, stream, conversation, text, a wrong key")

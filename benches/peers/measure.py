#!/usr/bin/env python3
"""Measures npuhal against llama.cpp, OpenVINO and candle on one machine and writes docs/performance.md.

See README.md beside this file. Needs Python 3.10 or later, a C++ compiler and cargo; what it installs goes to --work.
"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import platform
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time

LLAMA = "llama-cpp-python==0.3.36"
OPENVINO = "openvino-genai==2026.4.1.0"
CANDLE = "candle-transformers =0.11.1"

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent

MODELS = {
    "smollm2-135m": "SmolLM2-135M-Instruct Q4_1",
    "qwen2.5-coder-0.5b": 'Qwen2.5-Coder-0.5B-Instruct "Q4_K_M"',
}
FILES = {
    "smollm2-135m": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "qwen2.5-coder-0.5b": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
}
TESTS = ["pp32", "pp128", "pp512", "tg0", "tg512"]
TEST_NAMES = {
    "pp32": "prefill 32",
    "pp128": "prefill 128",
    "pp512": "prefill 512",
    "tg0": "decode at 0",
    "tg512": "decode at 512",
    "ttft32": "start to first token (32 ids), ms",
    "rss": "peak memory, MiB",
}
# Decoded tokens of a decode test.
TG = 32
# Numbers of sequences of a batched decode.
BATCHES = (4, 8)
# What a peer cannot run at all, or only in minutes a round.
LEFT_OUT = {
    ("candle", "qwen2.5-coder-0.5b"): {"pp512", "tg512"},
    ("openvino", "qwen2.5-coder-0.5b"): {*TESTS, "ttft32"},
}

# What an issue asks of the ratio to the peer: (numerics, model, test) -> {peer: ratio at 1 and 2 threads}.
GOALS = {
    ("fast", "smollm2-135m", "tg0"): {"llama": (2.5, 2.5)},
    ("int8", "smollm2-135m", "tg0"): {"llama": (3.0, 3.0)},
    ("fast", "qwen2.5-coder-0.5b", "tg0"): {"llama": (1.7, 1.9)},
    ("int8", "qwen2.5-coder-0.5b", "tg0"): {"llama": (2.1, 2.1)},
    ("fast", "smollm2-135m", "tg512"): {"llama": (2.7, 2.7)},
    ("int8", "smollm2-135m", "tg512"): {"llama": (3.3, 3.3)},
    ("fast", "qwen2.5-coder-0.5b", "tg512"): {"llama": (1.8, 1.8)},
    ("int8", "qwen2.5-coder-0.5b", "tg512"): {"llama": (2.1, 2.1)},
    ("fast", "smollm2-135m", "pp128"): {"llama": (3.0, 3.0), "openvino": (1.4, 1.4)},
    ("int8", "smollm2-135m", "pp128"): {"llama": (5.0, 5.0), "openvino": (2.3, 2.3)},
    ("fast", "smollm2-135m", "pp512"): {"llama": (2.7, 2.7)},
    ("int8", "smollm2-135m", "pp512"): {"llama": (4.2, 4.2)},
    ("fast", "qwen2.5-coder-0.5b", "pp128"): {"llama": (1.8, 1.8)},
    ("int8", "qwen2.5-coder-0.5b", "pp128"): {"llama": (2.8, 2.8)},
    ("fast", "qwen2.5-coder-0.5b", "pp512"): {"llama": (1.8, 1.8)},
    ("int8", "qwen2.5-coder-0.5b", "pp512"): {"llama": (2.8, 2.8)},
}


def ids(count, vocab_size):
    """The ids of `npuhal bench`."""
    state, out = 42, []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        out.append((state >> 33) % vocab_size)
    return out


# ---- peers: each runs in a process of its own and prints a JSON line a test ------------------------------------------


def emit(test, **values):
    print(json.dumps({"test": test, **values}), flush=True)


def number_of(test):
    return int(test.lstrip("abcdefghijklmnopqrstuvwxyz"))


def peer_llama(path, threads, tests):
    """llama.cpp through its C interface: no sampling, argmax by NumPy."""
    import llama_cpp as lib
    import numpy

    started = time.perf_counter()
    quiet = lib.llama_log_callback(lambda *_: None)  # kept: the library calls it later
    lib.llama_log_set(quiet, None)
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 1024, 512, 512
    params.n_threads = params.n_threads_batch = threads
    context = lib.llama_init_from_model(model, params)
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))

    def run(tokens):
        array = (lib.llama_token * len(tokens))(*tokens)
        if lib.llama_decode(context, lib.llama_batch_get_one(array, len(tokens))) != 0:
            raise RuntimeError("llama_decode failed")
        logits = lib.llama_get_logits_ith(context, -1)
        return int(numpy.ctypeslib.as_array(logits, shape=(vocab_size,)).argmax())

    def clear():
        lib.llama_memory_clear(lib.llama_get_memory(context), True)

    def timed(work):
        start = time.perf_counter()
        result = work()
        return time.perf_counter() - start, result

    if not any(test.startswith("ttft") for test in tests):
        run(ids(8, vocab_size))
        clear()
    cached = (0, 0)
    for test in tests:
        number = number_of(test)
        if test.startswith("ttft"):
            run(ids(number, vocab_size))
            emit(test, ms=(time.perf_counter() - started) * 1e3)
        elif test.startswith("pp"):
            clear()
            seconds, token = timed(lambda: run(ids(number, vocab_size)))
            cached = (number, token)
            emit(test, tps=number / seconds)
        else:
            token = ids(1, vocab_size)[0]
            if cached[0] != number or number == 0:
                clear()
                if number:
                    cached = (number, run(ids(number, vocab_size)))
            if number:
                token = cached[1]
            start = time.perf_counter()
            for _ in range(TG):
                token = run([token])
            emit(test, tps=TG / (time.perf_counter() - start))
            cached = (0, 0)


def peer_openvino(path, threads, tests):
    """OpenVINO GenAI on the same GGUF file; its own figures of prefill and decode."""
    import numpy
    import openvino
    import openvino_genai

    started = time.perf_counter()
    options = {"INFERENCE_NUM_THREADS": threads, "CACHE_DIR": ""}
    pipe = openvino_genai.LLMPipeline(path, "CPU", **options)
    vocab_size = len(pipe.get_tokenizer().get_vocab())

    def run(count, new):
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.min_new_tokens, config.ignore_eos, config.do_sample = new, new, True, False
        tokens = numpy.array([ids(count, vocab_size)], dtype=numpy.int64)
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(tokens), openvino.Tensor(numpy.ones_like(tokens))
        )
        return pipe.generate(inputs, config).perf_metrics

    if not any(test.startswith("ttft") for test in tests):
        run(8, 2)
    for test in tests:
        number = number_of(test)
        if test.startswith("ttft"):
            run(number, 1)
            emit(test, ms=(time.perf_counter() - started) * 1e3)
        elif test.startswith("pp"):
            emit(test, tps=number / run(number, 1).get_ttft().mean * 1e3)
        else:
            emit(test, tps=1e3 / run(max(number, 1), TG + 1).get_tpot().mean)


# ---- the driver ------------------------------------------------------------------------------------------------------


class Bed:
    """What is installed where."""

    def __init__(self, work):
        self.work = work
        self.python = work / "venv" / "bin" / "python"
        self.candle = work / "candle-target" / "release" / "candle-peer"
        self.npuhal = pathlib.Path(os.environ.get("NPUHAL", ROOT / "target" / "release" / "npuhal"))
        self.models = pathlib.Path(
            os.environ.get("NPUHAL_MODELS_DIR")
            or pathlib.Path(os.environ.get("XDG_DATA_HOME") or pathlib.Path.home() / ".local/share") / "npuhal/models"
        )

    def model(self, name):
        path = self.models / FILES[name]
        if not path.exists():
            sys.exit(f"there is no {path}; get it with: npuhal pull {name}")
        return str(path)

    def command(self, peer, model, threads, tests):
        """Command and environment of one run."""
        path = self.model(model)
        if peer in ("llama", "openvino"):
            return [self.python, __file__, "--peer", peer, path, str(threads), *tests], {}
        if peer == "candle":
            return [self.candle, path, str(TG), *tests], {"RAYON_NUM_THREADS": str(threads)}
        common = [self.npuhal, "bench", "-m", path, "--numerics", peer, "--threads", str(threads)]
        if tests == ["ttft32"]:
            return [*common, "--ttft", "32"], {}
        prefill = ",".join(str(number_of(test)) for test in tests if test.startswith("pp"))
        depths = ",".join(str(number_of(test)) for test in tests if test.startswith("tg"))
        return [*common, "--pp", prefill, "--tg", str(TG), "--depths", depths, "--rounds", "1", "--jsonl"], {}

    def batch(self, numerics, model, threads):
        """Decoding of one sequence and of several at once, in one run."""
        command = [self.npuhal, "bench", "-m", self.model(model), "--numerics", numerics, "--threads", str(threads)]
        numbers = ",".join(map(str, BATCHES))
        command += ["--tg", "48", "--depths", "0", "--parallel", "1," + numbers, "--rounds", "3", "--jsonl"]
        return self.execute(numerics, model, command, {})

    def run(self, peer, model, threads, tests):
        """Runs one peer once; results by test, peak memory as `rss`."""
        command, environment = self.command(peer, model, threads, tests)
        results = self.execute(peer, model, command, environment)
        if tests != ["ttft32"]:
            results.pop("rss")
        return results

    def execute(self, peer, model, command, environment):
        process = subprocess.Popen(
            [str(part) for part in command],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        errors = []
        drain = threading.Thread(target=lambda: errors.extend(process.stderr.read().splitlines()[-5:]))
        drain.start()
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        drain.join()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise RuntimeError(f"{peer} on {model} ended with {process.returncode}: " + " | ".join(errors))
        results = {}
        for line in output.splitlines():
            if line.startswith("{"):
                line = json.loads(line)
                name = re.sub(r"^tg\d+x(\d+)@d0$", r"x\1", line["test"])
                name = re.sub(r"^tg\d+@d", "tg", name)
                if "tps" in line or "ms" in line:
                    results[name] = line.get("tps", line.get("ms"))
                if "share_of_read_loop" in line:
                    results[name + " share"] = line["share_of_read_loop"]
        results["rss"] = usage.ru_maxrss / 1024
        return results

    def install(self, what):
        self.work.mkdir(parents=True, exist_ok=True)
        if {"llama", "openvino"} & what and not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", self.work / "venv"], check=True)
        pip = [self.python, "-m", "pip", "install", "--quiet"]
        if "llama" in what and not self.installed(LLAMA):
            environment = {**os.environ, "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"}
            subprocess.run([*pip, "--no-binary", "llama-cpp-python", LLAMA], check=True, env=environment)
        if "openvino" in what and not self.installed(OPENVINO):
            subprocess.run([*pip, OPENVINO], check=True)
        if "candle" in what and not self.candle.exists():
            source = self.work / "candle"
            shutil.copytree(HERE / "candle", source, dirs_exist_ok=True)
            environment = {
                **os.environ,
                "RUSTFLAGS": "-C target-cpu=native",
                "CARGO_TARGET_DIR": str(self.work / "candle-target"),
            }
            subprocess.run(["cargo", "build", "--release", "--quiet"], cwd=source, check=True, env=environment)

    def installed(self, requirement):
        name, version = requirement.split("==")
        query = "import importlib.metadata as m, sys; sys.exit(m.version(sys.argv[1]) != sys.argv[2])"
        return subprocess.run([self.python, "-c", query, name, version], stderr=subprocess.DEVNULL).returncode == 0


def units(only, models, threads, ours):
    """What one round measures, in order: each peer beside each of our numerics."""
    for model in models:
        for count in threads:
            for peer in only:
                for numerics in ours:
                    yield model, count, numerics, peer


class State:
    """Results so far: a JSON line each, so that a broken run is continued."""

    def __init__(self, path):
        self.path = path
        self.commit = commit()
        self.lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def commits(self):
        """Of the measured builds."""
        return ", ".join(dict.fromkeys(line["commit"] for line in self.lines))

    def has(self, key):
        return any(line["key"] == key for line in self.lines)

    def add(self, key, **values):
        self.lines.append({"key": key, "commit": self.commit, **values})
        with self.path.open("a") as file:
            file.write(json.dumps(self.lines[-1]) + "\n")

    def longest(self, unit):
        return max((line["seconds"] for line in self.lines if line["key"][1:] == unit), default=0)

    def own(self, model, threads, numerics, kind):
        """Our results of a kind that has no peer."""
        return [line["ours"] for line in self.lines if line["key"][1:] == [model, threads, numerics, "", kind]]


def measure(bed, state, args):
    """Runs what is missing until done or --budget is used up; whether all is there."""
    for round_number in range(args.rounds):
        for model, threads, numerics, peer in units(args.only, args.models, args.threads, args.numerics):
            left_out = LEFT_OUT.get((peer, model), set())
            rates = [test for test in TESTS if test not in left_out]
            start_test = [test for test in ["ttft32"] if test not in left_out]
            for kind, tests in (("rates", rates), ("start", start_test)):
                if not tests:
                    continue
                key = [round_number, model, threads, numerics, peer, kind]
                if state.has(key):
                    continue
                spent = time.monotonic() - args.begin
                if args.budget and spent + 1.2 * state.longest(key[1:]) > args.budget and spent > 0:
                    return False
                start = time.monotonic()
                try:
                    # Who goes first alternates, so that a drift of the machine meets both.
                    order = [numerics, peer] if round_number % 2 == 0 else [peer, numerics]
                    results = {who: bed.run(who, model, threads, tests) for who in order}
                except RuntimeError as error:
                    state.add(key, seconds=time.monotonic() - start, error=str(error))
                    print(error, file=sys.stderr)
                    continue
                seconds = time.monotonic() - start
                state.add(key, seconds=seconds, ours=results[numerics], theirs=results[peer])
                print(f"round {round_number}: {model} {threads}T {numerics} beside {peer}: {kind}, {seconds:.0f} s", flush=True)
    return True


def measure_alone(bed, state, args):
    """Our own batched decode, and decode beside a process that never sleeps; whether all is there."""
    for round_number in range(args.rounds):
        for model in args.models:
            for numerics in args.numerics:
                for kind, threads in [*(("batch", count) for count in args.threads), ("busy", max(args.threads))]:
                    key = [round_number, model, threads, numerics, "", kind]
                    if state.has(key):
                        continue
                    if args.budget and time.monotonic() - args.begin + 1.2 * state.longest(key[1:]) > args.budget:
                        return False
                    start = time.monotonic()
                    if kind == "batch":
                        ours = bed.batch(numerics, model, threads)
                    else:
                        ours = {"quiet 1": bed.run(numerics, model, 1, ["pp32", "tg0"])["tg0"]}
                        with neighbour():
                            ours["busy"] = bed.run(numerics, model, threads, ["pp32", "tg0"])["tg0"]
                            ours["busy 1"] = bed.run(numerics, model, 1, ["pp32", "tg0"])["tg0"]
                    state.add(key, seconds=time.monotonic() - start, ours=ours)
                    print(f"round {round_number}: {model} {threads}T {numerics}: {kind}", flush=True)
    return True


@contextlib.contextmanager
def neighbour():
    """A process that never sleeps."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait()


def median(values):
    return statistics.median(values) if values else None


def cell(value, digits=0):
    return "–" if value is None else f"{value:.{digits}f}"


def machine():
    """Processor, memory and kernel; no host name."""
    name, flags = "unknown processor", set()
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.split(":")[1].strip()
        if line.startswith("flags"):
            flags = set(line.split(":")[1].split())
    memory = 0
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal"):
            memory = int(line.split()[1]) / 2**20
    wanted = ["avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni"]
    has = ", ".join(flag for flag in wanted if flag in flags)
    virtual = ", a virtual machine" if "hypervisor" in flags else ""
    cores = len(os.sched_getaffinity(0))
    return f"{name}{virtual}, {cores} cores ({has}), {memory:.0f} GiB, Linux {platform.release()}"


def commit():
    run = lambda *args: subprocess.run(["git", "-C", ROOT, *args], capture_output=True, text=True).stdout.strip()
    dirty = run("status", "--porcelain", "--untracked-files=no", "--", "backends", "models", "app", "core", "registry")
    return (run("rev-parse", "--short=12", "HEAD") or "unknown") + (" with changes" if dirty else "")


def pairs(state, model, threads, numerics, peer, test):
    """(ours, theirs) of every round that has both."""
    found = []
    for line in state.lines:
        if line["key"][1:5] == [model, threads, numerics, peer] and "theirs" in line:
            if test in line["ours"] and test in line["theirs"]:
                found.append((line["ours"][test], line["theirs"][test]))
    return found


def our_values(state, model, threads, numerics, test):
    lines = [line for line in state.lines if line["key"][1:4] == [model, threads, numerics] and "theirs" in line]
    return [line["ours"][test] for line in lines if test in line["ours"]]


def table(state, model, args):
    """One model: a line a test; ours, each peer, ratio to each peer."""
    peers = [peer for peer in ("llama", "openvino", "candle") if peer in args.only]
    names = {"llama": "llama.cpp", "openvino": "OpenVINO", "candle": "candle"}
    head = ["test", "threads"] + [f"`{numerics}`" for numerics in args.numerics] + [names[peer] for peer in peers]
    head += [f"`{numerics}` / {names[peer]}" for peer in peers for numerics in args.numerics]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for test in [*TESTS, "ttft32", "rss"]:
        for threads in args.threads:
            row = [TEST_NAMES[test], f"{threads}"]
            row += [cell(median(our_values(state, model, threads, numerics, test))) for numerics in args.numerics]
            for peer in peers:
                theirs = [pair[1] for numerics in args.numerics for pair in pairs(state, model, threads, numerics, peer, test)]
                row.append(cell(median(theirs)))
            for peer in peers:
                for numerics in args.numerics:
                    found = pairs(state, model, threads, numerics, peer, test)
                    ratio = median([ours / theirs for ours, theirs in found])
                    goal = GOALS.get((numerics, model, test), {}).get(peer)
                    text = cell(ratio, 2)
                    if ratio is not None and goal:
                        wanted = goal[args.threads.index(threads) if len(args.threads) == 2 else threads - 1]
                        text += f" (≥ {wanted})" if ratio >= wanted else f" (**wanted ≥ {wanted}**)"
                    if ratio is not None and test == "ttft32" and peer == "llama":
                        text += " (≤ 0.45)" if ratio <= 0.45 else " (**wanted ≤ 0.45**)"
                    row.append(text)
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def shares(state, args):
    head = ["model", "threads", "read loop, tokens/s"] + [f"`{numerics}`" for numerics in args.numerics]
    lines = ["| " + " | ".join([*head, "read loop / llama.cpp"]) + " |", "|" + "---|" * (len(head) + 1)]
    for model in args.models:
        for threads in args.threads:
            loops, ceilings = [], []
            for line in state.lines:
                if line["key"][1:3] == [model, threads] and line.get("ours", {}).get("tg0 share"):
                    loop = line["ours"]["tg0"] / line["ours"]["tg0 share"]
                    loops.append(loop)
                    if line["key"][4] == "llama":
                        ceilings.append(loop / line["theirs"]["tg0"])
            row = [MODELS[model], f"{threads}", cell(median(loops))]
            for numerics in args.numerics:
                value = median(our_values(state, model, threads, numerics, "tg0 share"))
                row.append(cell(value and 100 * value) + " %")
            lines.append("| " + " | ".join([*row, cell(median(ceilings), 2)]) + " |")
    return "\n".join(lines)


def batches(state, args):
    head = ["model", "numerics", "threads", "1 sequence"] + [f"{count} sequences" for count in BATCHES]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    wanted = dict(zip(BATCHES, (2.5, 4.0)))
    for model in args.models:
        for numerics in args.numerics:
            for threads in args.threads:
                found = state.own(model, threads, numerics, "batch")
                row = [MODELS[model], f"`{numerics}`", str(threads), cell(median([ours["x1"] for ours in found]))]
                for count in BATCHES:
                    rate = median([ours[f"x{count}"] for ours in found])
                    gain = median([ours[f"x{count}"] / ours["x1"] for ours in found])
                    goal = f"≥ {wanted[count]}" if gain and gain >= wanted[count] else f"**wanted ≥ {wanted[count]}**"
                    row.append(f"{cell(rate)}: {cell(gain, 2)} × ({goal})")
                lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def neighbours(state, args):
    threads = max(args.threads)
    head = ["model", "numerics", "1 thread, quiet", "1 thread, busy", f"{threads} threads, busy", "to 1 thread, quiet"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for model in args.models:
        for numerics in args.numerics:
            found = state.own(model, threads, numerics, "busy")
            ratio = median([ours["busy"] / ours["quiet 1"] for ours in found])
            goal = "≥ 0.9" if ratio and ratio >= 0.9 else "**wanted ≥ 0.9**"
            rates = [cell(median([ours[name] for ours in found])) for name in ("quiet 1", "busy 1", "busy")]
            lines.append("| " + " | ".join([MODELS[model], f"`{numerics}`", *rates, f"{cell(ratio, 2)} ({goal})"]) + " |")
    return "\n".join(lines)


def failures(state):
    seen = {}
    for line in state.lines:
        if "error" in line:
            seen.setdefault(" ".join(map(str, line["key"][1:])), line["error"])
    return "\n".join(f"- {key}: {error}" for key, error in sorted(seen.items()))


def report(state, args, notes):
    rounds = 1 + max((line["key"][0] for line in state.lines), default=-1)
    parts = [
        "# Speed of the CPU backend beside its peers",
        "Written by `benches/peers/measure.py`; do not edit, but for `benches/peers/notes.md`, which becomes the last section.",
        f"- Machine: {machine()}.\n- Date: {datetime.date.today().isoformat()}. Commit: {state.commits()}.\n"
        f"- Peers: llama.cpp ({LLAMA}, built natively), OpenVINO ({OPENVINO}, from the same GGUF file), candle "
        f"({CANDLE}, built natively).",
        "## Method",
        f"{rounds} rounds. In each, every peer runs beside each of our numerics as a pair of processes, one after the other; who "
        "goes first alternates from round to round. A cell is the median over the rounds; a ratio is the median of the pairs' "
        "ratios, so that a drift of the machine meets both sides. Rates are tokens a second of the whole engine: `prefill N` is one "
        f"call over N ids of a fixed generator on an empty cache with one argmax, `decode at D` is {TG} single steps behind D ids, "
        "each argmax feeding the next. f16 keys and values everywhere. `start to first token` is, for ours, from the start of the "
        "command to the argmax behind 32 ids, for the peers from the call that loads the model (the start of the interpreter and its "
        "imports left out); the file is in the page cache. `peak memory` is the process's largest resident set in that run, the "
        "interpreter included where there is one; lower is better for both. Ratios are ours to theirs.",
    ]
    for model in args.models:
        parts += [f"## {MODELS[model]}", table(state, model, args)]
    parts += [
        "## Share of the memory's limit",
        "Decode at 0: bytes of packed weights a token times tokens a second, as a share of a loop that only reads as many bytes with as "
        "many threads, in alternating rounds of one run. The last column is the ratio to llama.cpp that an engine without any arithmetic "
        "would reach: where it is below a wanted ratio, this machine's memory, not the engine, is what the goal asks to be faster.",
        shares(state, args),
    ]
    parts += [
        "## Batched decode",
        "Rows of one forward, each of a sequence of its own; tokens a second of all together, and as a multiple of one sequence in the "
        "same run.",
        batches(state, args),
        "## Beside a busy neighbour",
        "Decode at 0 while another process never sleeps.",
        neighbours(state, args),
    ]
    failed = failures(state)
    if failed:
        parts += ["## What did not run", failed]
    if notes.exists():
        parts.append(notes.read_text().strip())
    return "\n\n".join(parts) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "target" / "peers", help="where peers and results are kept")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=["llama", "openvino", "candle"], choices=["llama", "openvino", "candle"])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--numerics", nargs="+", default=["fast", "int8"])
    parser.add_argument("--budget", type=float, default=0, help="seconds after which to stop; run again to go on")
    parser.add_argument("--install-only", action="store_true")
    parser.add_argument("--report-only", action="store_true")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "docs" / "performance.md")
    args = parser.parse_args()
    args.begin = time.monotonic()
    bed = Bed(args.work)
    if not args.report_only:
        bed.install(set(args.only))
    if args.install_only:
        return 0
    results = args.work / "results.jsonl"
    if args.fresh:
        results.unlink(missing_ok=True)
    state = State(results)
    done = args.report_only or (measure(bed, state, args) and measure_alone(bed, state, args))
    args.output.write_text(report(state, args, HERE / "notes.md"))
    print(f"{'complete' if done else 'stopped at the budget; run again to go on'}: {args.output}")
    return 0 if done else 3


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        _, _, name, path, threads, *tests = sys.argv
        {"llama": peer_llama, "openvino": peer_openvino}[name](path, int(threads), tests)
    else:
        sys.exit(main())

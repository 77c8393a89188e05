"""Makes hub/*.json: small tokenizers of every kind with texts and the ids that the `tokenizers` library gives them.

usage: python make_tokenizers.py [tokenizer.json of Qwen3]        (tokenizers 0.22)

The tokenizers are trained here, on the sentences below. Of Qwen3's (Apache-2.0) only what the published cases need is kept:
bytes, added tokens, and every merge that takes part in one of them; ids stay.
"""
import json, pathlib, sys
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).parent
OUT = HERE / "hub"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind the fox at all.",
    "the cat sat on the mat; the rat sat on the cat. That is what the hat said to the bat.",
    "In the beginning there was text, and the text was with the reader, and the reader was patient.",
    "def main(args):\n    return sum(int(a) for a in args)\n\n\tprint('hello, world')\n",
    "Zahlen: 1, 12, 123, 1234, 12345; naïve café, Übergröße, 你好世界, こんにちは.",
] * 4
TEXTS = [
    "", " ", "a", " a", "  a", "a ", "the", " the cat", "The cat sat on the mat.", "the\n\n\nthe  the   the\tthe",
    "1234567 12 3", "café naïve", "cafe\u0301 e\u0301", "你好，世界！", "🙂🚀 e🙂", "it's we'll I'M DON'T", "<s>the</s>", "x<think>the cat</think> y",
    " <think> the", "</s></s> the", "ﬁne ①", "the<mask> cat", "the <mask>cat", "\u2581the", "<0x41> <unk>", "\r\n \r\n", "a\u00a0b", "foo_bar::baz(qux);",
]
SPECIALS = [AddedToken("<unk>", special=True, normalized=False), AddedToken("<s>", special=True, normalized=False), AddedToken("</s>", special=True, normalized=False)]
BYTES = [f"<0x{b:02X}>" for b in range(256)]


def save(name, tokenizer, edit=None, texts=TEXTS):
    data = json.loads(tokenizer.to_str())
    if edit:
        edit(data)
        tokenizer = Tokenizer.from_str(json.dumps(data))
    cases = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        tokenizer.encode_special_tokens = True
        plain = tokenizer.encode(text, add_special_tokens=False).ids
        tokenizer.encode_special_tokens = False
        cases.append({"text": text, "ids": ids, "plain": plain, "shown": tokenizer.decode(ids, skip_special_tokens=False), "hidden": tokenizer.decode(ids, skip_special_tokens=True)})
    path = OUT / f"{name}.json"
    path.write_text(json.dumps({"tokenizer": data, "cases": cases}, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(name, len(data["model"]["vocab"]), path.stat().st_size)


def trained(model, trainer, normalizer=None, pre_tokenizer=None, decoder=None):
    tokenizer = Tokenizer(model)
    if normalizer: tokenizer.normalizer = normalizer
    if pre_tokenizer: tokenizer.pre_tokenizer = pre_tokenizer
    if decoder: tokenizer.decoder = decoder
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_level(name, normalizer, pre, ignore_merges=False):
    t = trained(models.BPE(ignore_merges=ignore_merges), trainers.BpeTrainer(vocab_size=420, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()), normalizer, pre, decoders.ByteLevel())
    t.add_special_tokens(SPECIALS[1:])
    t.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False), AddedToken("<mask>", normalized=False, lstrip=True)])
    save(name, t)


def pieces(name, normalizer, pre, decoder, fallback=True):
    t = trained(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=fallback), trainers.BpeTrainer(vocab_size=560 if fallback else 300, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"] + (BYTES if fallback else [])), normalizer, pre, decoder)
    def edit(data):
        data["added_tokens"] = [a for a in data["added_tokens"] if not a["content"].startswith("<0x")]
        n = len(data["model"]["vocab"])
        data["added_tokens"] += [{"id": n + i, "content": c, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False} for i, c in enumerate(["<think>", "</think>"])]
        data["added_tokens"].append({"id": n + 2, "content": "<mask>", "single_word": False, "lstrip": True, "rstrip": False, "normalized": False, "special": True})
    save(name, t, edit)


def qwen3(path):
    full = json.loads(pathlib.Path(path).read_text())
    ranks = {tuple(m): r for r, m in enumerate(full["model"]["merges"])}
    tokenizer = Tokenizer.from_file(path)
    cases = json.loads((HERE / "qwen3_tokenizer_golden.json").read_text())["cases"]
    texts = [c["text"] for c in cases]
    for line in (HERE / "qwen3_cases_subset.tsv").read_text().splitlines():
        if not line.startswith("#") and line:
            texts.append(bytes.fromhex(line.split("\t")[0]).decode())
    texts.append(json.loads((HERE / "qwen3-0.6b-capitals.json").read_text())["prompt"] + json.loads((HERE / "qwen3-0.6b-capitals.json").read_text())["continuation"])
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    kept, used = set(alphabet), set()
    for text in texts:
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text)):
            symbols = list(word)
            while True:
                ranked = [(ranks[p], i) for i, p in enumerate(zip(symbols, symbols[1:])) if p in ranks]
                if not ranked: break
                rank, i = min(ranked)
                used.add(rank)
                symbols[i:i + 2] = [symbols[i] + symbols[i + 1]]
            kept.update(symbols)
    for rank in used:
        a, b = full["model"]["merges"][rank]
        kept.update([a, b, a + b])
    full["model"]["vocab"] = {t: i for t, i in full["model"]["vocab"].items() if t in kept}
    full["model"]["merges"] = [full["model"]["merges"][r] for r in sorted(used)]
    path = OUT / "qwen3_excerpt.json"
    path.write_text(json.dumps(full, ensure_ascii=False, separators=(",", ":")) + "\n")
    print("qwen3", len(kept), len(used), path.stat().st_size)


OUT.mkdir(exist_ok=True)
byte_level("byte_level_gpt2", None, pre_tokenizers.ByteLevel(add_prefix_space=False))
byte_level("byte_level_llama3", None, pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), True)
byte_level("byte_level_nfc", normalizers.NFC(), pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]))
byte_level("byte_level_digits", None, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]))
mark = "\u2581"
llama_decoder = decoders.Sequence([decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
gemma_decoder = decoders.Sequence([decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse()])
pieces("pieces_llama2", normalizers.Sequence([normalizers.Prepend(mark), normalizers.Replace(" ", mark)]), None, llama_decoder)
pieces("pieces_gemma", normalizers.Replace(" ", mark), pre_tokenizers.Split(" ", "merged_with_previous"), gemma_decoder)
pieces("pieces_metaspace_first", None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False), llama_decoder)
pieces("pieces_metaspace_always", None, pre_tokenizers.Metaspace(prepend_scheme="always", split=True), decoders.Metaspace(prepend_scheme="always"), fallback=False)
t = trained(models.Unigram(), trainers.UnigramTrainer(vocab_size=200, show_progress=False, unk_token="<unk>", special_tokens=["<unk>", "<s>", "</s>"]), normalizers.NFKC(), pre_tokenizers.Metaspace(prepend_scheme="always", split=True), decoders.Metaspace(prepend_scheme="always"))
save("unigram", t)
t = trained(models.Unigram(), trainers.UnigramTrainer(vocab_size=200, show_progress=False, unk_token="<unk>", special_tokens=["<unk>", "<s>", "</s>"]), normalizers.Sequence([normalizers.Prepend(mark), normalizers.Replace(" ", mark)]), None, llama_decoder)
def with_bytes(data):
    data["model"]["vocab"] += [[b, -30.0] for b in BYTES]
    data["model"]["byte_fallback"] = True
save("unigram_bytes", t, with_bytes)
if len(sys.argv) > 1:
    qwen3(sys.argv[1])

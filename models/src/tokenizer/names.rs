//! What the pre-tokenizer names of GGUF files stand for: the published patterns of the families, one cut after the other.

use crate::text_error::TextError;
use crate::text_rules::{Behavior, Cut, Pattern, Spelling, TextRules, TokenModel};

/// Names that [`named_rules`] knows, for messages.
const SUPPORTED: &str = "gpt-2, smollm, qwen2, qwen35, llama-bpe, smaug-bpe, dbrx, tekken, gpt-4o, refact, starcoder, \
                         command-r, olmo, stablelm2, seed-coder, viking, deepseek-llm, deepseek-coder, deepseek-v3 and their \
                         aliases, default";

/// Contractions of English; words and numbers, each with the space before; other characters; white space.
pub(super) const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Digits one by one; line breaks stay with what precedes them.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// As Qwen 2, with line breaks apart from what precedes them.
const SEED_CODER: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
/// What lies between punctuation, with the space before; then digits one by one.
const VIKING: &[&str] = &[r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"];
/// As Qwen 2, with combining marks as parts of words.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// As Qwen 2, with up to three digits together.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Words end where a capital begins another.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// As Tekken, with contractions and up to three digits.
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Letters with case, by ranges; punctuation of ASCII, its wide forms and general punctuation; Chinese, Japanese and Korean.
const DEEPSEEK_LLM: &[&str] = &[
    "[\r\n]",
    // Escapes where composition would turn one letter into another.
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
    r"\p{N}+",
];
const DEEPSEEK_CODER: &[&str] = &["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"];
const DEEPSEEK_V3: &[&str] = &[
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];

/// The patterns behind a name.
pub(crate) fn patterns(name: &str) -> Option<&'static [&'static str]> {
    Some(match name {
        "gpt-2" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion" | "granite-docling" | "exaone4" | "gigachat"
        | "a.x-4.0" | "mellum" | "default" | "" => &[GPT2],
        "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b" => &[r"\p{N}", GPT2],
        "qwen2" | "deepseek-r1-qwen" | "kormo" | "stablelm2" | "megrez" => &[QWEN2],
        "qwen35" => &[QWEN35],
        "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2"
        | "smaug-bpe" | "dbrx" | "glm4" | "chatglm-bpe" => &[LLAMA3],
        "tekken" => &[TEKKEN],
        "gpt-4o" | "llama4" => &[GPT4O],
        "seed-coder" => &[SEED_CODER],
        "viking" => VIKING,
        "deepseek-llm" => DEEPSEEK_LLM,
        "deepseek-coder" => DEEPSEEK_CODER,
        "deepseek-v3" => DEEPSEEK_V3,
        _ => return None,
    })
}

/// Whether a GGUF file with this pre-tokenizer that does not say so starts texts with bos.
pub(crate) fn adds_bos(name: &str) -> bool {
    takes_whole_words(name)
}

/// Whether a word that is in the vocabulary is taken whole, whatever the merges say.
pub(crate) fn takes_whole_words(name: &str) -> bool {
    matches!(
        name,
        "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2" | "tekken"
    )
}

/// The rules of byte-level BPE with the pre-tokenizer `name`.
///
/// # Errors
/// [`TextError::UnsupportedPreTokenizer`].
pub(crate) fn named_rules(name: &str) -> Result<TextRules, TextError> {
    let Some(patterns) = patterns(name) else {
        return Err(TextError::UnsupportedPreTokenizer { name: name.to_owned(), supported: SUPPORTED });
    };
    Ok(TextRules {
        normalizers: Vec::new(),
        cuts: patterns.iter().map(|pattern| isolated(pattern)).collect(),
        model: TokenModel::Bpe { whole_words: takes_whole_words(name), byte_fallback: false, fuse_unknown: false },
        spelling: Spelling::ByteLevel,
    })
}

/// A cut by `pattern` whose matches are pieces of their own.
pub(super) fn isolated(pattern: &str) -> Cut {
    Cut::Pattern { pattern: Pattern::Regex(pattern.to_owned()), behavior: Behavior::Isolated, invert: false }
}

/// The pattern of GPT-2, which `tokenizer.json` files mean without spelling it.
pub(crate) fn gpt2_cut() -> Cut {
    isolated(GPT2)
}

/// What a user should know of a file that names its pre-tokenizer so.
pub(super) fn note(name: &str) -> Option<String> {
    let found = match name {
        "" => "the model file names no pre-tokenizer",
        "default" => "the model file names the pre-tokenizer \"default\"",
        _ => return None,
    };
    Some(format!("{found}; gpt-2's is used, which may not be the one the model was trained with"))
}

//! The vocabulary as a file states it, before a tokenizer is built from it.

use crate::text_rules::TextRules;
use npuhal_core::stage::TokenId;
use std::collections::BTreeMap;

/// Kind of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TokenKind {
    /// Ordinary text.
    Normal,
    /// Stands for unknown text.
    Unknown,
    /// Control token: produced by templates only, hidden from output.
    Control,
    /// Added token that is text: matched whole, shown in output.
    UserDefined,
    /// Never used.
    Unused,
    /// A single byte (SentencePiece byte fallback).
    Byte,
}

/// Everything a file says about its tokens.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Vocabulary {
    /// Tokenizer model: `gpt2` for byte-level BPE, `llama` for SentencePiece BPE, …
    pub model: String,
    /// Pre-tokenizer name; empty where the file states none.
    pub pre_tokenizer: String,
    /// Token texts (byte-level alphabet for `gpt2`), by id.
    pub tokens: Vec<String>,
    /// Token kinds, by id; as many as tokens.
    pub kinds: Vec<TokenKind>,
    /// Token scores, by id; empty where the file has none.
    pub scores: Vec<f32>,
    /// Merges, `left right`, by rank.
    pub merges: Vec<String>,
    /// Beginning-of-sequence id.
    pub bos: Option<TokenId>,
    /// Ids that end a generation: eos, eot, eom and their like, united from every place the file states them; ascending.
    pub eos: Vec<TokenId>,
    /// The one of them that the file calls its eos token, which templates know as `eos_token`.
    pub eos_token: Option<TokenId>,
    /// Id for unknown text.
    pub unknown: Option<TokenId>,
    /// Padding id.
    pub padding: Option<TokenId>,
    /// Whether text is to start with the bos id.
    pub add_bos: bool,
    /// Whether a space is put before the text (SentencePiece).
    pub add_space_prefix: bool,
    /// How added tokens are matched, where a file says more of them than their kind.
    pub matching: BTreeMap<TokenId, Matching>,
    /// How text becomes tokens.
    pub rules: RulesSource,
    /// The chat template, Jinja.
    pub chat_template: Option<String>,
    /// Further chat templates by name; `tool_use` is the one for conversations with tools.
    pub named_templates: BTreeMap<String, String>,
}

/// How an added token is matched.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Matching {
    /// Takes the white space before it.
    pub strips_left: bool,
    /// Takes the white space behind it.
    pub strips_right: bool,
    /// Is matched only between characters that are no part of a word.
    pub whole_word: bool,
    /// Is looked for after normalisation.
    pub normalized: bool,
}

/// Where the rules of a vocabulary's text stand.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum RulesSource {
    /// In the names of tokenizer model and pre-tokenizer, as in GGUF files.
    #[default]
    Named,
    /// In the file itself, as in `tokenizer.json`.
    Declared(Box<TextRules>),
    /// In the file itself, with something that is not implemented: its name.
    Refused(String),
}

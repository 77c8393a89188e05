//! The vocabulary as a file states it, before a tokenizer is built from it.

use npuhal_core::stage::TokenId;

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
    /// The chat template, Jinja.
    pub chat_template: Option<String>,
}

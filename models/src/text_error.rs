//! Errors of tokenizers and chat templates.

use crate::clip::{Clipped, Quoted};
use npuhal_core::stage::TokenId;
use std::time::Duration;
use thiserror::Error;

/// A text that cannot be encoded, a vocabulary that cannot be used, or a template that fails.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TextError {
    /// The file's tokenizer model is not implemented.
    #[error("tokenizer model {} is not supported; supported: {supported}", Quoted(model))]
    UnsupportedModel {
        /// What the file states.
        model: String,
        /// What there is.
        supported: &'static str,
    },
    /// The file's pre-tokenizer is not implemented.
    #[error("pre-tokenizer {} is not supported; supported: {supported}", Quoted(name))]
    UnsupportedPreTokenizer {
        /// What the file states.
        name: String,
        /// What there is.
        supported: &'static str,
    },
    /// The vocabulary contradicts itself.
    #[error(
        "vocabulary: {field}: wanted {}, found {}; the model file is damaged or badly converted",
        Clipped(wanted),
        Clipped(found)
    )]
    Vocabulary {
        /// Part of the vocabulary.
        field: &'static str,
        /// What was expected.
        wanted: String,
        /// What there is.
        found: String,
    },
    /// The text has a byte for which the vocabulary has no token.
    #[error("the vocabulary has no token for byte {byte:#04x} of the text; this model cannot read it")]
    NoTokenForByte {
        /// The byte.
        byte: u8,
    },
    /// The text has a character for which the vocabulary has no token.
    #[error(
        "the vocabulary has no token for {character:?}, none for its bytes and none for unknown text; this model cannot read it"
    )]
    NoTokenForCharacter {
        /// The character.
        character: char,
    },
    /// A part of a tokenizer that is declared and not implemented.
    #[error("the tokenizer declares {}, which is not supported; its ids would be wrong without it", Clipped(feature))]
    UnsupportedFeature {
        /// What the file declares.
        feature: String,
    },
    /// A pattern that cuts text into words and cannot be used.
    #[error("the tokenizer's pattern {pattern:?} cannot be used: {reason}")]
    Pattern {
        /// The pattern, shortened.
        pattern: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A pattern looks so far ahead at every place that a text takes for ever.
    #[error(
        "cutting the text into words took more than {limit:?}; the tokenizer's pattern is not made for texts of this length"
    )]
    SlowPattern {
        /// The limit.
        limit: Duration,
    },
    /// A file of a tokenizer is damaged.
    #[error("{}: {}", Clipped(file), Clipped(reason))]
    TokenizerFile {
        /// Which file.
        file: String,
        /// What is wrong, and where.
        reason: String,
    },
    /// The tokenizer library failed.
    #[error("tokenizer: {reason}")]
    Encode {
        /// What it said.
        reason: String,
    },
    /// An id that is not in the vocabulary.
    #[error("token id {id} is not in the vocabulary of {vocab_size}")]
    UnknownId {
        /// The id.
        id: TokenId,
        /// Tokens there are.
        vocab_size: usize,
    },
    /// The model has no chat template and none of the built-in ones fits.
    #[error(
        "the model has no chat template and its vocabulary fits none of the built-in ones ({builtin}): it is not a chat \
         model; give the text as a raw completion instead of messages (npuhal run --raw)"
    )]
    NotAChatModel {
        /// Names of the built-in templates.
        builtin: &'static str,
    },
    /// The template is no valid Jinja.
    #[error("chat template, line {line}: {reason}\n  {text}")]
    TemplateSyntax {
        /// Line, from 1.
        line: usize,
        /// What is wrong.
        reason: String,
        /// That line of the template.
        text: String,
    },
    /// The template itself refused the conversation, by `raise_exception`.
    #[error("the model's chat template refuses this conversation: {message}")]
    TemplateRaised {
        /// The template's words.
        message: String,
    },
    /// The template failed while rendering.
    #[error("chat template, line {line}: {reason}\n  {text}")]
    TemplateFailed {
        /// Line, from 1.
        line: usize,
        /// What happened.
        reason: String,
        /// That line of the template.
        text: String,
    },
    /// The conversation is not of the form templates take.
    #[error("{field}: wanted {wanted}, found {found}")]
    Conversation {
        /// Part of the conversation.
        field: String,
        /// What was expected.
        wanted: &'static str,
        /// What there is.
        found: String,
    },
    /// The messages use every character that could mark what is not to be a control token.
    #[error("the messages use every private-use character of Unicode; remove some")]
    NoSeal,
    /// The template needed more steps, or made more text, than any real one does.
    #[error(
        "chat template stopped: it exceeds {limit} {what}; the conversation is too long for it, or it loops without end"
    )]
    TemplateLimit {
        /// What is limited.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
}

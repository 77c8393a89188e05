//! From conversations and texts to the ids of a prompt: whole, or cut to the context at hand.

use crate::package::{Family, PackageError};
use crate::source::{Format, ModelSource};
use crate::template::{ChatInput, ChatTemplate, encode_chat};
use crate::text_error::TextError;
use crate::tokenizer::{Specials, Tokenizer};
use crate::window::{
    ChatMl, FirstTurn, Fitted, Overflow, PromptTruncation, Truncation, WindowError, budget_beside, fit, fit_text,
};
use npuhal_core::stage::TokenId;
use thiserror::Error;

/// A conversation or text that is no prompt.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PromptError {
    /// The model is of a family without a template of its lane.
    #[error(transparent)]
    Package(Box<PackageError>),
    /// It cannot be fitted, encoded or rendered.
    #[error(transparent)]
    Window(#[from] WindowError),
}

impl From<TextError> for PromptError {
    fn from(error: TextError) -> Self {
        Self::Window(error.into())
    }
}

/// A prompt within a context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt<T> {
    /// Its ids.
    pub ids: Vec<TokenId>,
    /// What was lost.
    pub truncation: T,
    /// Tokens of all that was given.
    pub whole_tokens: usize,
}

impl<T> Prompt<T> {
    fn new(fitted: Fitted<T>, whole_tokens: usize) -> Self {
        Self { ids: fitted.ids, truncation: fitted.truncation, whole_tokens }
    }
}

/// How messages become ids: by the model's template, or for xdna1 packages by the lane's own.
#[derive(Debug, Clone)]
pub struct Prompter {
    tokenizer: Tokenizer,
    form: Form,
}

#[derive(Debug, Clone)]
enum Form {
    Lane(ChatMl),
    Template(ChatTemplate),
}

impl Prompter {
    /// That of `model`.
    ///
    /// # Errors
    /// [`PromptError`] where the model has no template that can be used.
    pub fn new(model: &ModelSource, tokenizer: &Tokenizer) -> Result<Self, PromptError> {
        let form = if model.format() == Format::Xdna1Package {
            let family = Family::from_model_type(&model.config().model_type);
            let family = family.map_err(|error| PromptError::Package(Box::new(error)))?;
            Form::Lane(ChatMl::new(tokenizer, family.default_system())?)
        } else {
            Form::Template(ChatTemplate::from_vocabulary(model.vocabulary())?)
        };
        Ok(Self { tokenizer: tokenizer.clone(), form })
    }

    /// The ids of the whole conversation.
    ///
    /// # Errors
    /// [`PromptError::Window`].
    pub fn whole(&self, input: &ChatInput) -> Result<Vec<TokenId>, PromptError> {
        match &self.form {
            Form::Lane(chat) => Ok(chat.fit(&input.messages, usize::MAX, Overflow::Error)?.ids),
            Form::Template(template) => Ok(encode_chat(&self.tokenizer, template, input)?),
        }
    }

    /// The ids of the conversation in a context of `positions`, beside an answer of `max_tokens` ([`budget_beside`]).
    ///
    /// # Errors
    /// [`PromptError::Window`].
    pub fn fitted(
        &self,
        input: &ChatInput,
        max_tokens: Option<usize>,
        positions: usize,
        overflow: Overflow,
    ) -> Result<Prompt<Truncation>, PromptError> {
        let whole_tokens = self.whole(input)?.len();
        let budget = budget_beside(max_tokens, whole_tokens, positions);
        let fitted = match &self.form {
            Form::Lane(chat) => chat.fit(&input.messages, budget, overflow)?,
            Form::Template(template) => fit(&input.messages, budget, overflow, FirstTurn::User, |messages| {
                let input = ChatInput { messages: messages.to_vec(), ..input.clone() };
                Ok::<_, PromptError>(encode_chat(&self.tokenizer, template, &input)?)
            })?,
        };
        Ok(Prompt::new(fitted, whole_tokens))
    }
}

/// The token that begins every text of the model, where it has one.
#[must_use]
pub fn text_start(tokenizer: &Tokenizer) -> Option<TokenId> {
    tokenizer.bos().filter(|_| tokenizer.add_bos())
}

/// The ids of a text without a template, behind [`text_start`].
///
/// # Errors
/// As [`Tokenizer::encode`].
pub fn text_ids(tokenizer: &Tokenizer, text: &str, specials: Specials) -> Result<Vec<TokenId>, TextError> {
    let mut ids: Vec<TokenId> = text_start(tokenizer).into_iter().collect();
    tokenizer.encode_into(text, specials, &mut ids)?;
    Ok(ids)
}

/// The ids of a plain text in a context of `positions`, beside an answer of `max_tokens` ([`budget_beside`]).
///
/// # Errors
/// [`WindowError::TooLong`].
pub fn fitted_text(
    ids: &[TokenId],
    max_tokens: Option<usize>,
    positions: usize,
    overflow: Overflow,
) -> Result<Prompt<PromptTruncation>, WindowError> {
    let budget = budget_beside(max_tokens, ids.len(), positions);
    Ok(Prompt::new(fit_text(ids, budget, overflow)?, ids.len()))
}

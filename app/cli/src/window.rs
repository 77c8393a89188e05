//! Prompts for the window at hand: conversations and texts as ids, cut where the context cannot hold them.

use crate::Host;
use crate::args::GenerationArgs;
use crate::error::CliError;
use crate::thoughts;
use npuhal_models::package::Family;
use npuhal_models::source::Format;
use npuhal_models::template::{ChatInput, ChatMessage, ChatTemplate, encode_chat};
use npuhal_models::window::{ChatMl, Fitted, WindowError, fit, fit_text};
use npuhal_models::{ModelSource, Tokenizer};
use serde::Serialize;

/// Tokens of an answer that a cut prompt leaves room for where no limit is given, but never more than half of the context.
const USUAL_ANSWER_TOKENS: usize = 128;

/// How messages become ids: by the model's template, or for xdna1 packages by the lane's own.
pub(crate) struct Prompter {
    tokenizer: Tokenizer,
    form: Form,
}

enum Form {
    Lane(ChatMl),
    Template(ChatTemplate),
}

impl Prompter {
    pub(crate) fn new(model: &ModelSource, tokenizer: &Tokenizer) -> Result<Self, CliError> {
        let form = if model.format() == Format::Xdna1Package {
            let family = Family::from_model_type(&model.config().model_type)?;
            Form::Lane(ChatMl::new(tokenizer, family.default_system())?)
        } else {
            Form::Template(ChatTemplate::from_vocabulary(model.vocabulary())?)
        };
        Ok(Self { tokenizer: tokenizer.clone(), form })
    }

    /// The ids of the whole conversation.
    pub(crate) fn whole(&self, args: &GenerationArgs, messages: &[ChatMessage]) -> Result<Vec<u32>, CliError> {
        match &self.form {
            Form::Lane(chat) => Ok(chat.fit(messages, usize::MAX, args.context_overflow)?.ids),
            Form::Template(_) => self.render(args, messages),
        }
    }

    /// The ids of the conversation within a context of `positions`; what was lost is said.
    pub(crate) fn fitted(
        &self,
        host: &Host,
        args: &GenerationArgs,
        messages: &[ChatMessage],
        positions: usize,
    ) -> Result<Vec<u32>, CliError> {
        let whole = self.whole(args, messages)?.len();
        let budget = budget(args, whole, positions);
        let fitted = match &self.form {
            Form::Lane(chat) => chat.fit(messages, budget, args.context_overflow)?,
            Form::Template(_) => fit(messages, budget, args.context_overflow, |messages| self.render(args, messages))?,
        };
        if fitted.truncation.is_lossy() {
            tell(host, whole, positions, &fitted);
        }
        Ok(fitted.ids)
    }

    fn render(&self, args: &GenerationArgs, messages: &[ChatMessage]) -> Result<Vec<u32>, CliError> {
        let input = thoughts::ask(args, ChatInput::new(messages.to_vec()));
        match &self.form {
            Form::Lane(chat) => Ok(chat.render(messages)?),
            Form::Template(template) => Ok(encode_chat(&self.tokenizer, template, &input)?),
        }
    }
}

/// The ids of a plain text within a context of `positions`; what was lost is said.
pub(crate) fn fitted_text(
    host: &Host,
    args: &GenerationArgs,
    ids: Vec<u32>,
    positions: usize,
) -> Result<Vec<u32>, WindowError> {
    let fitted = fit_text(&ids, budget(args, ids.len(), positions), args.context_overflow)?;
    if fitted.truncation.truncated_prompt {
        tell(host, ids.len(), positions, &fitted);
    }
    Ok(fitted.ids)
}

fn tell<T: Serialize>(host: &Host, whole: usize, positions: usize, fitted: &Fitted<T>) {
    let record = serde_json::to_string(&fitted.truncation).unwrap_or_default();
    let kept = fitted.ids.len();
    host.voice.note(format_args!("the prompt keeps {kept} of {whole} tokens in a context of {positions}: {record}"));
}

/// Prompt tokens that leave room for the answer.
fn budget(args: &GenerationArgs, whole: usize, positions: usize) -> usize {
    match args.max_tokens.map(|tokens| tokens as usize).filter(|tokens| *tokens < positions) {
        Some(answer) => positions - answer,
        // No limit that the context could keep: an answer of some length, where the prompt does not fit as it is.
        None if whole < positions => positions - 1,
        None => positions - USUAL_ANSWER_TOKENS.min(positions / 2).min(positions.saturating_sub(1)),
    }
}

//! Prompts for the window at hand, as the flags ask; what was cut is said.

use crate::Host;
use crate::args::GenerationArgs;
use crate::error::CliError;
use crate::thoughts;
use npuhal_models::prompter::{self, Prompt, Prompter};
use npuhal_models::template::{ChatInput, ChatMessage};
use npuhal_models::window::WindowError;
use serde::Serialize;

/// The ids of the whole conversation.
pub(crate) fn whole_chat(
    prompter: &Prompter,
    args: &GenerationArgs,
    messages: &[ChatMessage],
) -> Result<Vec<u32>, CliError> {
    Ok(prompter.whole(&input(args, messages))?)
}

/// The ids of the conversation within a context of `positions`; what was lost is said.
pub(crate) fn fitted_chat(
    host: &Host,
    prompter: &Prompter,
    args: &GenerationArgs,
    messages: &[ChatMessage],
    positions: usize,
) -> Result<Vec<u32>, CliError> {
    let input = input(args, messages);
    let prompt = prompter.fitted(&input, max_tokens(args), positions, args.context_overflow)?;
    if prompt.truncation.is_lossy() {
        tell(host, positions, &prompt);
    }
    Ok(prompt.ids)
}

/// The ids of a plain text within a context of `positions`; what was lost is said.
pub(crate) fn fitted_text(
    host: &Host,
    args: &GenerationArgs,
    ids: &[u32],
    positions: usize,
) -> Result<Vec<u32>, WindowError> {
    let prompt = prompter::fitted_text(ids, max_tokens(args), positions, args.context_overflow)?;
    if prompt.truncation.truncated_prompt {
        tell(host, positions, &prompt);
    }
    Ok(prompt.ids)
}

fn input(args: &GenerationArgs, messages: &[ChatMessage]) -> ChatInput {
    thoughts::ask(args, ChatInput::new(messages.to_vec()))
}

fn max_tokens(args: &GenerationArgs) -> Option<usize> {
    args.max_tokens.map(|tokens| tokens as usize)
}

fn tell<T: Serialize>(host: &Host, positions: usize, prompt: &Prompt<T>) {
    let record = serde_json::to_string(&prompt.truncation).unwrap_or_default();
    let (kept, whole) = (prompt.ids.len(), prompt.whole_tokens);
    host.voice.note(format_args!("the prompt keeps {kept} of {whole} tokens in a context of {positions}: {record}"));
}
